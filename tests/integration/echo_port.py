"""KV ports that rank processes open in tests: what a message says is done."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ekiden.engine.port import ChunkDone, PortContext


class EchoPort:
    """Echoes from a thread of its own, as a transport would, or misbehaves as told."""

    def __init__(self, context: PortContext, emit: Callable[[bytes], None]) -> None:
        self._context = context
        self._emit = emit

    def describe(self) -> bytes:
        return b"%d of epoch %d" % (self._context.rank, self._context.epoch)

    def command(self, message: bytes) -> None:
        verb, _, argument = message.partition(b" ")
        if verb == b"busy":
            self._emit(b"started")
            _compute(float(argument))
        elif verb == b"freeze":
            self._emit(b"started")
            # With the GIL held, no other thread of this process can do anything.
            ctypes.PyDLL(None).sleep(int(argument))
        elif verb == b"raise":
            raise RuntimeError(argument.decode())
        elif verb == b"interrupt":
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
        threading.Thread(target=self._emit, args=(message,)).start()

    def chunks_finished(self, chunks: Sequence[ChunkDone]) -> None:
        for done in chunks:
            self._emit(b"%d until %d" % (done.session, done.end))

    def close(self) -> None:
        """Nothing is held."""


def _compute(seconds: float) -> None:
    """Keep the processor busy, as a long prefill does."""
    deadline, square = time.monotonic() + seconds, torch.ones(256, 256)
    while time.monotonic() < deadline:
        square = (square @ square).clamp(max=1.0)


def echo(cache: Any, context: PortContext, emit: Callable[[bytes], None]) -> EchoPort:
    return EchoPort(context, emit)


def exits(cache: Any, context: PortContext, emit: Callable[[bytes], None]) -> EchoPort:
    if context.rank == 1:
        os._exit(3)
    return EchoPort(context, emit)


def hangs(cache: Any, context: PortContext, emit: Callable[[bytes], None]) -> EchoPort:
    threading.Event().wait(60.0)
    return EchoPort(context, emit)
