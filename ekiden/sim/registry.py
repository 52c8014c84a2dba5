"""What the gateway knows of replicas: their records, as old as the registry has them.

A replica writes its figures every ``renew_s`` at a phase of its own, a gateway reads all records
every ``poll_s``. Where nothing changed nothing is written or read: what is known stays the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec

from ekiden.core.types import ReplicaStats
from ekiden.registry.record import READY, TTL_S, ReplicaRecord
from ekiden.sim.loop import Loop
from ekiden.sim.replica import Replica
from gateway.routing import Told

Life = tuple[str, int]


class Members:
    """Records by life, in the order in which they came."""

    def __init__(self) -> None:
        self.decode: dict[Life, ReplicaRecord] = {}
        self.prefill: dict[Life, ReplicaRecord] = {}

    def of(self, role: str) -> dict[Life, ReplicaRecord]:
        return self.prefill if role == "prefill" else self.decode

    def lives(self) -> set[Life]:
        return {*self.decode, *self.prefill}

    def drop(self, life: Life) -> None:
        for pool in (self.decode, self.prefill):
            pool.pop(life, None)


class Registry:
    """Written by replicas, read by the gateways, at the same moments."""

    def __init__(self, loop: Loop, rng: random.Random, renew_s: float, poll_s: float) -> None:
        self.known = Members()
        """As the gateway has read them."""
        self._loop, self._rng = loop, rng
        self._renew_s, self._poll_s = renew_s, poll_s
        self._phases: dict[Life, float] = {}
        self._due: set[Life] = set()
        self._written: dict[Life, ReplicaRecord] = {}
        self._changed: dict[Life, ReplicaRecord | None] = {}
        self._read_at: dict[Life, float] = {}
        self._polling = False
        self._listeners: list[Callable[[set[Life]], None]] = []

    def on_change(self, listener: Callable[[set[Life]], None]) -> None:
        """Call ``listener`` with the lives that are known whenever one is new or gone."""
        self._listeners.append(listener)

    def add(self, replica: Replica, block_size: int, *, known: bool = False) -> None:
        """Register a life; ``known``: the gateway has read of it already."""
        record = ReplicaRecord(
            id=replica.name,
            role=replica.setup.role,
            model="",
            address="",
            epoch=replica.epoch,
            version="",
            block_size=block_size,
            granule=block_size,
            max_model_len=0,
            stats=ReplicaStats(kv_blocks_total=replica.pool.total),
        )
        self._phases[record.life] = self._rng.random() * self._renew_s
        self._written[record.life] = record
        if known:
            self._take(record.life, record)
        else:
            self._note(record.life, record)

    def touched(self, replica: Replica) -> None:
        """Its figures may have changed: they are written at its next turn."""
        life = (replica.name, replica.epoch)
        if life in self._due or life not in self._written:
            return
        self._due.add(life)
        turn = _next_turn(self._loop.now(), self._renew_s, self._phases[life])
        self._loop.at(turn, lambda: self._write(replica, life))

    def mark(self, replica: Replica, status: str) -> None:
        """It drains, or is ready again: written at once, as the services do."""
        life = (replica.name, replica.epoch)
        self._written[life] = record = msgspec.structs.replace(self._written[life], status=status)
        self._note(life, record)

    def expire(self, life: Life) -> None:
        """It is dead: its record goes when nobody has renewed it for the time that it is kept. The
        gateway's link to a decode replica breaks at once."""
        self._written.pop(life, None)
        self._changed.pop(life, None)
        self.known.decode.pop(life, None)
        self._loop.after(TTL_S, lambda: self._note(life, None))

    def remove(self, life: Life) -> None:
        """It left in order."""
        self._written.pop(life, None)
        self._note(life, None)

    def told(self, record: ReplicaRecord) -> Told:
        """Between which moments a record's figures were made, as far as the gateway knows."""
        read_at = self._read_at[record.life]
        return Told(read_at - self._poll_s, read_at)

    def _write(self, replica: Replica, life: Life) -> None:
        self._due.discard(life)
        before = self._written.get(life)
        if before is None or not replica.alive:
            return
        stats = replica.stats()
        if stats != before.stats:
            self._written[life] = record = msgspec.structs.replace(before, stats=stats)
            self._note(life, record)
        if not replica.idle:
            self.touched(replica)

    def _note(self, life: Life, record: ReplicaRecord | None) -> None:
        self._changed[life] = record
        if not self._polling:
            self._polling = True
            self._loop.at(_next_turn(self._loop.now(), self._poll_s), self._poll)

    def _poll(self) -> None:
        self._polling = False
        changed, self._changed = self._changed, {}
        if sum(self._take(life, record) for life, record in changed.items()):
            for listener in self._listeners:
                listener(self.known.lives())

    def _take(self, life: Life, record: ReplicaRecord | None) -> bool:
        """Whether it is new, or gone."""
        if record is None or record.status != READY:
            self.known.drop(life)
            return record is None
        pool = self.known.of(record.role)
        new = life not in pool
        pool[life] = record
        self._read_at[life] = self._loop.now()
        return new


def _next_turn(now: float, every: float, phase: float = 0.0) -> float:
    """The first of ``phase``, ``phase`` + ``every``, ... that is after ``now``."""
    turns = math.floor((now - phase) / every) + 1
    turn = phase + every * turns
    return turn if turn > now else phase + every * (turns + 1)
