"""Two replicas of ranks in one process, with real ports and a cache whose elements tell what they
are: f(layer, position, head, dim, k or v). Shared by the tests of the KV transfer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ekiden.cache.layout import KvLayout, RankLayout
from ekiden.core.clock import Clock, ManualClock
from ekiden.core.hashes import GRANULE, SCHEME
from ekiden.engine.port import ChunkDone, PortContext
from ekiden.parallel.split import even_split, head_split
from kv_transfer import in_place
from kv_transfer.description import WIRE_VERSION, ReplicaDescription
from kv_transfer.messages import TransferLimits
from kv_transfer.options import PortOptions
from kv_transfer.port import Port
from kv_transfer.session import SealedOut
from kv_transfer.sessions import ReceiveSessions, SendSessions
from kv_transfer.transports.base import Transport
from kv_transfer.transports.in_place_memory import InPlaceMemoryTransport
from kv_transfer.transports.mapped_memory import MappedMemoryTransport
from kv_transfer.transports.memory import MemoryTransport

torch.set_num_threads(1)
in_place.SHORTEST = 1  # blocks are tiny here

FAKES = {
    "memory": MemoryTransport,
    "mapped_memory": MappedMemoryTransport,
    "in_place_memory": InPlaceMemoryTransport,
}

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
EMPTY = -1.0


def layout(
    *,
    tp: int = 1,
    pp: int = 1,
    kv_heads: int = 2,
    q_heads: int | None = None,
    layers: int = 4,
    block_size: int = 16,
    head_dim: int = 2,
    dtype: str = "float32",
) -> KvLayout:
    shares = head_split(q_heads or kv_heads * 4, kv_heads, tp)
    stages = even_split(layers, pp)
    ranks = tuple(
        RankLayout(
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            head_start=share.kv_start,
            head_stop=share.kv_stop,
            layer_start=first,
            layer_stop=last,
        )
        for pp_rank, (first, last) in enumerate(stages)
        for tp_rank, share in enumerate(shares)
    )
    return KvLayout(
        dtype=dtype,
        block_size=block_size,
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        tp=tp,
        pp=pp,
        ranks=ranks,
    )


def truth(kv: KvLayout, rank: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """[tokens, heads, layers, 2, row] of ``rank``: every element differs from every other (of one
    byte: from those near it)."""
    r = kv.ranks[rank]
    shape = (tokens, kv.num_kv_heads, kv.num_layers, 2, kv.row_width)
    count = tokens * kv.num_kv_heads * kv.num_layers * 2 * kv.row_width
    values = (torch.arange(count, dtype=torch.int64) * 2654435761 + seed * 97) % (1 << 24)
    if kv.dtype != "float32":
        values = values % 251
    dtype = DTYPES[kv.dtype]
    # Any byte may stand in a quantised row, for a scale is made of any four.
    whole = (
        values.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else values.to(dtype)
    ).reshape(shape)
    return whole[:, r.head_start : r.head_stop, r.layer_start : r.layer_stop]


def empty_cache(kv: KvLayout, rank: int, blocks: int) -> torch.Tensor:
    return torch.full((blocks, *kv.block_shape(rank)), EMPTY, dtype=DTYPES[kv.dtype])


def write(
    cache: torch.Tensor, kv: KvLayout, rank: int, blocks: Sequence[int], tokens: int, seed: int = 0
) -> None:
    for position, value in enumerate(truth(kv, rank, tokens, seed)):
        block, offset = blocks[position // kv.block_size], position % kv.block_size
        cache[block, :, :, :, offset] = value


def read(cache: torch.Tensor, kv: KvLayout, blocks: Sequence[int], tokens: int) -> torch.Tensor:
    rows = [cache[blocks[p // kv.block_size], :, :, :, p % kv.block_size] for p in range(tokens)]
    return torch.stack(rows) if rows else cache[:0, :, :, :, 0]


def describe(
    kv: KvLayout,
    endpoints: Sequence[bytes],
    *,
    role: str,
    epoch: int = 1,
    wires: tuple[str, ...] = ("memory",),
) -> ReplicaDescription:
    return ReplicaDescription(
        replica_id=f"{role}-1",
        role=role,
        epoch=epoch,
        version="0",
        wire_version=WIRE_VERSION,
        model="m",
        model_fingerprint="f",
        tokenizer_fingerprint="t",
        granule=GRANULE,
        hash_scheme=SCHEME,
        dtype="float32",
        kv=kv,
        wires=wires,
        endpoints=tuple(endpoints),
        max_model_len=4096,
        vocab_size=100,
    )


class Side:
    """One replica: caches, ports (not started), and what the ports emitted."""

    def __init__(
        self,
        kv: KvLayout,
        make_transport: Callable[[int], Transport],
        *,
        role: str,
        epoch: int,
        clock: Clock,
        blocks: int,
        options: PortOptions,
        wire: str = "memory",
    ) -> None:
        self.kv = kv
        self.caches = [empty_cache(kv, rank, blocks) for rank in range(len(kv.ranks))]
        self.emitted: list[tuple[int, bytes]] = []
        self.transports = [make_transport(rank) for rank in range(len(kv.ranks))]
        for cache, transport in zip(self.caches, self.transports, strict=True):
            if isinstance(transport, MappedMemoryTransport):
                transport.share_bytes(cache.view(torch.uint8).numpy().data.cast("B"))
        self.ports = [
            Port(
                self.caches[rank],
                PortContext(rank=rank, layout=kv, epoch=epoch, options=b""),
                lambda message, rank=rank: self.emitted.append((rank, message)),
                options,
                {wire: self.transports[rank]},
                clock,
            )
            for rank in range(len(kv.ranks))
        ]
        self.muted: set[int] = set()
        self.pipe: deque[Callable[[], None]] = deque()
        self.me = describe(
            kv, [p.describe() for p in self.ports], role=role, epoch=epoch, wires=(wire,)
        )

    def send_port(self, message: bytes, rank: int | None) -> None:
        for number, port in enumerate(self.ports):
            if rank in (None, number) and number not in self.muted:
                self.pipe.append(partial(port.command, message))

    def deliver(self) -> None:
        """What the ranks' main threads do between two steps."""
        while self.pipe:
            self.pipe.popleft()()


