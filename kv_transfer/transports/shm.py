"""The wire within one host: a peer's pool is mapped read-only, and read from directly.

The pool is an anonymous file in memory (``memfd``). Its descriptor goes over a Unix socket to peers
that have shown the endpoint's key, sealed so that no other process can ever write to it. Nothing
is left behind by a process that dies, and what it shared stays readable for those who read it.

Without a folder the socket has an abstract name, which all processes of one network namespace can
reach. Containers need a folder that they share (any volume will do: the memory is not in it).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import socket
from pathlib import Path

from ekiden.core.errors import ReplicaFailed, SetupError
from kv_transfer.transports.base import Event, PeerLost
from kv_transfer.transports.frames import HEADER, Broken, Connection, Kind
from kv_transfer.transports.stream import StreamTransport

MAGIC = b"shm"
BACKLOG = 256
POPULATED_BYTES = 2 << 30
_F_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4 | 0x10
"""F_SEAL_SEAL, SHRINK, GROW and FUTURE_WRITE: only mappings that exist may write."""


def host_id() -> bytes:
    """The same in all containers of one running kernel, different elsewhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


class ShmTransport(StreamTransport):
    """Listens on a Unix socket, in ``folder`` or (empty) under an abstract name."""

    def __init__(self, folder: str = "") -> None:
        if folder:
            _sweep(Path(folder))
        self._path = _path(folder)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # It has its name once it listens: until then others would take it for a dead one's.
            early = f"{self._path}.new" if folder else self._path
            listener.bind(early)
            listener.listen(BACKLOG)
            if folder:
                os.rename(early, self._path)
        except OSError as error:
            listener.close()
            raise SetupError(
                f"KV over shm needs a socket, and none opens in --kv-shm-dir {folder or '(none)'}: "
                f"{error.strerror or error}"
            ) from error
        self._pool_fd: int | None = None
        self._pools: dict[int, memoryview] = {}
        """Mapped until nobody holds the view any more."""
        super().__init__(MAGIC, listener, host_id() + b"|" + self._path.encode())

    def share(self, pool_fd: int | None) -> None:
        self._pool_fd = pool_fd
        if pool_fd is not None:
            fcntl.fcntl(pool_fd, _F_ADD_SEALS, _SEALS)

    def pool(self, peer: int) -> memoryview | None:
        if (pool := self._pools.get(peer)) is not None:
            return pool
        connection = self._peers.get(peer)
        if connection is None:
            raise ReplicaFailed("the connection is lost")
        if connection.ready:
            raise ReplicaFailed("the peer does not share its KV cache")
        return None

    def poll(self) -> list[Event]:
        events = super().poll()
        for event in events:
            if isinstance(event, PeerLost):
                self._pools.pop(event.peer, None)
        return events

    def close(self) -> None:
        super().close()
        self._pools.clear()
        if not self._path.startswith("\0"):
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _dial(self, address: bytes) -> socket.socket:
        host, _, path = address.partition(b"|")
        if host != host_id():
            raise OSError(errno.EHOSTUNREACH, "it is on another host")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(path.decode())
        except BaseException:
            sock.close()
            raise
        return sock

    def _shown(self, address: bytes) -> str:
        return address.partition(b"|")[2].decode(errors="replace").replace("\0", "@")

    def _welcome(self, connection: Connection) -> None:
        if self._pool_fd is None:
            connection.put(Kind.WELCOME)
            return
        # The first bytes that go this way: the socket has room for them.
        header = HEADER.pack(Kind.WELCOME, 0, 0, 0, 0)
        with contextlib.suppress(OSError):  # a peer that is gone is noticed by reading
            socket.send_fds(connection.sock, [header], [self._pool_fd])

    def _welcomed(self, connection: Connection) -> None:
        if connection.passed_fd < 0:
            return
        fd, connection.passed_fd = connection.passed_fd, -1
        try:
            pool = _mapped(fd)
        except OSError as error:
            raise Broken(f"its pool cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)
        self._pools[self._addresses[connection.peer]] = pool


def _sweep(folder: Path) -> None:
    """Remove the sockets of processes that died: nobody answers them."""
    for path in folder.glob("ekiden-kv-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


def _mapped(fd: int) -> memoryview:
    """The whole of a peer's pool. Touching its pages now doubles the speed at which each block is
    first read, but holds the port up for 0.2 s a GiB: those of a large pool are touched when read.
    """
    small = os.fstat(fd).st_size <= POPULATED_BYTES
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if small else 0)
    return memoryview(mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ))


def _path(folder: str) -> str:
    name = f"ekiden-kv-{os.getpid()}-{secrets.token_hex(8)}"
    return f"{folder}/{name}.sock" if folder else f"\0{name}"
