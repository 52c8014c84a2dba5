"""The driver's side of the rank processes: one link a rank, one thread for all links.

The thread spawns the ranks, hands on what they say, notices their death, and writes what a
socket did not take at once. Linux kills a rank when the *thread* that spawned it ends, so it is
this thread, which lives as long as the ranks, and never a caller's.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread

from ekiden.core.clock import Clock
from ekiden.core.env import for_child
from ekiden.core.errors import ReplicaFailed
from ekiden.engine.wire import FrameReader, Up

MAX_BACKLOG = 512 << 20
"""Bytes that may wait for a rank that does not read. Plans are kilobytes, a handful in flight."""

TICK_S = 0.5
"""Seconds between two looks of the thread when nothing happens."""

_READ = 1 << 18


class RankLink:
    """One rank process and the socket to it. ``send`` from any thread, the rest from the loop."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.rank = rank
        self.process: subprocess.Popen[bytes] | None = None
        self.ended = Event()
        """Set once the process has closed its end: it has exited, or is about to."""
        self.heard_at: float | None = None
        """When the rank last said anything; None until it first did."""
        self.sock, self._theirs = socket.socketpair()
        self.sock.setblocking(False)
        self._clock = clock
        self.watched = False
        """Whether the loop waits for the socket to take more."""
        self._frames = FrameReader()
        self._backlog = bytearray()
        self._lock = Lock()

    def spawn(self, environment: dict[str, str]) -> None:
        """Start the rank. It has a session of its own: Ctrl-C reaches the driver only."""
        fd = self._theirs.fileno()
        command = [sys.executable, "-P", "-m", "ekiden.engine.rank_process", str(fd)]
        with self._theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def send(self, data: bytes) -> bool:
        """Send a frame without waiting. True if some of it is left for the loop to write.

        Raises:
            ReplicaFailed: MAX_BACKLOG bytes are waiting already.
        """
        with self._lock:
            if len(self._backlog) + len(data) > MAX_BACKLOG:
                raise ReplicaFailed(
                    f"rank {self.rank} has not read the last {len(self._backlog)} bytes sent to it"
                )
            self._backlog += data
            return self._push()

    def flush(self) -> bool:
        """Write what the socket takes. True if more is left."""
        with self._lock:
            return self._push()

    def _push(self) -> bool:
        while self._backlog:
            try:
                with memoryview(self._backlog) as view:
                    count = self.sock.send(view)
            except BlockingIOError:
                return True
            except OSError:
                # The rank is gone; the loop reads the end of the stream and says so.
                self._backlog.clear()
                break
            del self._backlog[:count]
        return False

    @property
    def pending(self) -> bool:
        return bool(self._backlog)

    def read(self) -> list[Up]:
        """Messages that have arrived; sets ``ended`` at the end of the stream."""
        try:
            data = self.sock.recv(_READ)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended.set()
            return []
        self.heard_at = self._clock.now()
        return self._frames.feed(data)

    def obituary(self) -> str:
        """How the process ended, in words: ``was killed by SIGKILL``."""
        try:
            code = self.process.wait(timeout=1.0) if self.process else 0
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def kill(self, timeout_s: float) -> None:
        """Wait for the end of the process; kill it first if it has not closed its socket."""
        if self.process is None:
            self._theirs.close()
            return
        if not self.ended.is_set():
            self.process.kill()
        try:
            self.process.wait(timeout=timeout_s / 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=timeout_s / 2)


class RankLoop(Thread):
    """The one thread over all links. Callbacks run on it and must be quick.

    It has a guest, the engine: ``guest`` is called at the end of each turn. Written in that call,
    the next step is with the ranks before the thread sleeps again.
    """

    def __init__(
        self,
        links: Sequence[RankLink],
        *,
        on_message: Callable[[int, Up], None],
        on_end: Callable[[int, str], None],
        on_crash: Callable[[Exception], None],
        clock: Clock,
    ) -> None:
        super().__init__(name="ekiden-ranks", daemon=True)
        self._links = links
        self._on_message = on_message
        self._on_end = on_end
        self._on_crash = on_crash
        self._clock = clock
        self._stopping = Event()
        self.spawned = Event()
        """Set when no more rank will be spawned."""
        self.guest: Callable[[], None] = _nobody
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self.looked_at = clock.now()
        """When the thread last had everything read that there was. Silence counts up to here,
        so a driver that was itself stopped does not accuse its ranks."""

    def wake(self) -> None:
        """Make the thread take a turn: something is left to write, or to do. Any thread."""
        try:
            self._waker.send(b"\0")
        except OSError:
            return  # It has wake-ups enough, or has been stopped.

    def stop(self, timeout_s: float) -> None:
        """End the thread, after the ranks have ended. Not from a callback."""
        self._stopping.set()
        self.wake()
        self.join(timeout_s)
        self._selector.close()
        for sock in (self._waker, self._wakened, *(link.sock for link in self._links)):
            sock.close()

    def run(self) -> None:
        try:
            try:
                self._spawn()
            finally:
                self.spawned.set()
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:
            self._on_crash(error)
            # Its end would kill the ranks without a word; let the driver close them first.
            while not self._stopping.wait(TICK_S):
                self.guest()

    def _spawn(self) -> None:
        # A rank imports from where its driver does; no temporary directory, no copied code.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        for link in self._links:
            link.spawn(for_child(PYTHONPATH=path))
            self._selector.register(link.sock, selectors.EVENT_READ, link)
        self._selector.register(self._wakened, selectors.EVENT_READ)

    def _turn(self) -> None:
        ready = self._selector.select(TICK_S)
        for key, events in ready:
            if key.data is None:
                self._wakened.recv(4096)
            else:
                self._serve(key.data, events)
        self.looked_at = self._clock.now()
        self.guest()
        for link in self._links:
            pending = link.pending
            if pending != link.watched and not link.ended.is_set():
                link.watched = pending
                write = selectors.EVENT_WRITE if pending else 0
                self._selector.modify(link.sock, selectors.EVENT_READ | write, link)

    def _serve(self, link: RankLink, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            link.flush()
        if not events & selectors.EVENT_READ:
            return
        for message in link.read():
            self._on_message(link.rank, message)
        if link.ended.is_set():
            self._selector.unregister(link.sock)
            self._on_end(link.rank, link.obituary())


def _nobody() -> None:
    """The guest before there is one."""