class Pair:
    """A prefill and a decode replica with their sessions, stepped by hand."""

    def __init__(
        self,
        prefill: KvLayout,
        decode: KvLayout,
        make_transport: Callable[[int], Transport],
        *,
        clock: Clock | None = None,
        blocks: int = 16,
        limits: TransferLimits | None = None,
        options: PortOptions | None = None,
        timeout_s: float = 0.0,
        wire: str = "memory",
    ) -> None:
        self.wire = wire
        self.clock = clock or ManualClock()
        self.timeout_s = timeout_s
        options = options or PortOptions(slots=4, window=2)
        limits = limits or TransferLimits(segment_tokens=32)
        common = {"clock": self.clock, "blocks": blocks, "options": options, "wire": wire}
        self.prefill = Side(prefill, make_transport, role="prefill", epoch=11, **common)
        self.decode = Side(decode, make_transport, role="decode", epoch=22, **common)
        self.sending = SendSessions(self.prefill.me, self.prefill.send_port, self.clock, limits)
        self.receiving = ReceiveSessions(self.decode.me, self.decode.send_port, self.clock, limits)
        self.sent_events: list[object] = []
        self.received_events: list[object] = []
        self.passed: set[int] = set()

    def computed(self, session: int, end: int, blocks: Sequence[int]) -> None:
        done = [ChunkDone(session=session, end=end, blocks=tuple(blocks))]
        for port in self.prefill.ports:
            self.prefill.pipe.append(partial(port.chunks_finished, done))

    def round(self, *, busy: bool = False) -> None:
        """Every port takes one step; every session hears what its ports said. ``busy``: the
        ranks' main threads compute, so commands wait."""
        for side, sessions in ((self.prefill, self.sending), (self.decode, self.receiving)):
            if not busy:
                side.deliver()
            for port in side.ports:
                port.step(self.timeout_s)
            emitted, side.emitted = side.emitted, []
            for rank, message in emitted:
                sessions.on_port(rank, message)
            sessions.tick()
        self.sent_events += self.sending.poll()
        self.received_events += self.receiving.poll()

    def run(self, rounds: int = 60, *, seal: bool = True, advance_s: float = 0.0) -> None:
        """Rounds until nothing is open; seals are passed on as gRPC would."""
        for _ in range(rounds):
            if not self.sending.open_count and not self.receiving.open_count:
                break
            self.round()
            for event in self.sent_events:
                if isinstance(event, SealedOut) and seal and event.session not in self.passed:
                    self.passed.add(event.session)
                    self.receiving.sealed(event.session - 1, event.seal)
            if advance_s:
                self.clock.advance(advance_s)
        self.sent_events += self.sending.poll()
        self.received_events += self.receiving.poll()

    def hand_off(
        self,
        tokens: int,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        start: int = 0,
    ) -> tuple[int, int]:
        """Write the prompt into prefill's caches, open both sides, say it is computed."""
        receive, offer = self.receiving.open(
            "r", self.prefill.me, start, tokens, target_blocks, self.wire
        )
        send = self.sending.open(offer, self.decode.me)
        for rank, cache in enumerate(self.prefill.caches):
            write(cache, self.prefill.kv, rank, source_blocks, tokens, seed=send)
        self.computed(send, tokens, source_blocks)
        return receive, send

    def equal(self, send: int, target_blocks: Sequence[int], tokens: int, start: int = 0) -> bool:
        """Does decode hold what prefill computed, to the bit?"""
        kv = self.decode.kv
        return all(
            torch.equal(
                read(cache, kv, target_blocks, tokens)[start:].contiguous().view(torch.uint8),
                truth(kv, rank, tokens, seed=send)[start:].contiguous().view(torch.uint8),
            )
            for rank, cache in enumerate(self.decode.caches)
        )

    def close(self) -> None:
        for port in self.prefill.ports + self.decode.ports:
            port.close()
