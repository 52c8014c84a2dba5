"""NIXL: the receiver reads messages out of the sender's staging, by RDMA where the hosts have it.

An optional extra (``pip install "ekiden[nixl]"``). Words go over TCP sockets as on the ``tcp``
wire; an offer also says where in the sender's arena its payload lies, and to take it is one READ of
NIXL's UCX backend. A reader may read the whole arena, and with UCX a connected peer can reach any
memory of this process: endpoints, which hold the keys to it, go over authenticated gRPC only.

NIXL has no descriptor to sleep on: while a read is under way this end looks every ``LOOK_S``.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any

import msgspec
import numpy as np

from ekiden.core.errors import SetupError
from kv_transfer.transports.base import Completed, Event, Pieces
from kv_transfer.transports.frames import Broken, Connection
from kv_transfer.transports.stream import KEY_BYTES, Message
from kv_transfer.transports.tcp import TcpTransport

MAGIC = b"nixl"
LOOK_S = 0.0002
BACKEND = "UCX"


def _load() -> Any:
    try:
        import nixl_cu12 as nixl
    except ImportError as error:
        raise SetupError(
            f"--kv-transport nixl needs the package nixl-cu12, which cannot be imported ({error}): "
            'pip install "ekiden[nixl]"'
        ) from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl


class _Read(msgspec.Struct):
    """A READ under way; its buffer is NIXL's until ``handle`` says that it is over."""

    op: int
    connection: Connection
    offered: int
    handle: Any
    buffer: memoryview


class NixlTransport(TcpTransport):
    """See the module. Every buffer must lie in the arena that was registered."""

    magic = MAGIC

    in_place = False

    def __init__(self, host: str = "127.0.0.1", advertise: str = "") -> None:
        nixl = _load()
        super().__init__(host, advertise)
        try:
            config = nixl.nixl_agent_config(backends=[BACKEND])
            self._agent = nixl.nixl_agent(f"ekiden-{secrets.token_hex(8)}", config)
        except Exception as error:  # NIXL has no class of its own for all of them
            super().close()
            raise SetupError(f"NIXL cannot start with its {BACKEND} backend: {error}") from error
        self._remote: dict[bytes, str] = {}
        self._reads: list[_Read] = []

    @property
    def wire(self) -> str:
        return "nixl"

    def register(self, arena: memoryview) -> None:
        self._base = _address(arena)
        try:
            self._registered = self._agent.register_memory(
                [(self._base, arena.nbytes, 0, "")], "DRAM"
            )
            self._endpoint += b"\n" + self._agent.get_agent_metadata()
        except Exception as error:
            raise SetupError(
                f"NIXL cannot register {arena.nbytes} bytes of staging: {error}"
            ) from error

    def poll(self) -> list[Event]:
        events = super().poll()
        under_way, self._reads = self._reads, []
        for read in under_way:
            if (state := self._state(read)) == "PROC":
                self._reads.append(read)
            else:
                events.append(Completed(read.op, self._finish(read, state)))
        return events

    def idle(self) -> float:
        return min(super().idle(), LOOK_S) if self._reads else super().idle()

    def close(self) -> None:
        super().close()
        for name in self._remote.values():
            self._agent.remove_remote_agent(name)
        self._agent.deregister_memory(self._registered)
        self._remote.clear()
        self._reads.clear()

    def _dial(self, address: bytes) -> Any:
        return super()._dial(address.partition(b"\n")[0])

    def _shown(self, address: bytes) -> str:
        return super()._shown(address.partition(b"\n")[0])

    def _place(self, pieces: Pieces) -> int:
        return _address(pieces[0])

    def _take(self, found: Message, op: int, pieces: Pieces) -> None:
        connection, size, (buffer,) = found.connection, found.size, pieces
        try:
            agent = self._agent_of(connection.peer)
            local = self._agent.get_xfer_descs([(_address(buffer), size, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(found.place, size, 0)], "DRAM")
            handle = self._agent.initialize_xfer("READ", local, remote, agent)
            read = _Read(op, connection, found.op, handle, buffer)
            state = self._agent.transfer(handle)
        except Exception as error:
            self._events.append(Completed(op, f"NIXL cannot read: {error}"))
            self._lose(connection, f"NIXL cannot read: {error}")
            return
        if state == "PROC":
            self._reads.append(read)
        else:
            self._events.append(Completed(op, self._finish(read, state)))

    def _agent_of(self, endpoint: bytes) -> str:
        """NIXL's name of a peer, told of it at first use."""
        if endpoint not in self._remote:
            metadata = endpoint[len(MAGIC) + KEY_BYTES :].partition(b"\n")[2]
            if not metadata:
                raise Broken("the peer has no NIXL metadata")
            name = self._agent.add_remote_agent(metadata)
            self._remote[endpoint] = name.decode() if isinstance(name, bytes) else name
        return self._remote[endpoint]

    def _state(self, read: _Read) -> str:
        try:
            return str(self._agent.check_xfer_state(read.handle))
        except Exception as error:
            return str(error) or "NIXL failed"

    def _finish(self, read: _Read, state: str) -> str:
        """Let go of a read that is over, and tell the sender; the error, empty if good."""
        self._agent.release_xfer_handle(read.handle)
        if state == "DONE" and not read.connection.closed:
            self._let_go(read.connection, read.offered)
            return ""
        if read.connection.closed:
            return "the connection is lost"
        reason = f"NIXL: {state}"
        self._lose(read.connection, reason)
        return reason

    def _gone(self, endpoint: bytes) -> None:
        """The peer is lost: its reads end with an error once NIXL has let go of their buffers."""
        if (name := self._remote.pop(endpoint, None)) is not None:
            self._agent.remove_remote_agent(name)


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
