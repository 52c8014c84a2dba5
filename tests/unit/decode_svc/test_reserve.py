"""A reservation never outlives those who could give it back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from decode_svc.handoff import AttemptFailed, Handoff
from decode_svc.lending import Lending
from decode_svc.timeline import Timeline
from ekiden.core.clock import ManualClock
from ekiden.core.errors import Overloaded
from ekiden.core.types import Request, SamplingParams
from ekiden.engine.engine import Reservation
from ekiden.rpc import prefill_pb2 as pb
from ekiden.rpc import prefill_pb2_grpc
from ekiden.rpc.channel import open_channel
from kv_transfer.session import Failed

REQUEST = Request(
    request_id="r", model="m", prompt=(1, 2, 3), sampling=SamplingParams(seed=1, max_tokens=2)
)
RESERVATION = Reservation(key=77, blocks=(4,), held_tokens=0)


class FakeCore:
    """A core whose engine answers when the test says so."""

    def __init__(self) -> None:
        self.freed = asyncio.Event()
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.let_go_keys: list[int] = []
        self.bridge = SimpleNamespace(call=self._call)

    async def _call(self, _function: object) -> Any:
        return await asyncio.shield(self.answer)

    def let_go(self, key: int) -> None:
        self.let_go_keys.append(key)

    def open_session(self, *_: object) -> bytes:
        raise Overloaded("too many sessions")


def _handoff(core: FakeCore) -> Handoff:
    peer = SimpleNamespace(
        take=SimpleNamespace(wire="memory"),
        lend=None,
        description=SimpleNamespace(replica_id="p-1"),
    )
    fake: Any = core
    return Handoff(fake, REQUEST, peer, Timeline(ManualClock()))  # type: ignore[arg-type]


async def test_a_reservation_that_comes_after_its_request_has_left_is_let_go() -> None:
    core = FakeCore()
    reserving = asyncio.ensure_future(_handoff(core)._reserve(60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reserving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reserving
    assert core.let_go_keys == []
    core.answer.set_result(RESERVATION)
    for _ in range(5):
        await asyncio.sleep(0)
    assert core.let_go_keys == [77]


async def test_a_prefix_held_for_lending_after_its_request_has_left_is_let_go() -> None:
    core: Any = FakeCore()
    peer: Any = SimpleNamespace()
    lending = asyncio.ensure_future(Lending(core, REQUEST, peer).run(b"offer", 3))
    await asyncio.sleep(0.01)
    lending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lending
    core.answer.set_result(RESERVATION)
    await asyncio.sleep(0.01)
    assert core.let_go_keys == [77]


async def test_no_room_in_time_is_a_failed_attempt_that_names_the_wait() -> None:
    core = FakeCore()
    core.answer.set_result(None)
    with pytest.raises(AttemptFailed, match=r"no room .* within 0.01 s") as caught:
        await _handoff(core)._reserve(0.01)
    assert not caught.value.binding


async def test_freed_blocks_wake_who_waits_for_room() -> None:
    core = FakeCore()
    core.answer.set_result(None)
    handoff = _handoff(core)
    reserving = asyncio.ensure_future(handoff._reserve(60.0))
    for _ in range(5):
        await asyncio.sleep(0)
    core.answer = asyncio.get_running_loop().create_future()
    core.answer.set_result(RESERVATION)
    core.freed.set()
    await reserving
    assert handoff.reservation is RESERVATION


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK])
async def test_a_call_that_ended_while_blocks_were_waited_for_is_a_failed_attempt(
    code: grpc.StatusCode,
) -> None:
    async def end(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        if code is not grpc.StatusCode.OK:
            await context.abort(code, "prefill is gone")

    class Prefill(prefill_pb2_grpc.PrefillServicer):
        Run = staticmethod(end)

    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(Prefill(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = prefill_pb2_grpc.PrefillStub(channel).Run()
        await call.code()  # it has ended, and nobody has read that
        with pytest.raises(AttemptFailed, match=rf"p-1, .*ended with {code.name}"):
            await _handoff(FakeCore())._say(call, pb.PrefillRequest())
    await server.stop(None)


async def test_a_session_that_failed_before_the_token_was_seen_binds_after_it() -> None:
    core: Any = FakeCore()
    core.peers = SimpleNamespace(metadata=())
    handoff: Any = _handoff(core)
    handoff.peer.stub = SimpleNamespace(Run=lambda **_: SimpleNamespace(cancel=lambda: None))
    handoff.on_failed(Failed(session=1, reason="refused", state="waiting", peer="p-1"))

    async def converse(_call: object) -> None:
        handoff._binding = True  # the token came, and was shown
        handoff._arrival.future.result()

    handoff._converse = converse
    with pytest.raises(AttemptFailed, match="refused") as caught:
        await handoff.run()
    assert caught.value.binding


async def test_a_session_that_cannot_be_opened_gives_its_reservation_back() -> None:
    core = FakeCore()
    handoff = _handoff(core)
    handoff.reservation = RESERVATION
    with pytest.raises(AttemptFailed, match="too many sessions"):
        handoff._open_session()
    assert core.let_go_keys == [77]
