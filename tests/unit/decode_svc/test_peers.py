"""What a decode replica remembers of the prefill replicas that it has met, or could not use."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from decode_svc import probe
from decode_svc.peers import RETRY_S, PrefillPeer, PrefillPeers
from decode_svc.probe import Prober
from decode_svc.wires import Measured, NoWire
from ekiden.core.clock import ManualClock
from ekiden.core.errors import ReplicaFailed
from ekiden.core.types import KvWire, PrefillCandidate
from ekiden.engine.engine import Reservation

CANDIDATE = PrefillCandidate(replica_id="p-1", address="127.0.0.1:9", epoch=1)


class Meetings:
    """A table of peers whose introductions the test decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
        self.clock = ManualClock()
        self.outcome = outcome
        self.count = 0
        self.peers = PrefillPeers(None, "", None, self.clock)  # type: ignore[arg-type]
        monkeypatch.setattr(self.peers, "_introduce", self._introduce)

    async def _introduce(self, candidate: PrefillCandidate, channel: Any) -> PrefillPeer:
        self.count += 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return PrefillPeer(
            description=SimpleNamespace(replica_id="p-1"),  # type: ignore[arg-type]
            channel=channel,
            stub=None,  # type: ignore[arg-type]
            take=Measured("tcp", 2e9),
            lend=None,
        )


async def test_wires_that_do_not_work_are_not_tried_again_for_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meetings = Meetings(monkeypatch, NoWire("no KV wire to p-1 works: tcp: nothing came"))
    for _ in range(3):
        with pytest.raises(NoWire, match="nothing came"):
            await meetings.peers.meet(CANDIDATE)
    assert meetings.count == 1
    meetings.clock.advance(RETRY_S)
    meetings.outcome = None
    assert (await meetings.peers.meet(CANDIDATE)).take.wire == "tcp"
    assert meetings.count == 2
    await meetings.peers.close()


async def test_one_that_could_not_be_reached_is_tried_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meetings = Meetings(monkeypatch, ReplicaFailed("p-1 cannot be met"))
    for _ in range(2):
        with pytest.raises(ReplicaFailed):
            await meetings.peers.meet(CANDIDATE)
    assert meetings.count == 2


async def test_one_that_has_forgotten_us_is_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings = Meetings(monkeypatch, None)
    peer = await meetings.peers.meet(CANDIDATE)
    assert await meetings.peers.meet(CANDIDATE) is peer
    meetings.peers.forget(peer)
    await meetings.peers.meet(CANDIDATE)
    assert meetings.count == 2
    await meetings.peers.close()


async def test_a_meeting_that_fails_when_all_who_waited_have_left_is_no_error_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its replica left the registry in mid-measurement, or this service is ending."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    meetings = Meetings(monkeypatch, None)
    measured = asyncio.Event()

    async def introduce(*_: Any) -> PrefillPeer:
        await measured.wait()
        raise NoWire("nothing came")

    monkeypatch.setattr(meetings.peers, "_introduce", introduce)
    waiting = asyncio.ensure_future(meetings.peers.meet(CANDIDATE))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    del waiting  # and with it whatever it waited for
    measured.set()
    while meetings.peers._meeting:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert told == []


class Pool:
    """A core whose blocks are all held, until ``give``."""

    def __init__(self) -> None:
        self.freed = asyncio.Event()
        self.bridge = self
        self.blocks: tuple[int, ...] = ()
        self.asked = 0

    async def call(self, function: Any) -> Reservation:
        self.asked += 1
        return Reservation(key=self.asked, blocks=self.blocks, held_tokens=0)

    def let_go(self, key: int) -> None:
        """Nothing was held."""

    def give(self) -> None:
        self.blocks = (7,)
        self.freed.set()


async def test_a_wire_is_tried_when_a_block_is_free_and_never_taken_untried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool()
    prober = Prober(pool)  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(prober._scratch(16))
    while not pool.asked:
        await asyncio.sleep(0)
    pool.give()
    assert (await waiting).blocks == (7,)
    monkeypatch.setattr(probe, "PROBE_S", 0.05)
    with pytest.raises(ReplicaFailed, match="no block was free to try it"):
        await Prober(Pool())._scratch(16)  # type: ignore[arg-type]


async def test_what_its_wire_did_is_told_for_as_long_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meetings = Meetings(monkeypatch, None)
    assert meetings.peers.wires() == ()
    peer = await meetings.peers.meet(CANDIDATE)
    assert meetings.peers.wires() == (KvWire(peer="p-1", wire="tcp", bytes_per_s=2e9),)
    meetings.peers.forget(peer)
    assert meetings.peers.wires() == ()
    await meetings.peers.close()
