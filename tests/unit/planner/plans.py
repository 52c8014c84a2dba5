"""Plans for tests: a question with the usual answers filled in."""

from __future__ import annotations

from functools import cache
from typing import Any

from ekiden.planner.calibration import calibration
from ekiden.planner.catalogue import by_name
from ekiden.planner.decision import Decision, decide
from ekiden.planner.devices import Devices, devices
from ekiden.planner.dtypes import own_format
from ekiden.planner.hardware import gpu
from ekiden.planner.layout import Layout
from ekiden.planner.limits import Limits
from ekiden.planner.memory import Replica
from ekiden.planner.options import AGGREGATED, Asked, Option, offered
from ekiden.planner.precision import weight_format
from ekiden.planner.profiles import profile
from ekiden.planner.steps import Stepper
from ekiden.planner.workload import Objectives, assumed_objectives, workload

SMALLER = ("fp8", "int8", "int4")


def stepper(
    model: str,
    card: str,
    layout: Layout | None = None,
    *,
    weights: str = "bf16",
    on: Devices | None = None,
    chunk: int = 2048,
    length: int = 9216,
) -> Stepper:
    """Of one replica under the engine ``ekiden``."""
    machines = on or devices(gpu(card), per_host=8)
    replica = Replica(
        geometry=by_name(model),
        card=machines.card,
        layout=layout or Layout(),
        weights=weight_format(weights),
        limits=Limits(max_model_len=length, max_num_seqs=256, chunk=chunk),
        profile=profile("ekiden"),
    )
    return Stepper(replica, machines, calibration("vllm"))


def question(
    model: str,
    card: str,
    per_host: int,
    *,
    hosts: int = 1,
    work: str = "chat",
    rate: float | None = None,
    weights: str = "",
    smaller: tuple[str, ...] = SMALLER,
    interconnect: str = "auto",
    objectives: Objectives | None = None,
    network_gbps: float | None = None,
    length: int | None = None,
    sequences_in_step: int | None = None,
    **more: Any,
) -> Asked:
    shape = by_name(model)
    asked_for = workload(work, rate=rate)
    machines = devices(
        gpu(card),
        per_host=per_host,
        hosts=hosts,
        interconnect=interconnect,
        network_gbps=network_gbps,
    )
    own = own_format(weights or "auto", shape, machines.gpu)
    usual = -(-asked_for.longest // 1024) * 1024
    return Asked(
        geometry=shape,
        devices=machines,
        work=asked_for,
        objectives=objectives or assumed_objectives(asked_for),
        calibration=calibration("vllm"),
        profile=profile("ekiden"),
        own=own,
        formats=offered(smaller, own, machines.gpu),
        limits=Limits(max_model_len=length or usual, max_num_seqs=sequences_in_step, chunk=2048),
        **more,
    )


@cache
def plan(*args: Any, **more: Any) -> Decision:
    return decide(question(*args, **more))


def option(decision: Decision, layout: Layout, weights: str = "") -> Option:
    """What was found of one layout in one pool, in the chosen format unless told otherwise."""
    form = weights or decision.chosen.form.name
    return next(
        one
        for one in (decision.chosen, *decision.lost)
        if one.kind == AGGREGATED and one.layouts == (layout,) and one.form.name == form
    )
