"""What a service sets for the KV ports of its ranks. No torch."""

from __future__ import annotations

import msgspec


class PortOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``PortContext.options``, as msgpack: what a service sets for its ports. Times in seconds."""

    transports: tuple[str, ...] = ("ucx",)
    """Wires to open, best first."""
    all_needed: bool = True
    """False: those that cannot run here are left out, and it is logged why."""
    host: str = "127.0.0.1"
    advertise: str = ""
    """What the tcp wire listens on, and the host that peers dial; empty: ``host``."""
    shm_folder: str = ""
    """Where the shm wire's socket is, for containers that share a folder; empty: in none."""
    max_bytes_per_s: float = 0.0
    """This rank sends (or, from a mapped pool, reads) no faster; 0: as fast as it can."""
    slots: int = 16
    """Staging slots of a rank, each of ``reshard.MESSAGE_BYTES`` and a trailer."""
    window: int = 4
    """Messages under way with one peer: a peer that stands still cannot take all the slots."""
    drain_s: float = 5.0
    """After a session was given up, for its operations to end before the connection is broken."""
    limbo_s: float = 60.0
    """A message may be this much earlier than the order that announces its session."""

    def needs(self, wire: str) -> bool:
        """Was ``wire`` asked for by name? Then it is not left out where it cannot run."""
        return self.all_needed or (wire == "shm" and bool(self.shm_folder))
