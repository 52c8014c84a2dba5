"""What a replica says of itself when two parties first meet. No torch."""

from __future__ import annotations

import msgspec

from ekiden.cache.layout import KvLayout

WIRE_VERSION = 2
"""Version of the hand-off session, its messages and its checksums."""


AUTO_WIRES = ("shm", "ucx", "tcp")
"""What ``--kv-transport auto`` opens where it can run, best first."""
ALL_WIRES = (*AUTO_WIRES, "nixl")
"""What ``--kv-transport`` may name."""
WIRE_PACKAGES = {"ucx": ("ucxx", "ekiden[worker]"), "nixl": ("nixl_cu12", "ekiden[nixl]")}
"""Of wires that need more than Python: the module, and what installs it."""
MAPPED_WIRES = frozenset({"shm", "mapped_memory"})
"""Decode reads prefill's pool itself: no message holds payload."""


class ReplicaDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must agree, or be converted, before KV may move between two replicas."""

    replica_id: str
    role: str
    epoch: int
    version: str
    wire_version: int
    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    granule: int
    hash_scheme: str
    dtype: str
    """Of weights and activations; that of KV is in ``kv``."""
    kv: KvLayout
    wires: tuple[str, ...]
    """The wires that every rank has, best first."""
    endpoints: tuple[bytes, ...]
    """One a rank: its address on every wire (``messages.pack_endpoints``)."""
    max_model_len: int
    vocab_size: int
