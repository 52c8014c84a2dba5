"""A prefill replica in a process of its own, over a real wire; driven by lines on its stdin.

Lines in: ``open <json>`` (offer, peer, blocks, tokens, computed), ``computed <json>``, ``fail``.
Lines out: the replica's description, then one line an event. All bytes are base64.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec
import torch
from kv_rig import EMPTY, describe, write

from ekiden.cache.layout import KvLayout
from ekiden.cache.tensors import allocate_shared_cache
from ekiden.core.clock import MonotonicClock
from ekiden.engine.port import ChunkDone, KvPort, PortContext
from kv_transfer.description import ReplicaDescription
from kv_transfer.messages import TransferLimits, encode
from kv_transfer.options import PortOptions
from kv_transfer.port import open_port
from kv_transfer.session import SealedOut
from kv_transfer.sessions import ReceiveSessions, SendSessions


def pack(value: object) -> str:
    return base64.b64encode(msgspec.msgpack.encode(value)).decode()


def unpack(text: str, kind: type) -> object:
    return msgspec.msgpack.decode(base64.b64decode(text), type=kind)


class Replica:
    """Ranks as ports with their threads, and the sessions of one role on top."""

    def __init__(
        self,
        kv: KvLayout,
        role: str,
        wire: str,
        *,
        epoch: int,
        blocks: int,
        limits: TransferLimits,
        max_bytes_per_s: float = 0.0,
    ) -> None:
        self.kv = kv
        self.wire = wire
        self.options = PortOptions(transports=(wire,), max_bytes_per_s=max_bytes_per_s)
        self.inbox: queue.Queue[tuple[Callable[..., None], tuple[object, ...]]] = queue.Queue()
        shared = [allocate_shared_cache(kv, rank, blocks) for rank in range(len(kv.ranks))]
        self.caches = [cache.fill_(EMPTY) for cache, _ in shared]
        self._fds = [fd for _, fd in shared]
        self.ports = [self._open(rank, epoch) for rank in range(len(kv.ranks))]
        endpoints = [port.describe() for port in self.ports]
        self.me = describe(kv, endpoints, role=role, epoch=epoch, wires=(wire,))
        kind = SendSessions if role == "prefill" else ReceiveSessions
        self.sessions = kind(self.me, self._send_port, MonotonicClock(), limits)
        self.events: list[object] = []

    def _open(self, rank: int, epoch: int) -> KvPort:
        context = PortContext(
            rank=rank,
            layout=self.kv,
            epoch=epoch,
            options=encode(self.options),
            pool_fd=self._fds[rank],
        )
        return open_port(
            self.caches[rank],
            context,
            lambda message: self.inbox.put((self._on_port, (rank, message))),
        )

    def _on_port(self, rank: int, message: bytes) -> None:
        self.sessions.on_port(rank, message)

    def _send_port(self, message: bytes, rank: int | None) -> None:
        for number, port in enumerate(self.ports):
            if rank in (None, number):
                port.command(message)

    def computed(self, session: int, end: int, blocks: Sequence[int]) -> None:
        for port in self.ports:
            port.chunks_finished([ChunkDone(session=session, end=end, blocks=tuple(blocks))])

    def turn(self, timeout_s: float) -> list[object]:
        """Wait for one thing to happen, handle it, return the new events."""
        try:
            call, arguments = self.inbox.get(timeout=timeout_s)
            call(*arguments)
        except queue.Empty:
            pass
        self.sessions.tick()
        return self.sessions.poll()

    def close(self) -> None:
        for port in self.ports:
            port.close()
        for fd in self._fds:
            os.close(fd)


class Child:
    def __init__(self, kv: KvLayout, epoch: int, wire: str) -> None:
        torch.set_num_threads(1)
        self.replica = Replica(kv, "prefill", wire, epoch=epoch, blocks=64, limits=TransferLimits())
        self.done = False
        print(pack(self.replica.me), flush=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.replica.inbox.put((self._obey, (line,)))
        self.replica.inbox.put((self._leave, ()))

    def _leave(self) -> None:
        self.done = True

    def _obey(self, line: str) -> None:
        verb, _, rest = line.strip().partition(" ")
        body = json.loads(rest)
        if verb == "open":
            self._start(body)
        elif verb == "computed":
            self.replica.computed(body["session"], body["end"], body["blocks"])
        else:
            self.replica.sessions.fail(body["session"], "told to")

    def _start(self, body: dict) -> None:
        peer = unpack(body["peer"], ReplicaDescription)
        session = self.replica.sessions.open(base64.b64decode(body["offer"]), peer)
        for rank, cache in enumerate(self.replica.caches):
            write(cache, self.replica.kv, rank, body["blocks"], body["tokens"], seed=body["seed"])
        self._say("opened", session)
        self.replica.computed(session, body["computed"], body["blocks"])

    def _say(self, *words: object) -> None:
        print(*words, flush=True)

    def run(self) -> None:
        while not self.done:
            for event in self.replica.turn(0.5):
                if isinstance(event, SealedOut):
                    self._say("sealed", event.session, base64.b64encode(event.seal).decode())
                else:
                    self._say(type(event).__name__.lower(), event.session)
        self.replica.close()


if __name__ == "__main__":
    Child(unpack(sys.argv[1], KvLayout), int(sys.argv[2]), sys.argv[3]).run()
