"""The wire between hosts: UCX through UCXX, tag matching only.

What this file decides, and why:

- One worker, driven by the port's own thread: progress, probe, arm, then sleep. No
  progress thread and no asyncio, so nothing spins and nothing completes behind our back.
- The context has no remote memory access: a connected peer cannot read or write this process.
- No receive is posted before its message is there (probe, then receive by handle). UCX cannot
  cancel a receive that has begun to match, and a cancelled one may swallow a later message.
- Messages above ``RNDV_THRESH`` go by rendezvous with active messages. The eager protocol, which
  UCX prefers on TCP, buffers whole messages at a receiver that has no room, and a receive that was
  half done when its peer died would never complete. With rendezvous it completes with an error.
- Both ends connect to each other's worker address with error handling on; UCX joins the two into
  one connection. So the receiver too hears of a dead peer, within milliseconds, and can break
  the connection, after which every receive from that peer completes.
- UCX tells the other end of a dead process, but not of a connection closed on purpose. So a last
  small message, the farewell, says it; where it cannot get through, deadlines do the rest.
- A peer that only stops (SIGSTOP) is never reported by UCX; deadlines are the port's.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from typing import Any

import numpy as np
import xxhash

from ekiden.core import env
from ekiden.core.errors import ReplicaFailed, SetupError
from kv_transfer.transports.base import Completed, Event, Incoming, PeerLost, Pieces

SETTINGS = {
    "TLS": "tcp",
    "RNDV_SCHEME": "am",
    "RNDV_THRESH": "64K",
    "PROTO_ENABLE": "n",
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "512K",
}
"""UCX options that we set unless the operator has set ``UCX_<name>``. The scheme is chosen for how
it fails (see above); the older protocols (``PROTO_ENABLE``) fail as well as the newer ones and
took a sixth less processor time at the receiver, on TCP with messages of 4 MiB."""

MAGIC = b"ucx1"
CLOSE_NS = 1_000_000_000
PROBES_PER_POLL = 256
FAREWELL = (1 << 64) - 1
"""The tag of a farewell; its payload is the endpoint of the end that left."""
FAREWELL_BYTES = 4096


def _load() -> Any:
    try:
        import ucxx._lib.libucxx as ucx
    except ImportError as error:
        raise SetupError(
            f"--kv-transport ucx needs the package ucxx, which cannot be imported ({error}): "
            "install ekiden[worker]"
        ) from error
    return ucx


class UcxTransport:
    """See the module."""

    in_place = False

    def __init__(self) -> None:
        env.quiet_ucx()
        self._ucx = ucx = _load()
        from ucxx._lib.arr import Array

        self._array = Array
        features = (ucx.Feature.TAG, ucx.Feature.WAKEUP, ucx.Feature.STREAM)
        settings = {k: v for k, v in SETTINGS.items() if k not in env.ucx_settings()}
        try:
            self._context = ucx.UCXContext(settings, feature_flags=features)
            self._worker = ucx.UCXWorker(
                self._context, enable_delayed_submission=False, enable_python_future=False
            )
            self._worker.init_blocking_progress_mode()
        except ucx.UCXError as error:
            raise SetupError(
                f"UCX cannot start with {settings}: {error}; set UCX_TLS to a transport that "
                "this machine has"
            ) from error
        self.fds = (self._worker.epoll_file_descriptor,)
        self._any_tag, self._no_mask = ucx.UCXXTag(0), ucx.UCXXTagMask(0)
        self._numbers = itertools.count(1)
        self._peers: dict[int, Any] = {}
        self._addresses: dict[bytes, int] = {}
        self._closed: deque[int] = deque()
        self._ops: dict[int, tuple[Any, memoryview]] = {}
        self._trash: list[tuple[Any, Any]] = []
        self._messages: dict[int, Any] = {}
        self._failed: list[Event] = []
        self._lost: list[Event] = []
        self._farewells: list[tuple[Any, memoryview]] = []
        self.wire = "ucx/" + "+".join(_transports(self._context.info))

    def register(self, arena: memoryview) -> None:
        """UCX registers what it sends and receives by itself, and keeps it."""

    def describe(self) -> bytes:
        return _wrap(bytes(self._worker.address.tobytes()))

    def connect(self, endpoint: bytes) -> int:
        if (known := self._addresses.get(endpoint)) is not None:
            return known
        peer = next(self._numbers)
        try:
            address = self._ucx.UCXAddress.create_from_buffer(_unwrap(endpoint))
            connection = self._ucx.UCXEndpoint.create_from_worker_address(
                self._worker, address, True
            )
        except self._ucx.UCXError as error:
            raise ReplicaFailed(f"UCX cannot connect to the KV endpoint given: {error}") from error
        connection.set_close_callback(self._closed.append, (peer,))
        self._peers[peer] = connection
        self._addresses[endpoint] = peer
        return peer

    def send(self, peer: int, tag: int, pieces: Pieces) -> int:
        (buffer,) = pieces
        op = next(self._numbers)
        connection = self._peers.get(peer)
        if connection is None or not connection.alive:
            self._failed.append(Completed(op, "the connection is lost"))
            return op
        request = connection.tag_send(self._array(buffer), self._ucx.UCXXTag(tag))
        self._ops[op] = (request, buffer)
        return op

    def receive(self, message: int, pieces: Pieces) -> int:
        (buffer,) = pieces
        op = next(self._numbers)
        found = self._messages.pop(message)
        request = self._worker.tag_recv_with_handle(self._array(buffer), found)
        self._ops[op] = (request, buffer)
        return op

    def discard(self, message: int) -> None:
        # Too small a buffer ends the message at both ends without moving its bytes.
        nothing = np.empty(0, np.uint8)
        found = self._messages.pop(message)
        request = self._worker.tag_recv_with_handle(self._array(nothing), found)
        self._trash.append((request, nothing))

    def poll(self) -> list[Event]:
        self._worker.progress()
        return self._collect()

    def idle(self) -> float:
        if self._failed or self._lost or self._closed:
            return 0.0
        return math.inf if self._worker.arm() else 0.0

    def disconnect(self, peer: int) -> None:
        if (connection := self._peers.get(peer)) is not None:
            self._say_farewell(connection)
            self._drop(peer, "this end broke the connection")

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._collect()
        for message in list(self._messages):
            self.discard(message)
        self._collect()
        self._ops.clear()
        self._trash.clear()
        self._farewells.clear()
        del self._worker, self._context

    def _collect(self) -> list[Event]:
        events, self._failed = self._failed, []
        for _ in range(PROBES_PER_POLL):
            found = self._worker.tag_probe(self._any_tag, self._no_mask, True)
            if not found.matched:
                break
            if (tag := found.sender_tag.value) == FAREWELL:
                self._hear_farewell(found)
                continue
            message = next(self._numbers)
            self._messages[message] = found
            events.append(Incoming(message, tag, found.length))
        for op, (request, _) in list(self._ops.items()):
            if request.completed:
                del self._ops[op]
                events.append(Completed(op, self._error(request)))
        self._trash = [entry for entry in self._trash if not entry[0].completed]
        # After the completions: what came through before the loss counts.
        return events + self._losses()

    def _losses(self) -> list[Event]:
        while self._closed:
            peer = self._closed.popleft()
            if (connection := self._peers.get(peer)) is not None:
                self._drop(peer, self._reason(connection))
        waiting, self._farewells = self._farewells, []
        for request, buffer in waiting:
            if not request.completed:
                self._farewells.append((request, buffer))
            elif (peer_left := self._addresses.get(bytes(buffer))) is not None:
                self._drop(peer_left, "the other end broke the connection")
        lost, self._lost = self._lost, []
        return lost

    def _say_farewell(self, connection: Any) -> None:
        if connection.alive:
            buffer = memoryview(bytearray(self.describe()))
            request = connection.tag_send(self._array(buffer), self._ucx.UCXXTag(FAREWELL))
            self._worker.progress()
            if not request.completed:
                self._trash.append((request, buffer))

    def _hear_farewell(self, found: Any) -> None:
        buffer = np.empty(min(found.length, FAREWELL_BYTES), np.uint8)
        request = self._worker.tag_recv_with_handle(self._array(buffer), found)
        self._farewells.append((request, buffer.data))

    def _drop(self, peer: int, reason: str) -> None:
        """Close by force: with error handling on, every request of the connection then ends."""
        connection = self._peers.pop(peer)
        self._addresses = {a: p for a, p in self._addresses.items() if p != peer}
        connection.remove_close_callback()
        connection.close_blocking(CLOSE_NS, 1)
        self._lost.append(PeerLost(peer, reason))

    def _reason(self, connection: Any) -> str:
        try:
            connection.raise_on_error()
        except self._ucx.UCXError as error:
            return str(error)
        return "the connection was closed"

    def _error(self, request: Any) -> str:
        try:
            request.check_error()
        except self._ucx.UCXError as error:
            return str(error) or type(error).__name__
        return ""


def _wrap(address: bytes) -> bytes:
    return MAGIC + xxhash.xxh3_64_digest(address) + address


def _unwrap(endpoint: bytes) -> bytes:
    """The worker address in an endpoint. UCX ends the process on an address that is none."""
    head = len(MAGIC) + 8
    address = endpoint[head:]
    if not address or endpoint != _wrap(address):
        raise ReplicaFailed(
            f"a KV endpoint of {len(endpoint)} bytes is no address of the ucx wire: "
            "give both sides the same --kv-transport and release"
        )
    return address


def _transports(info: str) -> list[str]:
    """The transports UCX may use, out of its own description of the context."""
    found = re.findall(r"^#\s+resource\s+\d+\s*:.*\s(\w+)/\S+\s*$", info, re.MULTILINE)
    return sorted(set(found)) or ["?"]
