"""The two processes of a transfer: the receiver starts the sender, and they talk in whole messages.

The bench talks to the receiver (``worker.py``), and the receiver to the sender, over a socket that
keeps messages apart. Each has a core of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import msgspec

WAIT_S = 120.0
"""For any answer; a machine under load moves 1 GiB slowly."""
MOST_BYTES = 1 << 17


class PeerGone(Exception):
    """The other process has ended or says nothing; the message says which."""


class Link:
    """Messages are lists of plain values, the first a word."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._coder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[Any])

    def fileno(self) -> int:
        return self._sock.fileno()

    def say(self, *words: Any) -> None:
        self._sock.send(self._coder.encode(list(words)))

    def hear(self, within_s: float | None = WAIT_S) -> list[Any]:
        """The next message. Raises PeerGone."""
        self._sock.settimeout(within_s)
        try:
            data = self._sock.recv(MOST_BYTES)
        except TimeoutError:
            raise PeerGone(f"the other process said nothing within {within_s:g} s") from None
        if not data:
            raise PeerGone("the other process has ended")
        return self._decoder.decode(data)

    def close(self) -> None:
        self._sock.close()

    def expect(self, word: str) -> list[Any]:
        """The rest of the next message, which must begin with ``word``. Raises PeerGone."""
        said, *rest = self.hear()
        if said != word:
            raise PeerGone(f"the other process said {said!r} where {word!r} was due: {rest}")
        return rest


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What both processes of a pair are told, as JSON."""

    sources: dict[int, list[str]]
    """By TP: the file of each rank's pool."""
    pool_blocks: int
    cores: tuple[int, int]
    """Of the sender, and of the receiver."""
    untuned: dict[str, str]
    """UCX's own values of what our ucx wire sets, as environment."""
    nixl: bool
    """It is installed."""

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def start_sender(kind: str, setup: Setup) -> tuple[Link, subprocess.Popen[bytes]]:
    """A process of the same worker for the other end; it ends when its link closes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, "-m", "benchmarks.transfer_worker", kind, setup.text()]
    argv += ["--link", str(theirs.fileno())]
    # Its output must not come between the receiver's answers to the bench.
    process = subprocess.Popen(
        argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()
    )
    theirs.close()
    return Link(ours), process


def stay_on(core: int) -> None:
    """Keep this process, with all the threads it has and will have, on one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def two_cores() -> tuple[int, int]:
    """For the sender and for the receiver. Exits where there are not two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("bench-transfer needs two cores: one for each process of a transfer")
    return cores[0], cores[1]
