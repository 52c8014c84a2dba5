"""What a replica says of itself in Redis. JSON; fields that a reader does not know are skipped."""

from __future__ import annotations

import msgspec

from ekiden.core.types import ReplicaStats

TTL_S = 5.0
"""A record nobody renews for this long is gone."""
RENEW_S = 1.0
POLL_S = 0.25
"""Between two readings."""

INDEX_KEY = "{ekiden}:replicas"
"""A set of replica ids. The braces keep all keys in one slot of a Redis Cluster."""
KEY_PREFIX = "{ekiden}:replica:"


READY = "ready"
DRAINING = "draining"
UNWELL = "unwell"
"""A rank does not move. It may come back: such a replica is asked only when no other is left."""


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One life (``epoch``) of one replica; ``address`` is the HOST:PORT that peers dial."""

    id: str
    role: str
    """``prefill`` or ``decode``."""
    model: str
    address: str
    epoch: int
    version: str
    block_size: int
    granule: int
    tp: int = 1
    pp: int = 1
    max_num_seqs: int = 0
    """Sequences in one step, at most; 0: not told."""
    max_model_len: int
    model_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    """Empty: not told, compared with nothing."""
    vocab_size: int = 0
    status: str = READY
    """``ready``, ``draining`` or ``unwell``."""
    stats: ReplicaStats = ReplicaStats()

    @property
    def life(self) -> tuple[str, int]:
        """(id, epoch): what affinity and bookings are kept under."""
        return (self.id, self.epoch)


def encode(record: ReplicaRecord) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes) -> ReplicaRecord | None:
    """The record, or None if it was written by a version this one cannot read."""
    try:
        return msgspec.json.decode(data, type=ReplicaRecord)
    except msgspec.DecodeError:
        return None


def epoch_field(epoch: int) -> str:
    """Epochs as text of one width, so that a script may compare them as strings."""
    return f"{epoch:020d}"
