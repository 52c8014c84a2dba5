"""A transfer may be over before the engine tells of it: no order of events loses one."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from ekiden.core.errors import ReplicaFailed
from ekiden.core.types import Delta, Request, SamplingParams
from ekiden.engine.engine import PrefillDone, Ready, Started
from ekiden.rpc import prefill_pb2 as pb
from ekiden.rpc.convert import request_to_pb
from kv_transfer.session import Failed, SealedOut
from prefill_svc.run import PrefillRun

REQUEST = Request(
    request_id="r", model="m", prompt=(1, 2), sampling=SamplingParams(seed=1, max_tokens=2)
)
STARTED = Started(request_id="r#1", cached_tokens=0)
TOKEN = Delta(request_id="r#1", choice=0, tokens=(9,))
DONE = PrefillDone(request_id="r#1", cached_tokens=0, computed_tokens=2)
SEALED = SealedOut(session=2, seal=b"seal", bytes=8, seconds=0.1)


class FakeCore:
    """Everything a run asks for; the test puts the happenings into ``inbox``."""

    def __init__(self) -> None:
        kv = SimpleNamespace(block_size=16)
        self.me = SimpleNamespace(replica_id="p-1", epoch=5, model="m", kv=kv)
        self.bridge = SimpleNamespace(call=self._call, post=lambda function: None)
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.failed: list[int] = []
        self.closed: list[str] = []

    async def _call(self, _function: object) -> None:
        return None

    def caller(self, prefill_epoch: int, replica_id: str, epoch: int) -> SimpleNamespace:
        assert (prefill_epoch, replica_id, epoch) == (5, "d-1", 3)
        return SimpleNamespace()

    def open_run(self, request_id: str) -> tuple[str, asyncio.Queue[Any]]:
        return f"{request_id}#1", self.inbox

    def open_session(self, *_: object) -> int:
        return 2

    def fail_session(self, session: int, reason: str) -> None:
        self.failed.append(session)

    def close_run(self, local_id: str) -> None:
        self.closed.append(local_id)


async def _conversation(core: FakeCore, happenings: list[object]) -> list[pb.PrefillEvent]:
    async def decode() -> Any:
        start = pb.PrefillStart(
            request=request_to_pb(REQUEST), decode_replica="d-1", decode_epoch=3, prefill_epoch=5
        )
        yield pb.PrefillRequest(start=start)
        yield pb.PrefillRequest(reserved=pb.Reserved(held_tokens=0, offer=b"offer"))

    core.inbox.put_nowait(Ready(request_id="r#1"))
    for happening in happenings:
        core.inbox.put_nowait(happening)
    run = PrefillRun(core)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        return [event async for event in run.events(decode())]


@pytest.mark.parametrize(
    "order",
    [
        o
        for o in itertools.permutations([STARTED, TOKEN, DONE, SEALED])
        if o.index(STARTED) < o.index(TOKEN) < o.index(DONE)
    ],
)
async def test_every_order_ends_in_the_same_conversation(order: tuple[object, ...]) -> None:
    core = FakeCore()
    events = await _conversation(core, list(order))
    kinds = [event.WhichOneof("kind") for event in events]
    assert kinds == ["ready", "started", "hand_off", "sealed"]
    (delta,) = events[2].hand_off.deltas
    assert (delta.request_id, list(delta.tokens)) == ("r", [9])
    assert events[3].sealed.seal == b"seal"
    assert core.failed == []
    assert core.closed == ["r#1"]


async def test_a_failed_transfer_ends_the_run_and_stops_the_session() -> None:
    core = FakeCore()
    failure = Failed(session=2, reason="the peer is gone", state="moving", peer="d-1")
    with pytest.raises(ReplicaFailed, match="the peer is gone"):
        await _conversation(core, [STARTED, failure])
    assert core.failed == [2]
    assert core.closed == ["r#1"]
