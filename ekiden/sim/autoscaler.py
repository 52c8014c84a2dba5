"""Pools that follow their load: the rule of a horizontal autoscaler, with the delay of a start."""

from __future__ import annotations

import math

from ekiden.registry.record import ReplicaRecord
from ekiden.sim.loop import Loop
from ekiden.sim.pools import ROLES, Pools
from ekiden.sim.registry import Registry
from ekiden.sim.scenario import Autoscale


class Autoscaler:
    """Looks every ``every_s``. Load is a share: of its time, what a prefill replica computed since
    the last look; of its blocks or its seats, what a decode replica had taken when it last told."""

    def __init__(self, told: Autoscale, pools: Pools, registry: Registry, loop: Loop) -> None:
        self._told, self._pools, self._registry, self._loop = told, pools, registry, loop
        self._starting = dict.fromkeys(ROLES, 0)
        self._busy: dict[tuple[str, int], float] = {}
        self._enough_since = dict.fromkeys(ROLES, 0.0)
        self._loop.after(told.every_s, self._look)

    def _look(self) -> None:
        for role in ROLES:
            if count := sum(1 for _ in self._pools.of(role)):
                self._adjust(role, count)
        self._loop.after(self._told.every_s, self._look)

    def _adjust(self, role: str, count: int) -> None:
        told, now = self._told, self._loop.now()
        load = self._prefill_load() if role == "prefill" else self._decode_load()
        wanted = max(told.least, min(told.most, math.ceil(count * load / told.target)))
        there = count + self._starting[role]
        if wanted >= count:
            self._enough_since[role] = now
        for _ in range(wanted - there):
            self._starting[role] += 1
            self._loop.after(told.start_s, lambda: self._started(role))
        if wanted < count and now - self._enough_since[role] >= told.calm_s:
            self._enough_since[role] = now
            for replica in list(self._pools.of(role))[wanted:]:
                self._pools.drain(replica)

    def _started(self, role: str) -> None:
        self._starting[role] -= 1
        self._pools.start(role)

    def _prefill_load(self) -> float:
        shares = []
        for replica in self._pools.of("prefill"):
            life = (replica.name, replica.epoch)
            before, self._busy[life] = self._busy.get(life, 0.0), replica.steps.busy_s
            shares.append((replica.steps.busy_s - before) / self._told.every_s)
        return sum(shares) / len(shares)

    def _decode_load(self) -> float:
        known = self._registry.known.decode
        replicas = list(self._pools.of("decode"))
        seats = replicas[0].setup.limits.max_num_seqs
        loads = [
            _taken(record, seats)
            for replica in replicas
            if (record := known.get((replica.name, replica.epoch))) is not None
        ]
        return sum(loads) / len(loads) if loads else 0.0


def _taken(record: ReplicaRecord, seats: int) -> float:
    stats = record.stats
    blocks = stats.kv_blocks_held / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    return max(blocks, (stats.running + stats.waiting) / seats)
