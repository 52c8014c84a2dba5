"""A replica inside this process: its ranks are threads, its ports and sessions are the real ones.

All that a service adds, gRPC and its event loop, is left out: whoever drives a pair passes on
what the two sides have to tell each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch

from ekiden.core.config import EngineConfig
from ekiden.core.ids import new_epoch
from ekiden.engine.build import build_engine
from ekiden.engine.engine import EngineOutput
from ekiden.engine.inline_executor import InlineExecutor
from ekiden.engine.port import ChunkDone, KvPort, PortContext
from kv_transfer.description import MAPPED_WIRES
from kv_transfer.messages import TransferLimits, encode
from kv_transfer.options import PortOptions
from kv_transfer.port import open_port
from kv_transfer.session import SessionEvent
from kv_transfer.sessions import ReceiveSessions, SendSessions

from .compare import Bits, by_position
from .house import House
from .rule import tensor_bits

LIMITS = TransferLimits(segment_tokens=48)
"""Small segments, so that a prompt of a few blocks moves in several messages."""
STEP_TIMEOUT_S = 60.0


class Tap:
    """A rank's port, and what passes it: the cache, and which blocks each session's prompt has."""

    def __init__(
        self, cache_BHL2SD: torch.Tensor, context: PortContext, emit: Callable[[bytes], None]
    ) -> None:
        self.cache_BHL2SD = cache_BHL2SD
        self.chunks: dict[int, ChunkDone] = {}
        self._port: KvPort = open_port(cache_BHL2SD, context, emit)

    def describe(self) -> bytes:
        return self._port.describe()

    def command(self, message: bytes) -> None:
        self._port.command(message)

    def chunks_finished(self, chunks: Sequence[ChunkDone]) -> None:
        self.chunks.update((chunk.session, chunk) for chunk in chunks)
        self._port.chunks_finished(chunks)

    def close(self) -> None:
        self._port.close()


class InlineReplica:
    """One open replica. Used from one thread."""

    def __init__(self, house: House, config: EngineConfig, role: str, name: str) -> None:
        """Load the model and open the ranks' ports.

        Raises:
            SetupError: the layout cannot work with this model.
        """
        model, clock = house.model, house.clock
        self.bell = house.bell
        self.wire = house.wire
        self._mail: deque[tuple[int, bytes]] = deque()
        self._taps: dict[int, Tap] = {}
        self._weights = sum(f.stat().st_size for f in config.model_dir.glob("*.safetensors"))
        epoch = new_epoch()
        options = PortOptions(transports=(house.wire,), slots=4, window=2)
        self._executor = InlineExecutor(
            msgspec.structs.replace(config, shared_kv=house.wire in MAPPED_WIRES),
            model,
            port=self._open_port,
            port_options=encode(options),
            epoch=epoch,
        )
        self._executor.on_port_message(self._hear)
        self.layout = self._executor.layout
        self.engine = build_engine(
            config, self._executor, model, fingerprint=house.model_fingerprint, clock=clock
        )
        self.me = house.describe(config, role, name, epoch, self._executor.endpoints)
        send_port = self._executor.send_port
        self.sending = SendSessions(self.me, send_port, clock, LIMITS)
        self.receiving = ReceiveSessions(self.me, send_port, clock, LIMITS)

    @property
    def sessions(self) -> SendSessions | ReceiveSessions:
        return self.sending if self.me.role == "prefill" else self.receiving

    def turn(self) -> tuple[EngineOutput, Sequence[SessionEvent]]:
        """One step of the engine, if there is one, and what the ports' words mean."""
        output = self.engine.step(STEP_TIMEOUT_S)
        while self._mail:
            self.sessions.on_port(*self._mail.popleft())
        self.sessions.tick()
        return output, self.sessions.poll()

    def sent_blocks(self, session: int) -> tuple[int, ...]:
        """The block table of the prompt that ``session`` sends, as far as it is computed."""
        return self._taps[0].chunks[session].blocks

    def forget(self, session: int) -> None:
        for tap in self._taps.values():
            tap.chunks.pop(session, None)

    def kv(self, blocks: Sequence[int]) -> dict[int, Bits]:
        """Each rank's share of these blocks as bits ``[layers, kv_heads, tokens, 2, row]``."""
        return {
            rank: by_position(tensor_bits(self.cache(rank)[list(blocks)], self.layout.dtype))
            for rank in sorted(self._taps)
        }

    def cache(self, rank: int) -> torch.Tensor:
        """``[blocks, kv_heads, layers, 2, block_size, row]``."""
        return self._taps[rank].cache_BHL2SD

    @property
    def footprint(self) -> int:
        """Bytes of its weights, and of its KV on all ranks."""
        return self._weights + sum(tap.cache_BHL2SD.nbytes for tap in self._taps.values())

    def leaks(self) -> str:
        """What is held although nothing is going on; empty if nothing is."""
        self.engine.audit()
        books = self.engine.books()
        if books.idle and not self.sessions.open_count:
            return ""
        return f"{self.me.replica_id} still has {self.sessions.open_count} sessions and {books}"

    def close(self) -> None:
        self._executor.close()

    def _open_port(
        self, cache: torch.Tensor, context: PortContext, emit: Callable[[bytes], None]
    ) -> Tap:
        tap = self._taps[context.rank] = Tap(cache, context, emit)
        return tap

    def _hear(self, rank: int, message: bytes) -> None:
        self._mail.append((rank, message))
        self.bell.set()
