"""``Replica.ReadKv``: what the ranks' caches hold for a token prefix. Off unless asked for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

from ekiden.core.errors import DeadlineExceeded, ReplicaFailed
from ekiden.rpc import replica_pb2 as pb
from ekiden.service.bridge import EngineBridge, post_to_loop
from kv_transfer.messages import BlockRead, ReadBlock, decode_event, encode

READ_TIMEOUT_S = 20.0


class KvReader:
    """Asks the ranks' ports for blocks that it holds meanwhile."""

    def __init__(
        self, bridge: EngineBridge, send_port: Callable[[bytes, int | None], None], ranks: int
    ) -> None:
        self._bridge = bridge
        self._send_port = send_port
        self._ranks = ranks
        self._loop = asyncio.get_running_loop()
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    def hear(self, message: bytes) -> bool:
        """Whether ``message`` was for this reader. Called on a thread of the executor."""
        if not self._waiting:
            return False
        event = decode_event(message)
        if not isinstance(event, BlockRead):
            return False
        post_to_loop(self._loop, self._answered, event)
        return True

    def _answered(self, event: BlockRead) -> None:
        waiting = self._waiting.pop(event.ticket, None)
        if waiting is None or waiting.done():
            return
        if event.data is None:
            waiting.set_exception(ReplicaFailed("a rank's KV port has ended"))
        else:
            waiting.set_result(event.data)

    async def read(self, tokens: Sequence[int], salt: str) -> AsyncIterator[pb.KvBlock]:
        """Every cached block of the prefix, rank by rank, in order.

        Raises:
            DeadlineExceeded, ReplicaFailed: a rank's port did not answer, or has ended.
        """
        held = await self._bridge.call(lambda engine: engine.hold_cached(tokens, salt))
        try:
            for rank in range(self._ranks):
                for index, block in enumerate(held.blocks):
                    data = await self._read_block(rank, block)
                    yield pb.KvBlock(rank=rank, index=index, data=data)
        finally:
            self._bridge.post(lambda engine: engine.writer_done(held.key))

    async def _read_block(self, rank: int, block: int) -> bytes:
        ticket = next(self._tickets)
        self._waiting[ticket] = self._loop.create_future()
        self._send_port(encode(ReadBlock(ticket=ticket, block=block)), rank)
        try:
            return await asyncio.wait_for(self._waiting[ticket], READ_TIMEOUT_S)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"rank {rank} did not read a block within {READ_TIMEOUT_S:g} s",
                state="reading KV",
                peer=f"rank {rank}",
            ) from error
        finally:
            self._waiting.pop(ticket, None)
