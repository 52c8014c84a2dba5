"""Which of the wires that were measured is taken, and how that is told."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from decode_svc.wires import PROBE_BYTES, Measured, NoWire, WireChooser, fastest, measure
from ekiden.core.errors import ReplicaFailed
from kv_transfer.session import Arrived

TOKEN = 1024


@pytest.mark.parametrize(
    ("rates", "taken"),
    [
        ({"shm": 8e9, "ucx": 2e9, "tcp": 2.1e9}, "shm"),
        ({"shm": 2e9, "ucx": 2.1e9}, "shm"),  # not clearly faster: a short measurement is not exact
        ({"shm": 2e9, "ucx": 2.3e9}, "ucx"),
        ({"ucx": 1e9, "tcp": 2e9, "nixl": 2.1e9}, "tcp"),
        ({"shm": 0.0, "ucx": 2e9}, "shm"),  # unmeasured: nobody knows that it is slower
        ({"shm": 0.0, "ucx": 0.0}, "shm"),  # there was no room to measure: the better by nature
    ],
)
def test_the_fastest_is_taken_and_the_earlier_where_they_are_alike(
    rates: dict[str, float], taken: str
) -> None:
    assert fastest([Measured(wire, rate) for wire, rate in rates.items()]).wire == taken


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (Measured("shm", 7.934e9), "shm 7.93 GB/s"),
        (Measured("tcp", 1.25e6), "tcp 1.2 MB/s"),
        (Measured("ucx"), "ucx (not measured)"),
        (Measured("ucx", 1e7, sure=False), "ucx (no room to measure)"),
    ],
)
def test_a_rate_is_told_in_the_unit_that_shows_it(measured: Measured, told: str) -> None:
    assert str(measured) == told


async def test_a_block_or_two_do_not_tell_how_fast_a_wire_is() -> None:
    """Decode's pool is full of what it may need again: hardly a block was free to measure with."""

    async def probe(tokens: int) -> Arrived:
        return Arrived(session=1, bytes=16 * TOKEN, seconds=3e-4, wire="shm")

    assert await measure(probe, TOKEN) == (pytest.approx(16 * TOKEN / 3e-4), False)

    async def throttled(tokens: int) -> Arrived:
        return Arrived(session=1, bytes=16 * TOKEN, seconds=0.5, wire="shm")

    assert await measure(throttled, TOKEN) == (pytest.approx(16 * TOKEN / 0.5), True)
    alike = [Measured("shm", 4e7, sure=False), Measured("tcp", 1e8, sure=False)]
    assert fastest(alike) == alike[0]
    assert fastest([alike[0], Measured("tcp", 2e9)]) == alike[0]
    assert fastest([Measured("shm", 1e9), alike[1], Measured("tcp", 2e9)]).bytes_per_s == 2e9


class Moments:
    """A prober whose wires do, each time they are tried, what the test has written down."""

    def __init__(self, **rates: list[float]) -> None:
        self.rates = rates
        self.tried: list[tuple[str, int]] = []

    async def probe(self, peer: Any, stub: Any, wire: str, tokens: int) -> Arrived:
        """Each wire's rates one after the other, the last for ever; a negative one is a failure."""
        self.tried.append((wire, tokens * TOKEN))
        left = self.rates[wire]
        rate = left.pop(0) if len(left) > 1 else left[0]
        if rate < 0:
            raise ReplicaFailed("nothing came")
        size = tokens * TOKEN if rate else 0
        return Arrived(session=1, bytes=size, seconds=size / rate if rate else 0.0, wire=wire)


async def rate_of(moments: Moments) -> float:
    async def probe(tokens: int) -> Arrived:
        return await moments.probe(None, None, "tcp", tokens)

    return (await measure(probe, TOKEN))[0]


async def test_a_first_probe_that_waits_for_connections_does_not_decide() -> None:
    moments = Moments(tcp=[1e6, 2e9])
    assert await rate_of(moments) == pytest.approx(2e9)
    assert [size for _, size in moments.tried] == [PROBE_BYTES[0], *PROBE_BYTES]


async def test_a_slow_wire_is_measured_with_little() -> None:
    moments = Moments(tcp=[1e6])
    assert await rate_of(moments) == pytest.approx(1e6)
    assert [size for _, size in moments.tried] == [PROBE_BYTES[0]] * 2


async def test_no_room_the_second_time_leaves_what_the_first_has_shown() -> None:
    assert await rate_of(Moments(tcp=[1e6, 0.0])) == pytest.approx(1e6)


ME = SimpleNamespace(replica_id="decode-0", wires=("shm", "ucx", "tcp"))
PEER = SimpleNamespace(
    replica_id="prefill-0",
    wires=("shm", "ucx", "tcp"),
    kv=SimpleNamespace(token_bytes=lambda: TOKEN),
)


async def choose(moments: Moments) -> Any:
    chooser = WireChooser(SimpleNamespace(me=ME), moments)  # type: ignore[arg-type]
    return await chooser.choose(PEER, None)  # type: ignore[arg-type]


async def test_an_outcome_that_nobody_would_expect_is_measured_again() -> None:
    """Busy processors made shm slow at first, twice; the second round finds it well."""
    moments = Moments(shm=[1e6, 1e6, 8e9], ucx=[2e9], tcp=[1e9])
    choice = await choose(moments)
    assert (choice.take.wire, choice.lend.wire) == ("shm", "ucx")


async def test_the_expected_outcome_is_measured_once() -> None:
    moments = Moments(shm=[2.0**33], ucx=[2e9], tcp=[1e9])
    assert (await choose(moments)).take == Measured("shm", 2.0**33)
    assert [wire for wire, size in moments.tried if size == PROBE_BYTES[0]] == ["shm", "ucx", "tcp"]


async def test_shared_memory_that_stays_slower_than_a_wire_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert (await choose(Moments(shm=[2e8], ucx=[1e9], tcp=[5e8]))).take.wire == "ucx"
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1
    assert "KV from prefill-0: one host, yet shm 0.20 GB/s is not the fastest" in said[0]


async def test_shared_memory_that_was_named_after_the_wire_that_is_taken_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``--kv-transport tcp,shm``: they are alike, and it was measured once."""
    monkeypatch.setattr(ME, "wires", ("tcp", "shm"))
    assert (await choose(Moments(tcp=[2.0**30], shm=[2.0**30]))).take.wire == "tcp"
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_wire_that_fails_the_second_time_is_not_taken() -> None:
    assert (
        await choose(Moments(shm=[2e8] * 4 + [-1], ucx=[1e9] * 5 + [-1], tcp=[2.0**29]))
    ).take == (Measured("tcp", 2.0**29))


async def test_wires_of_which_none_works_are_named_with_the_reason() -> None:
    with pytest.raises(NoWire, match="shm: nothing came; ucx: nothing came; tcp: nothing came"):
        await choose(Moments(shm=[-1], ucx=[-1], tcp=[-1]))
