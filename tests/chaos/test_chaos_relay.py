"""The relay passes a conversation on as it is, holds it where it is told to, and lies on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from chaos_relay import LIES, POINTS, Relay, Trap

from ekiden.rpc import prefill_pb2 as pb
from ekiden.rpc import prefill_pb2_grpc
from ekiden.rpc.channel import open_channel

PROMPT = (3, 4, 5)
ANSWERS = ("ready", "started", "hand_off", "sealed")


class Prefill(prefill_pb2_grpc.PrefillServicer):
    """Says everything in order; ``heard`` is what it was told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def Run(
        self, requests: AsyncIterator[pb.PrefillRequest], context: object
    ) -> AsyncIterator[pb.PrefillEvent]:
        self.heard.append(str((await anext(requests)).WhichOneof("kind")))
        yield pb.PrefillEvent(ready=pb.Ready(answer_within_s=1.0))
        self.heard.append(str((await anext(requests)).WhichOneof("kind")))
        yield pb.PrefillEvent(started=pb.Started())
        yield pb.PrefillEvent(hand_off=pb.HandOff())
        yield pb.PrefillEvent(sealed=pb.Sealed(seal=b"seal"))


class Rig:
    """A decode replica's view of prefill, through a relay."""

    def __init__(self, relay: Relay, prefill: Prefill) -> None:
        self.relay, self.prefill = relay, prefill
        self.traps = relay.traps

    async def converse(self) -> list[str]:
        """The kinds of messages that came, then how the call ended if not in order."""
        said: list[str] = []
        async with open_channel(self.relay.address) as channel:
            call = prefill_pb2_grpc.PrefillStub(channel).Run()
            start = pb.PrefillStart(decode_replica="d-1")
            start.request.prompt.extend(PROMPT)
            await call.write(pb.PrefillRequest(start=start))
            await call.write(pb.PrefillRequest(reserved=pb.Reserved()))
            try:
                async for event in call:
                    said.append(str(event.WhichOneof("kind")))
            except grpc.aio.AioRpcError as error:
                said.append(error.code().name)
        return said


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    prefill, server = Prefill(), grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    relay = Relay("p-1", "127.0.0.1", [])
    await relay.start(f"127.0.0.1:{port}")
    yield Rig(relay, prefill)
    await relay.close()
    await server.stop(None)


async def test_a_conversation_passes_unchanged(rig: Rig):
    assert await rig.converse() == list(ANSWERS)
    assert rig.prefill.heard == ["start", "reserved"]


@pytest.mark.parametrize("point", POINTS)
async def test_a_held_message_waits_and_then_everything_passes(rig: Rig, point: str):
    trap = Trap(PROMPT, point)
    rig.traps.append(trap)
    talking = asyncio.ensure_future(rig.converse())
    async with asyncio.timeout(10):
        await trap.reached.wait()
    assert not talking.done()
    assert point not in trap.passed
    assert (trap.prefill, trap.decode) == ("p-1", "d-1")
    trap.spring()
    assert await talking == list(ANSWERS)


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie != "says nothing more"])
async def test_a_lie_ends_the_call_in_the_way_it_says(rig: Rig, lie: str):
    trap = Trap(PROMPT, "started")
    trap.spring(lie)
    rig.traps.append(trap)
    endings = {
        "says failed": ["ready", "failed"],
        "ends in an error": ["ready", "INTERNAL"],
        "closes": ["ready"],
        "talks nonsense": ["ready", "ready"],
    }
    assert await rig.converse() == endings[lie]


async def test_a_request_that_no_trap_waits_for_is_not_touched(rig: Rig):
    rig.traps.append(Trap((9, 9), "start"))
    assert await rig.converse() == list(ANSWERS)
    assert len(rig.traps) == 1
