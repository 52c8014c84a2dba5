"""The peers: one thread's memcpy, plain TCP sockets, and NIXL's READ, over the same blocks.

Their receiver's pool lies on pages of the same kind as ours, and their sender's is the very memory
that ours is.
"""

from __future__ import annotations

import ctypes
import select
import socket
import time
from typing import Any

from benchmarks.transfer_link import WAIT_S, Link, PeerGone, Setup
from benchmarks.transfer_shape import Bytes, Work, check, layout, map_source, target_pool

PIECES = 16
"""Blocks that are given to the system in one call."""
LOOKS = 100
"""That NIXL's sender takes at its side before it looks whether it is still wanted."""
BUFFERS = (0, 1 << 20, 4 << 20)
"""Of a socket, that are tried; 0: what the system chooses."""


class Receiver:
    """All three; ``way``: ``memcpy``, ``nixl``, or ``tcp`` with the size of a socket's buffer."""

    def __init__(self, setup: Setup, link: Link) -> None:
        self._source_BN = _source(setup)
        self._target_BN = target_pool(setup.pool_blocks)
        self._ways: dict[str, Any] = {"memcpy": Memcpy(self._source_BN, self._target_BN)}
        if setup.nixl:
            self._ways["nixl"] = Nixl(self._target_BN, link)
        self._ways |= {f"tcp {buffer}": Tcp(self._target_BN, link, buffer) for buffer in BUFFERS}

    def move(self, work: Work, *, way: str) -> tuple[float, int]:
        """(seconds, bytes): whole blocks, so a last one that is part full counts in full."""
        there, here = work.tables(len(self._target_BN))
        return self._ways[way].move(there, here), len(here) * self._target_BN.shape[1]

    def check(self, work: Work, *, way: str) -> None:
        """Move once into emptied memory. Raises ValueError: not what was sent."""
        self._target_BN[:] = 0
        self.move(work, way=way)
        check(work, self._source_BN, self._target_BN)

    def close(self) -> None:
        """The process ends, and with it all that it holds."""


class Sender:
    """Sends over sockets what the receiver asks for, and drives NIXL's side while it is told to.

    NIXL's own thread would do so too, but would run while the others have their turn as well.
    """

    def __init__(self, setup: Setup) -> None:
        self._source_BN = _source(setup)
        self._agent: Any = _agent("sender", self._source_BN) if setup.nixl else None
        self._connections: dict[int, socket.socket] = {}

    def serve(self, link: Link) -> None:
        if self._agent is not None:
            first, size = self._source_BN.ctypes.data, self._source_BN.shape[1]
            link.say("here", self._agent.get_agent_metadata(), first, size)
        while True:
            word, *rest = link.hear(None)
            if word == "connect":
                self._connect(*rest)
            elif word == "drive":
                self._drive(link)
            else:
                buffer, blocks = rest
                self._send(self._connections[buffer], blocks)

    def _drive(self, link: Link) -> None:
        """Until the next message."""
        while not select.select([link], [], [], 0)[0]:
            for _ in range(LOOKS):
                self._agent.get_new_notifs()
        link.expect("rest")

    def _connect(self, port: int, buffer: int) -> None:
        sock = socket.socket()
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        sock.connect(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[buffer] = sock

    def _send(self, sock: socket.socket, blocks: list[int]) -> None:
        views = [self._source_BN[block].data for block in blocks]
        while views:
            sent = sock.sendmsg(views[:PIECES])
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def close(self) -> None:
        for sock in self._connections.values():
            sock.close()


class Memcpy:
    """C's, a call a block, by the receiver alone: the sender's pool is mapped."""

    def __init__(self, source_BN: Bytes, target_BN: Bytes) -> None:
        self._from, self._to = source_BN.ctypes.data, target_BN.ctypes.data
        self._size = target_BN.shape[1]
        self._copy = ctypes.CDLL(None).memcpy
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._copy.restype = ctypes.c_void_p

    def move(self, there: list[int], here: list[int]) -> float:
        size = self._size
        began = time.perf_counter()
        for block, into in zip(there, here, strict=True):
            self._copy(self._to + into * size, self._from + block * size, size)
        return time.perf_counter() - began


class Tcp:
    """A connection over loopback; the clock runs from the order to send."""

    def __init__(self, target_BN: Bytes, link: Link, buffer: int) -> None:
        self._target_BN, self._link, self._buffer = target_BN, link, buffer
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if buffer:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            listener.settimeout(WAIT_S)
            link.say("connect", listener.getsockname()[1], buffer)
            self._socket, _ = listener.accept()
        self._socket.settimeout(None)  # MSG_WAITALL waits in blocking sockets only

    def move(self, there: list[int], here: list[int]) -> float:
        views = [self._target_BN[block].data for block in here]
        began = time.perf_counter()
        self._link.say("send", self._buffer, there)
        for view in views:
            if self._socket.recv_into(view, len(view), socket.MSG_WAITALL) != len(view):
                raise PeerGone("the sender's socket closed")
        return time.perf_counter() - began


class Nixl:
    """A prepared READ with one descriptor a block; preparing it is not timed."""

    def __init__(self, target_BN: Bytes, link: Link) -> None:
        self._agent, self._link = _agent("receiver", target_BN), link
        metadata, there, size = link.expect("here")
        remote, here = self._agent.add_remote_agent(metadata), target_BN.ctypes.data
        self._there, self._here = (
            self._agent.prep_xfer_dlist(
                name, [(first + block * size, size, 0) for block in range(len(target_BN))], "DRAM"
            )
            for name, first in ((remote, there), ("NIXL_INIT_AGENT", here))
        )
        link.say("drive")
        self._agent.make_connection(remote)
        link.say("rest")

    def move(self, there: list[int], here: list[int]) -> float:
        handle = self._agent.make_prepped_xfer("READ", self._here, here, self._there, there)
        self._link.say("drive")
        began = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC" and time.perf_counter() - began < WAIT_S:
            state = self._agent.check_xfer_state(handle)
        took = time.perf_counter() - began
        self._link.say("rest")
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise PeerGone(f"NIXL's READ is {state} after {took:.1f} s")
        return took


def _source(setup: Setup) -> Bytes:
    return map_source(setup.sources[1][0], layout(1).block_bytes(0))[0]


def _agent(name: str, pool_BN: Bytes) -> Any:
    from nixl_cu12 import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(pool_BN.ctypes.data, pool_BN.nbytes, 0, "")], "DRAM")
    return agent
