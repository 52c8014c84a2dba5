"""Small simulations: a model on one card, few requests, small pools."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from ekiden.planner.calibration import calibration
from ekiden.planner.catalogue import by_name
from ekiden.planner.devices import devices
from ekiden.planner.hardware import gpu
from ekiden.planner.layout import Layout
from ekiden.planner.limits import Limits
from ekiden.planner.memory import Replica
from ekiden.planner.steps import Stepper
from ekiden.sim.asked import Asked
from ekiden.sim.record import Record
from ekiden.sim.run import World
from ekiden.sim.scenario import Scenario


@cache
def stepper(
    chunk: int = 2048,
    sequences: int = 64,
    layout: Layout | None = None,
    network_gbps: float = 0.0,
) -> Stepper:
    """Llama-3.1-8B on H100s of one host; with a network, of hosts with one each."""
    machines = devices(gpu("H100"), per_host=8)
    if network_gbps:
        machines = devices(gpu("H100"), per_host=1, hosts=8, network_gbps=network_gbps)
    replica = Replica(
        geometry=by_name("Llama-3.1-8B"),
        card=machines.card,
        layout=layout or Layout(),
        limits=Limits(max_model_len=16384, max_num_seqs=sequences, chunk=chunk),
    )
    return Stepper(replica, machines, calibration("vllm"))


def scenario(prefill: int = 1, decode: int = 2, **fields: Any) -> Scenario:
    """Both pools of the same replicas."""
    one = fields.pop("stepper", None) or stepper()
    return Scenario(
        prefill=prefill, decode=decode, prefill_stepper=one, decode_stepper=one, **fields
    )


def requests(count: int, every_s: float = 0.1, prompt: int = 1000, output: int = 20) -> list[Asked]:
    """Equal ones with prompts of their own, at equal distances."""
    return [Asked(number=i, due_s=i * every_s, prompt=prompt, output=output) for i in range(count)]


def run(world_of: Scenario, asked: Sequence[Asked]) -> World:
    """A world in which everything has ended, the last transfers too."""
    world = World(world_of.check(), asked)
    world.run()
    if world_of.autoscale is None and not world_of.mtbf_s:
        world.loop.run(lambda: False)
    return world


def moments(records: Sequence[Record]) -> list[tuple[Any, ...]]:
    """What of each request must be equal where runs are."""
    return [
        (
            row.asked.number, row.started_s, row.first_s, row.ready_s, row.ended_s, row.error,
            row.prefill_replica, row.decode_replica, row.decode_cache, row.prefill_cache,
            row.preemptions,
        )
        for row in records
    ]  # fmt: skip


def check_books(world: World) -> None:
    """Nobody holds a block, and nobody waits, on any replica that lives."""
    for replica in world.pools.lives.values():
        replica.pool.check()
        assert replica.pool.held == 0, f"{replica.name} holds {replica.pool.held} blocks"
        assert not list(replica.scheduler.queues.all())
        assert replica.idle
        assert not replica.callers
