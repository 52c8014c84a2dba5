"""The states of a hand-off in which a fault may be injected, and how one is brought about and seen.

A state is brought about by holding the message that would end it (``chaos_relay``), by a slow
link, by full seats or by a stopped rank; that it is reached is seen in the relay or in the books.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import msgspec
from chaos_clients import MODEL, Ask
from chaos_net import Namespaces
from chaos_relay import Trap
from chaos_world import DECODE, SEATS, World

from ekiden.core.types import Request, SamplingParams
from ekiden.rpc import decode_pb2, decode_pb2_grpc
from ekiden.rpc.channel import open_channel
from ekiden.rpc.convert import request_to_pb

REACH_S = 12.0
LONGER, LONG, SHORT = 2400, 1200, 30
SLOW, SLOWER = 300e3, 12e3
"""Bytes a second of a slow link: a long prompt's KV takes seconds, and so does a short one's."""


class Scene:
    """One request under attack, from the asking until everything is undone."""

    def __init__(self, world: World, ask: Ask, trap: Trap) -> None:
        self.world, self.ask, self.trap = world, ask, trap
        self.leave = asyncio.Event()
        self.hogs: list[asyncio.Task[None]] = []

    @property
    def sides(self) -> tuple[str, ...]:
        """The prefill and the decode replica of the request."""
        return (self.trap.prefill, self.trap.decode)

    def slow_down(self, bytes_per_s: float) -> None:
        """Nothing to do for a wire that is slow always."""
        if isinstance(self.world.net, Namespaces) and self.world.wire.link:
            for name in DECODE:
                self.world.net.throttle(name, self.world.wire.link, bytes_per_s)

    def speed_up(self) -> None:
        if isinstance(self.world.net, Namespaces):
            self.world.net.unthrottle()


async def _held(scene: Scene) -> bool:
    await scene.trap.reached.wait()
    return True


async def _decode_is(scene: Scene, state: str) -> bool:
    await scene.trap.seen.wait()
    return await scene.world.until_state([scene.trap.decode], state, within_s=REACH_S)


async def _moving(scene: Scene) -> bool:
    return await _decode_is(scene, "moving")


async def _transferring(scene: Scene) -> bool:
    return await _decode_is(scene, "transferring")


async def _delivered(scene: Scene) -> bool:
    await scene.trap.reached.wait()
    return await _decode_is(scene, "delivered")


async def _sealed(scene: Scene) -> bool:
    return await _decode_is(scene, "sealed")


async def _decoding(scene: Scene) -> bool:
    return await _decode_is(scene, "decoding")


async def _reserving(scene: Scene) -> bool:
    return await scene.world.until_state(DECODE, "reserving blocks here", within_s=REACH_S)


async def _draining(scene: Scene) -> bool:
    """The client leaves while decode's ranks stand still: they cannot answer the abort."""
    return await _draining_on(scene, "decode")


async def _draining_there(scene: Scene) -> bool:
    """The same with prefill's ranks."""
    return await _draining_on(scene, "prefill")


async def _draining_on(scene: Scene, side: str) -> bool:
    await scene.trap.reached.wait()
    name = getattr(scene.trap, side)
    scene.world.stop(scene.world.processes(name, ranks_only=True))
    scene.leave.set()
    return await scene.world.until_state([name], "draining", within_s=REACH_S)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A state by name. ``point``: the message that is held; ``rate``: of the KV links, 0 as is."""

    name: str
    reach: Callable[[Scene], Awaitable[bool]]
    point: str = ""
    rate: float = 0.0
    length: int = LONG
    max_tokens: int = 8
    hogs: bool = False
    link: bool = False
    """A rate limit of the port would not bring it about: the bytes must be on their way."""
    gone: bool = False
    """The client has left already when the fault comes."""


STAGES = {
    stage.name: stage
    for stage in (
        Stage(name="asking", point="start", reach=_held),
        Stage(name="queued", point="ready", reach=_held),
        Stage(name="reserving", reach=_reserving, hogs=True),
        Stage(name="about to prefill", point="reserved", reach=_held),
        Stage(name="started", point="started", reach=_held),
        Stage(name="prefilling", point="hand_off", reach=_held),
        # Several messages share the link, so the first of few would come with the last.
        Stage(name="moving", reach=_moving, rate=2 * SLOW, length=LONGER),
        Stage(name="transferring", reach=_transferring, rate=SLOW),
        Stage(name="delivered", point="sealed", reach=_delivered),
        Stage(name="sealed", reach=_sealed, rate=SLOWER, length=SHORT, link=True),
        Stage(name="draining", point="hand_off", reach=_draining, rate=SLOW, gone=True),
        Stage(name="draining there", point="hand_off", reach=_draining_there, rate=SLOW, gone=True),
        Stage(name="decoding", reach=_decoding, max_tokens=300),
    )
}


async def fill_seats(scene: Scene) -> bool:
    """Take every seat of both decode replicas, so that a reservation has to wait."""
    for name in DECODE:
        scene.hogs.append(asyncio.ensure_future(_hog(scene.world.services[name].address, name)))
    try:
        async with asyncio.timeout(REACH_S):
            for name in DECODE:
                while (books := await scene.world.books(name)) and books.running < SEATS:
                    await asyncio.sleep(0.002)
    except TimeoutError:
        return False
    return True


async def _hog(address: str, name: str) -> None:
    """As many choices as there are seats, until cancelled; what they say does not matter."""
    sampling = SamplingParams(seed=1, max_tokens=440, n=SEATS, temperature=1.0, ignore_eos=True)
    request = Request(
        request_id=f"hog-{name}-{id(sampling)}", model=MODEL, prompt=(5, 6, 7), sampling=sampling
    )
    message = decode_pb2.GenerateRequest(request=request_to_pb(request), local_prefill=True)
    async with open_channel(address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(message)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            return  # killed under it
        finally:
            call.cancel()
