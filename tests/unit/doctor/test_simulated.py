"""From a result of a simulation to one situation a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ekiden.doctor.evidence import Experts, Situation
from ekiden.doctor.results import read
from ekiden.doctor.simulated import experts
from ekiden.measures.experts import Balancedness, ExpertLoad, balancedness
from ekiden.measures.run import Samples
from ekiden.measures.spread import Spread
from ekiden.sim.figures import SCHEMA, Figures, Pool

MS = Spread(count=40, mean=50.0, p50=40.0, p95=60.0, p99=70.0)
EVEN = Balancedness(p50=0.9, p95=0.8, worst=0.7)
LOAD = ExpertLoad(
    steps=300, tokens=[[10, 30], [20, 20]], balancedness=EVEN, dispatch_share=0.25
)  # fmt: skip
NONE = Samples(
    index=[], scheduled_s=[], ttft_ms=[], tpot_ms=[], e2e_ms=[], prompt_tokens=[],
    output_tokens=[], error=[],
)  # fmt: skip


def told(path: Path, **more: Any) -> Situation:
    """What doctor makes of a file as the simulator writes it."""
    pool: dict[str, Any] = {
        "replicas": 1, "gpu_hours": 1.0, "busy_share": 0.5, "link_share": 0.0, "imbalance": 1.0,
    }  # fmt: skip
    given: dict[str, Any] = {
        "name": "1:2", "requests": 42, "left_out": 0, "succeeded": 40, "errors": {"http_503": 2},
        "error_rate": 0.05, "duration_s": 9.0, "requests_per_s": 4.0, "output_tokens_per_s": 400.0,
        "total_tokens_per_s": 800.0, "ttft_ms": MS, "tpot_ms": MS, "e2e_ms": MS, "goodput": None,
        "prompt_tokens": Spread(mean=100.0), "output_tokens": Spread(mean=10.0),
        "phases_ms": {"queue": Spread(mean=12.0)}, "prompt_sources": {"local_computed": 3000},
        "cache_hit_share": 0.0, "fallbacks": {"prefill_retry": 1}, "preemptions": 2, "killed": 0,
        "moved_bytes": 0, "samples": NONE,
        "pools": [Pool(role="prefill", **pool), Pool(role="decode", **pool, experts=LOAD)],
    }  # fmt: skip
    run = Figures(**(given | more))
    path.write_bytes(msgspec.json.encode({"schema": SCHEMA, "seed": 0, "runs": [run]}))
    (found,) = read(path)
    return found


def test_what_users_would_have_felt_is_in_seconds(tmp_path: Path) -> None:
    found = told(tmp_path / "sim.json")
    answers = found.answers
    assert answers is not None
    assert (found.name, found.seconds, found.load) == ("sim.json, 1:2", 9.0, None)
    assert (answers.count, answers.failed, answers.tokens_per_s) == (40, 2, 400.0)
    assert (answers.ttft.p50, answers.tpot.p99) == (0.04, 0.07)
    assert (answers.prompt_tokens, answers.phases) == (100.0, {"queue": 0.012})
    assert answers.fallbacks == {"prefill_retry": 1, "preempted": 2}
    assert answers.local_share == 1.0


def test_experts_are_told_of_the_pools_that_have_any(tmp_path: Path) -> None:
    assert told(tmp_path / "sim.json").experts == (
        Experts(
            role="decode", steps=300, tokens=20.0, hottest=1.25, balancedness=EVEN,
            dispatch_share=0.25,
        ),
    )  # fmt: skip


def test_a_layer_that_no_token_reached_says_nothing_of_the_hottest_expert() -> None:
    load = msgspec.structs.replace(LOAD, tokens=[[0, 0], [10, 30]])
    assert experts("decode", load).hottest == 1.5


def test_balancedness_at_95_is_what_95_steps_of_100_have_at_least() -> None:
    found = balancedness([0.01 * step for step in range(1, 101)])
    assert found.p50 == pytest.approx(0.505)
    assert 0.05 < found.p95 < 0.07
    assert found.worst == 0.01
    assert balancedness([]) == Balancedness()
