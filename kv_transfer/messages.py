"""Every message of a hand-off: between replicas (offer, seal) and between a service and its ports.

All are msgpack of typed structs. The offer travels in ``Reserved.offer``, the seal in
``Sealed.seal``; the rest never leaves a replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from ekiden.cache.layout import KvLayout
from ekiden.core.errors import ReplicaFailed

INDEX_BITS = 24
TAKEN = 1 << (INDEX_BITS - 1)
"""Set in the index of an answer: the piece of that index was read out of the sender's pool."""
NONCE_BITS = 64 - INDEX_BITS
CHECKSUM_MASK = (1 << 64) - 1
T = TypeVar("T")


class TransferLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines and bounds of hand-offs. Times in seconds."""

    segment_tokens: int = 256
    first_bytes_s: float = 120.0
    """From the opening to the first byte (decode) or the first computed chunk (prefill)."""
    stall_s: float = 60.0
    """Without any progress while prefill still computes."""
    base_s: float = 10.0
    """Once only bytes are outstanding: from one sign that they move to the next, with
    ``bytes / min_bytes_per_s`` on top, of at most ``unseen_bytes``."""
    min_bytes_per_s: float = 1e6
    unseen_bytes: int = 32 << 20
    """What may be under way between two signs: a window of messages, or a piece of a pool."""
    drain_s: float = 10.0
    """For the ports to answer an abort; after it the session is reported as stuck."""
    max_sessions: int = 1024


class SessionOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Decode's reservation: prefill sends positions [start, end) under the tags of ``nonce``."""

    wire_version: int
    wire: str
    """The wire that the pair has chosen."""
    session: int
    """Decode's number of the session."""
    nonce: int
    key: int
    """64 random bits: without them nobody can make a message that decode takes for prefill's."""
    decode_epoch: int
    prefill_epoch: int
    start: int
    end: int
    segment_tokens: int


class PairTally(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What one pair of ranks moved. ``digest`` is the sum, modulo 2**64, of the messages'
    xxh3-64 checksums, each seeded with its tag: it does not depend on the order of arrival."""

    source: int
    target: int
    messages: int
    bytes: int
    digest: int


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill's account of a finished session; decode compares it with what it received."""

    nonce: int
    prefill_epoch: int
    decode_epoch: int
    pairs: tuple[PairTally, ...]


class OpenReceive(msgspec.Struct, frozen=True, kw_only=True, tag="receive"):
    """To a decode port: positions [start, end) will come for ``blocks`` (table from position 0)."""

    session: int
    nonce: int
    key: int
    wire: str
    start: int
    end: int
    segment_tokens: int
    peer: str
    layout: KvLayout
    endpoints: tuple[bytes, ...]
    blocks: tuple[int, ...]


class OpenSend(msgspec.Struct, frozen=True, kw_only=True, tag="send"):
    """To a prefill port: send positions [start, end) as they are computed."""

    session: int
    nonce: int
    key: int
    wire: str
    start: int
    end: int
    segment_tokens: int
    peer: str
    layout: KvLayout
    endpoints: tuple[bytes, ...]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """To a port: stop at once; the port answers with a last word (``Aborted`` if none was said)."""

    session: int


class Computed(msgspec.Struct, frozen=True, kw_only=True, tag="computed"):
    """To a sending port: positions [0, end) of a session are in the cache, by no step of an engine.
    ``held``: the blocks stay as they are until the last word. Else others may write there."""

    session: int
    end: int
    blocks: tuple[int, ...]
    held: bool


class ReadBlock(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """To a port: say what is in a block that the service holds; for ``ekiden verify``."""

    ticket: int
    block: int


Command = OpenReceive | OpenSend | Abort | Computed | ReadBlock


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """From a port: so many payload bytes are through; ``computed`` positions are in the cache."""

    epoch: int
    session: int
    bytes: int
    computed: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """A port's last word: everything of this rank was sent, or received and scattered."""

    epoch: int
    session: int
    pairs: tuple[PairTally, ...]
    seconds: float
    """First byte to last on this rank."""
    wire: str


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """A port's last word: the session cannot go on; the pool is not touched any more."""

    epoch: int
    session: int
    reason: str


class Aborted(msgspec.Struct, frozen=True, kw_only=True, tag="aborted"):
    """A port's last word after ``Abort``: the pool is not touched any more."""

    epoch: int
    session: int


class BlockRead(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """From a port: the bytes of a block on this rank, [kv_heads, layers, 2, size, head_dim].

    ``data`` is None if the port has ended.
    """

    ticket: int
    data: bytes | None


PortEvent = Progress | Finished | Broken | Aborted

_commands = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[PortEvent | BlockRead] = msgspec.msgpack.Decoder(
    PortEvent | BlockRead
)
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    return _commands.decode(data)


def decode_event(data: bytes) -> PortEvent | BlockRead:
    return _events.decode(data)


def decode_from_peer(data: bytes, kind: type[T], peer: str) -> T:
    """An offer or a seal from another replica.

    Raises:
        ReplicaFailed: the bytes are not a ``kind``; the message names the peer.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ReplicaFailed(f"{peer} sent a broken {kind.__name__}: {error}") from error


def pack_endpoints(endpoints: Mapping[str, bytes]) -> bytes:
    """What a rank says of itself: its address on every wire it has."""
    return _encoder.encode(dict(endpoints))


def endpoint_on(wire: str, endpoints: bytes, peer: str) -> bytes:
    """The address on ``wire`` out of what a rank of ``peer`` said of itself.

    Raises:
        ReplicaFailed: it has none.
    """
    found = decode_from_peer(endpoints, dict[str, bytes], peer).get(wire)
    if found is None:
        raise ReplicaFailed(f"{peer} has a rank without an address on the {wire} wire")
    return found


def tag(nonce: int, index: int) -> int:
    """The 64-bit tag of message ``index`` of the session with ``nonce``."""
    return nonce << INDEX_BITS | index


def split_tag(value: int) -> tuple[int, int]:
    """(nonce, index) of a tag."""
    return value >> INDEX_BITS, value & ((1 << INDEX_BITS) - 1)
