"""Our own wires: real ports and sessions in two processes, as two replicas have them.

A prefill replica of TP1 and one of TP2 in the sender, a decode replica of TP1 in the receiver. What
a service would carry by gRPC (offer, order to send, seal) goes over the link of the two.
"""

from __future__ import annotations

import os
import select
import time
import tracemalloc
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import torch

from benchmarks.transfer_link import WAIT_S, Link, PeerGone, Setup
from benchmarks.transfer_shape import Bytes, Work, check, layout, map_source, target_pool
from ekiden.cache.layout import KvLayout
from ekiden.core.clock import MonotonicClock
from ekiden.core.hashes import GRANULE, SCHEME
from ekiden.engine.port import ChunkDone, KvPort, PortContext
from kv_transfer.description import AUTO_WIRES, MAPPED_WIRES, WIRE_VERSION, ReplicaDescription
from kv_transfer.messages import TransferLimits, encode
from kv_transfer.options import PortOptions
from kv_transfer.port import open_port
from kv_transfer.session import Arrived, Drained, Failed
from kv_transfer.sessions import ReceiveSessions, SendSessions

UNTUNED = "untuned"
"""The group whose UCX has its own settings; the others are named by the sender's TP."""


class Replica:
    """Ranks as ports with their threads, and the sessions of one role on top.

    Other threads put work into ``inbox`` and make ``fd`` readable; ``turn`` does it.
    """

    def __init__(
        self,
        kv: KvLayout,
        role: str,
        epoch: int,
        caches: Sequence[torch.Tensor],
        fds: Sequence[int | None],
        wires: tuple[str, ...],
    ) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._inbox: deque[Callable[[], None]] = deque()
        options = encode(PortOptions(transports=wires))
        self.ports: list[KvPort] = []
        for rank, (cache, fd) in enumerate(zip(caches, fds, strict=True)):
            context = PortContext(rank=rank, layout=kv, epoch=epoch, options=options, pool_fd=fd)
            self.ports.append(open_port(cache, context, partial(self._emitted, rank)))
        self.me = _describe(kv, role, epoch, wires, [port.describe() for port in self.ports])
        make = SendSessions if role == "prefill" else ReceiveSessions
        self.sessions: Any = make(self.me, self._send_port, MonotonicClock(), TransferLimits())

    def _emitted(self, rank: int, message: bytes) -> None:
        self._inbox.append(partial(self._on_port, rank, message))
        os.eventfd_write(self.fd, 1)

    def _on_port(self, rank: int, message: bytes) -> None:
        self.sessions.on_port(rank, message)

    def _send_port(self, message: bytes, rank: int | None) -> None:
        for number, port in enumerate(self.ports):
            if rank in (None, number):
                port.command(message)

    def turn(self) -> list[Any]:
        """What happened to the sessions since the last turn."""
        with suppress(BlockingIOError):  # nobody has put anything in
            os.eventfd_read(self.fd)
        while self._inbox:
            self._inbox.popleft()()
        self.sessions.tick()
        events: list[Any] = self.sessions.poll()
        return events

    def close(self) -> None:
        for port in self.ports:
            port.close()
        os.close(self.fd)


class Sender:
    """A prefill replica of each group; obeys the receiver until the link closes."""

    def __init__(self, setup: Setup) -> None:
        self._replicas = {
            "TP1": _prefill(setup, 1, AUTO_WIRES),
            "TP2": _prefill(setup, 2, AUTO_WIRES),
        }
        with _environment(setup.untuned):
            self._replicas[UNTUNED] = _prefill(setup, 1, ("ucx",))
        self._peers: dict[str, ReplicaDescription] = {}
        self._group = "TP1"

    def serve(self, link: Link) -> None:
        link.say("here", {group: encode(r.me) for group, r in self._replicas.items()})
        for group, me in link.expect("here")[0].items():
            self._peers[group] = msgspec.msgpack.decode(me, type=ReplicaDescription)
        fds = [link.fileno(), *(replica.fd for replica in self._replicas.values())]
        while True:
            ready, _, _ = select.select(fds, [], [])
            if link.fileno() in ready:
                self._obey(link, *link.hear())
            self._tell(link)

    def _obey(self, link: Link, word: str, *rest: Any) -> None:
        if word == "open":
            self._group, offer = rest
            sessions, peer = self._replicas[self._group].sessions, self._peers[self._group]
            link.say("opened", sessions.open(offer, peer))
        elif word == "send":
            session, end, blocks = rest
            done = [ChunkDone(session=session, end=end, blocks=tuple(blocks))]
            for port in self._replicas[self._group].ports:
                port.chunks_finished(done)
        elif word == "trace":
            _trace_from_here()
            link.say("tracing")
        else:
            link.say("traced", _traced())

    def _tell(self, link: Link) -> None:
        for replica in self._replicas.values():
            for event in replica.turn():
                if isinstance(event, Failed):
                    link.say("failed", event.reason)
                elif not isinstance(event, Drained):
                    link.say("sealed", event.seal)

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.close()


