"""One seed: a deployment, and fault after fault until its plan is through."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from pathlib import Path

import msgspec
from chaos_crowds import CROWDS
from chaos_net import Loopback, Namespaces
from chaos_plan import plan
from chaos_round import NOT_REACHED, Row, round_of
from chaos_world import REPLICAS, Shape, Wire, World

SHAPES = (
    Shape(prefill=("-tp", "2")),
    Shape(decode=("-tp", "2")),
    Shape(prefill=("-pp", "2"), decode=("-tp", "2")),
)
"""A replica of one rank and one of two, either way round, and a pipeline."""
ROUND_LIMIT_S = 500.0
_RETRIES = 2
_PER_SEED = 100_000


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """What one lane is asked to do."""

    seed: int
    model_dir: str
    hosts: bool
    kv_transport: str
    quick: bool = False
    logs: str = ""
    """Where the services' logs are kept; empty: nowhere."""


LINK_OF = {"ucx": "kv"}
"""UCX is told its device. Other wires take no link that could be cut without the control's."""


def shape_of(lane: Lane) -> Shape:
    link = LINK_OF.get(lane.kv_transport, "") if lane.hosts else ""
    wire = Wire(name=lane.kv_transport, link=link)
    return msgspec.structs.replace(SHAPES[lane.seed % len(SHAPES)], wire=wire)


async def run_lane(lane: Lane, rows: list[Row]) -> None:
    """Fill ``rows``; raises if the deployment cannot be brought up or a round never ends."""
    # The harness's own watcher need not tell that Redis was killed.
    logging.getLogger("ekiden").setLevel(logging.ERROR)
    net = Namespaces(REPLICAS) if lane.hosts else Loopback(REPLICAS)
    async with World(net, Path(lane.model_dir), shape_of(lane)) as world:
        try:
            await _attack(world, lane, rows)
        finally:
            if lane.logs:
                world.keep_logs(Path(lane.logs))


async def _attack(world: World, lane: Lane, rows: list[Row]) -> None:
    link = bool(world.wire.link)
    pairs = plan(lane.seed, hosts=lane.hosts, link=link, quick=lane.quick)
    rng = random.Random(f"crowds/{lane.seed}")
    crowds = {rng.randrange(len(pairs)): crowd for crowd in CROWDS}
    number = lane.seed * _PER_SEED
    for place, (fault, state) in enumerate(pairs):
        row = None
        for _ in range(_RETRIES):
            number += 1
            async with asyncio.timeout(ROUND_LIMIT_S):
                row = await round_of(world, fault, state, number).run()
            if row.outcome != NOT_REACHED or row.breaches:
                break
        if row is not None:
            _note(row, lane, rows, f"{place + 1}/{len(pairs)}")
        if place in crowds:
            number += 1
            async with asyncio.timeout(ROUND_LIMIT_S):
                _note(await crowds[place](world, number), lane, rows, "crowd")


def _note(row: Row, lane: Lane, rows: list[Row], place: str) -> None:
    row.seed = lane.seed
    rows.append(row)
    breaches = "".join(f"\n    BREACH: {breach}" for breach in row.breaches)
    print(
        f"[seed {lane.seed} {place} {time.strftime('%H:%M:%S')}] {row.fault} while {row.state}: "
        f"{row.outcome} ({row.recovery_s:.1f} s){breaches}",
        flush=True,
        file=sys.stdout,
    )
