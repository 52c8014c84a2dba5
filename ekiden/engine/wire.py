"""Messages between a replica's driver and its rank processes, and the frames that carry them.

A frame is a little-endian u32 length and that many bytes of msgpack, over one local socket pair
for each rank. Nothing here reaches the network, and nothing is pickled.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import msgspec

from ekiden.cache.layout import KvLayout
from ekiden.core.config import EngineConfig
from ekiden.engine.plan import StepPlan, StepResult
from ekiden.models.config import ModelConfig

MAX_FRAME = 256 << 20
"""Bytes. Plans and port messages are kilobytes; anything near this is a broken stream."""

SEND_TIMEOUT_S = 30.0
"""How long a rank waits for a driver that does not read before it gives up and ends."""

_LENGTH = struct.Struct("<I")
Message = TypeVar("Message")


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """First message to a rank: everything it needs to become ready."""

    name: str
    """Of the replica; each line of a rank's log begins with it."""
    rank: int
    parent: int
    """Process id of the driver; a rank whose parent is another has been orphaned."""
    config: EngineConfig
    model: ModelConfig
    layout: KvLayout
    num_blocks: int
    mesh: bytes
    """A MeshSpec in msgpack; opaque here, since its module brings torch."""
    port: str
    """``module:attribute`` of a PortFactory, empty for no port."""
    port_options: bytes
    epoch: int
    threads: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    """A step, its block tables packed (``ekiden.engine.tables``)."""

    plan: StepPlan
    kept: tuple[int, ...]


class ToPort(msgspec.Struct, frozen=True, tag="port"):
    """An opaque message for the rank's KV port."""

    message: bytes


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """What a step sampled, by sequence, for the ranks that embed it in a step planned ahead."""

    step: int
    tokens: dict[int, int]


class Close(msgspec.Struct, frozen=True, tag="close"):
    """End: close the port, then the process."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Bytes of weights that this rank has read, of those that it will read."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The rank waits for steps. ``endpoint`` is what its port said of itself."""

    endpoint: bytes


class Done(msgspec.Struct, frozen=True, tag="done"):
    """This rank's part of a step is over; only the sampling rank's result holds tokens."""

    result: StepResult


class FromPort(msgspec.Struct, frozen=True, tag="port"):
    """An opaque message from the rank's KV port."""

    message: bytes


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The process is scheduled, whatever its main thread is busy with."""


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The rank raised and ends. ``setup`` tells an operator's mistake from a failure."""

    message: str
    setup: bool
    detail: str = ""
    """The traceback of what is not an EkidenError: for the log, never for a user."""


Down = Setup | Step | Tokens | ToPort | Close
Up = Loading | Ready | Done | FromPort | Beat | Broken


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"a message cannot hold a {type(value).__name__}")


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"a message cannot hold a {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_path)
_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down, dec_hook=_decode_path)
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up, dec_hook=_decode_path)


def frame(message: Down | Up) -> bytes:
    """``message`` with its length in front.

    Raises:
        ValueError: it is larger than MAX_FRAME.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes passes the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages from a rank, however the stream was split."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Up]:
        """The messages that ``data`` completes, in order.

        Raises:
            ValueError: the stream is broken.
        """
        self._buffer += data
        messages: list[Up] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            body = start + _LENGTH.size
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME:
                raise ValueError(f"a message of {length} bytes passes the limit of {MAX_FRAME}")
            stop = body + length
            if len(self._buffer) < stop:
                break
            messages.append(_up.decode(memoryview(self._buffer)[body:stop]))
            start = stop
        del self._buffer[:start]
        return messages


class DriverGone(Exception):
    """The driver closed the socket, died, or has not read for SEND_TIMEOUT_S."""


class RankWire:
    """A rank's end of the socket. Any thread may send; the main thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = Lock()
        # On the socket, not in Python: a Python timeout would bound the idle wait of receive too.
        limit = struct.pack("@ll", int(SEND_TIMEOUT_S), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Up) -> None:
        """Send, waiting at most SEND_TIMEOUT_S for a driver that does not read.

        Raises:
            DriverGone: it does not read, or is gone.
        """
        data = frame(message)
        try:
            with self._lock:
                self._sock.sendall(data)
        except OSError as error:
            raise DriverGone(str(error)) from error

    def receive(self) -> Down:
        """The next message. An idle rank waits for as long as it has a driver.

        Raises:
            DriverGone: it has none any more.
        """
        length = _LENGTH.unpack(self._exactly(_LENGTH.size))[0]
        return _down.decode(self._exactly(length))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise DriverGone(str(error)) from error
            if not count:
                raise DriverGone("the driver closed the socket")
            view = view[count:]
        return data