class Receiver:
    """Two decode replicas over one pool, ours and the untuned one, and the clock."""

    def __init__(self, setup: Setup, link: Link) -> None:
        self._link = link
        kv = layout(1)
        self._source_BN = map_source(setup.sources[1][0], kv.block_bytes(0))[0]
        self._target_BN = target_pool(setup.pool_blocks)
        cache = _as_cache(self._target_BN, kv, 0)
        tuned = Replica(kv, "decode", 100, [cache], [None], AUTO_WIRES)
        with _environment(setup.untuned):
            untuned = Replica(kv, "decode", 101, [cache], [None], ("ucx",))
        self._replicas = {"TP1": tuned, "TP2": tuned, UNTUNED: untuned}
        self._peers = {
            group: msgspec.msgpack.decode(me, type=ReplicaDescription)
            for group, me in link.expect("here")[0].items()
        }
        link.say("here", {group: encode(r.me) for group, r in self._replicas.items()})

    def move(self, work: Work, *, wire: str, group: str = "TP1") -> tuple[float, int]:
        """(seconds from the order to send until Arrived, bytes)."""
        there, here = work.tables(len(self._target_BN))
        replica = self._replicas[group]
        peer = self._peers[group]
        session, offer = replica.sessions.open("r", peer, 0, work.tokens, here, wire)
        self._link.say("open", group, offer)
        sending = self._link.expect("opened")[0]
        began = time.perf_counter()
        self._link.say("send", sending, work.tokens, there)
        arrived, when = self._until_drained(replica, session)
        return when - began, arrived.bytes

    def check(self, work: Work, **how: str) -> None:
        """Move once into emptied memory. Raises ValueError: not what was sent."""
        self._target_BN[:] = 0
        self.move(work, **how)
        check(work, self._source_BN, self._target_BN)

    def trace(self, work: Work, **how: str) -> int:
        """By how many bytes Python's objects grew at most, in either process, during a move."""
        self.move(work, **how)
        self._link.say("trace")
        self._link.expect("tracing")
        _trace_from_here()
        self.move(work, **how)
        ours = _traced()
        self._link.say("stop tracing")
        return max(ours, int(self._link.expect("traced")[0]))

    def _until_drained(self, replica: Replica, session: int) -> tuple[Arrived, float]:
        """What arrived, and when. Raises PeerGone."""
        found: list[tuple[Arrived, float]] = []
        while True:
            for event in replica.turn():
                if isinstance(event, Failed):
                    raise PeerGone(f"the session failed: {event.reason}")
                if isinstance(event, Arrived):
                    found.append((event, time.perf_counter()))
                elif isinstance(event, Drained):
                    return found[0]
            ready, _, _ = select.select([self._link, replica.fd], [], [], WAIT_S)
            if not ready:
                raise PeerGone(f"nothing arrived within {WAIT_S:g} s")
            if self._link in ready:
                replica.sessions.sealed(session, self._link.expect("sealed")[0])

    def close(self) -> None:
        self._replicas["TP1"].close()
        self._replicas[UNTUNED].close()


def _prefill(setup: Setup, tp: int, wires: tuple[str, ...]) -> Replica:
    kv = layout(tp)
    mapped = not MAPPED_WIRES.isdisjoint(wires)
    caches, fds = [], []
    for rank, path in enumerate(setup.sources[tp]):
        pool_BN, fd = map_source(path, kv.block_bytes(rank), writable=mapped)
        caches.append(_as_cache(pool_BN, kv, rank))
        fds.append(fd if mapped else None)
    return Replica(kv, "prefill", 10 * tp + mapped, caches, fds, wires)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """For what reads it within the block."""
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def _as_cache(pool_BN: Bytes, kv: KvLayout, rank: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a sender's may not be written to is known
        flat = torch.from_numpy(pool_BN).view(torch.bfloat16)
    return flat.view(len(pool_BN), *kv.block_shape(rank))


def _trace_from_here() -> None:
    tracemalloc.start(1)
    tracemalloc.reset_peak()


def _traced() -> int:
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _describe(
    kv: KvLayout, role: str, epoch: int, wires: tuple[str, ...], endpoints: Sequence[bytes]
) -> ReplicaDescription:
    return ReplicaDescription(
        replica_id=f"{role}-{kv.tp}", role=role, epoch=epoch, version="0",
        wire_version=WIRE_VERSION, model="m", model_fingerprint="f", tokenizer_fingerprint="t",
        granule=GRANULE, hash_scheme=SCHEME, dtype="bfloat16", kv=kv, wires=wires,
        endpoints=tuple(endpoints), max_model_len=1 << 17, vocab_size=1 << 17,
    )  # fmt: skip
