"""Ids and numbers drawn once: request ids, replica ids, epochs, seeds."""

from __future__ import annotations

import secrets
import time

_MASK = (1 << 64) - 1


def new_request_id() -> str:
    """A fresh request id; never taken from a client, so two clients cannot collide."""
    return f"req-{secrets.token_hex(12)}"


def new_replica_id(role: str) -> str:
    return f"{role}-{secrets.token_hex(4)}"


def new_epoch() -> int:
    """A number for one life of a replica: later starts draw larger ones, and no two are equal.

    41 bits of milliseconds and 22 random bits, below 2**63.
    """
    return (int(time.time() * 1000) & ((1 << 41) - 1)) << 22 | secrets.randbits(22)


def new_seed() -> int:
    return secrets.randbits(63)


def mix64(*values: int) -> int:
    """A 64-bit number that depends on every bit of every value (splitmix64, chained)."""
    state = 0
    for value in values:
        state = _splitmix64(state ^ (value & _MASK))
    return state


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice ``i`` of ``n``: the request's own for the first, derived for the rest."""
    return seed if choice == 0 else mix64(seed, choice)
