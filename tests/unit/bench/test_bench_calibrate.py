"""What is asked of a server to fit the planner to it, and what becomes of the answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ekiden.bench import calibrate
from ekiden.bench.calibrate import LONG, OUTPUT, Look, looks
from ekiden.bench.host import this_host
from ekiden.bench.result import ReplicaShare, Service
from ekiden.bench.workload import Shape
from ekiden.core.errors import SetupError
from ekiden.measures.spread import Spread


def test_no_look_is_longer_or_wider_than_the_server_takes() -> None:
    found = list(looks(longest=300, most=4))
    assert [look.shape.prompt for look in found if look.what == "ttft"] == [16, 64, 256]
    assert [look.together for look in found if look.what == "itl"] == [1, 2, 4]
    assert all(sum(look.shape) <= 300 for look in found)


def test_short_and_long_contexts_are_decoded() -> None:
    wide = [look for look in looks(longest=2100, most=16) if look.what == "itl"]
    assert {look.shape.prompt for look in wide} == {32, LONG}


def test_a_prompt_is_its_time_to_the_first_token_and_decoding_the_gap_between_tokens() -> None:
    level: Any = SimpleNamespace(
        ttft_from_send_ms=Spread(p50=120.0), itl_ms=Spread(p50=30.0), tpot_ms=Spread(p50=999.0)
    )
    prompt = Look(what="ttft", shape=Shape(256, 1)).point(level)
    assert (prompt.tokens, prompt.seconds) == (256, 0.12)
    token = Look(what="itl", shape=Shape(32, OUTPUT), together=4).point(level)
    assert (token.tokens, token.sequences, token.seconds) == (32 + OUTPUT // 2, 4, 0.03)


def test_a_host_has_rates_that_a_processor_can_have() -> None:
    here = this_host(1)
    assert 0.5 < here.bandwidth_gbps < 1000
    assert 0.0005 < here.bf16_tflops < 100
    assert here.memory_gib > 0.5


@pytest.mark.parametrize("names", [("prefill-0", "decode-0"), ("decode-0", "decode-1")])
async def test_a_deployment_of_several_replicas_is_not_taken_for_one(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = [ReplicaShare(role="r", replica=name, requests=1, tokens=1) for name in names]
    level: Any = SimpleNamespace(service=Service(replicas=shares))

    async def seen(*_: Any) -> Any:
        return level

    monkeypatch.setattr(calibrate, "look_at", seen)
    look = Look(what="ttft", shape=Shape(16, 1))
    with pytest.raises(SetupError, match=f"{' and '.join(sorted(names))} answered"):
        await calibrate.measure(cast("Any", None), [look], lambda *_: None, lambda _: None)
