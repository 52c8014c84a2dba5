"""The command lines that bring a plan about, with options that ``ekiden`` has."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator

import msgspec

from ekiden.planner.decision import Decision
from ekiden.planner.dtypes import dtype_option, widened
from ekiden.planner.geometry import Geometry
from ekiden.planner.layout import Layout
from ekiden.planner.options import DISAGGREGATED, Asked, Option
from ekiden.planner.precision import FLOATS, KV_BYTES, WeightFormat, kv_format, published

ON_LOAD = ("fp8", "int8", "int4")
"""Formats that the engine makes while it loads; the others are checkpoints."""
ROLES = ("prefill", "decode")


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One replica on its GPUs: a rank takes the card of its own number among those it sees."""

    role: str
    number: int
    """Within its pool, from 1."""
    host: int
    gpus: tuple[int, ...]
    options: tuple[str, ...]
    """Of ``ekiden serve`` for its role."""


def blocked(asked: Asked, option: Option, served: Collection[str]) -> str:
    """Why this engine, which serves models of these types, does not serve a plan yet; empty where
    it does."""
    geometry = asked.geometry
    if option.refused:
        return "Nothing fits, so there is nothing to deploy"
    if geometry.model_type not in served:
        return (
            f"ekiden does not serve models of type {geometry.model_type} yet: the plan is "
            "arithmetic, without flags"
        )
    if any(one.dp > 1 or one.ep > 1 for one in option.layouts):
        return "ekiden has no options for EP and attention-DP yet: the plan is arithmetic"
    if any(one.cp > 1 for one in option.layouts):
        return "ekiden does not serve context parallelism (CP) yet: the plan is arithmetic"
    if any(one.gpus > asked.devices.per_host for one in option.layouts):
        return "ekiden does not place one replica on several hosts yet: the plan is arithmetic"
    if widened(gpu := asked.devices.gpu, option.form):
        return f"ekiden holds FP8 as 16 bits on {gpu.name}, which has none: int8 takes 8 there"
    return _elsewhere(geometry, option.form)


def _elsewhere(geometry: Geometry, form: WeightFormat) -> str:
    """Why weights in ``form`` are not made of the model's own while they are loaded."""
    here = published(geometry.quant_method, geometry.dtype, geometry.model_type)
    made = form.name in (*ON_LOAD, *FLOATS) and not geometry.quant_method
    if made or form.name == here.name:
        return ""
    return (
        f"Weights in {form.name} take a checkpoint of their own, and {geometry.name} is in "
        f"{here.name}: give that checkpoint as the model, then there are flags"
    )


def pools(option: Option) -> dict[str, tuple[int, Layout]]:
    """Replicas and layout by role; a decode pool alone is aggregated serving."""
    roles = ROLES if option.kind == DISAGGREGATED else ROLES[1:]
    return dict(zip(roles, zip(option.replicas, option.layouts, strict=True), strict=True))


def workers(decision: Decision) -> Iterator[Worker]:
    """Every replica, the larger ones first, so that none straddles hosts."""
    machines = decision.asked.devices
    taken = [0] * machines.hosts
    by_size = sorted(pools(decision.chosen).items(), key=lambda pool: -pool[1][1].gpus)
    for role, (count, layout) in by_size:
        said = tuple(options(decision, layout))
        host = 0
        for number in range(1, count + 1):
            while host < machines.hosts and taken[host] + layout.gpus > machines.per_host:
                host += 1
            if host == machines.hosts:
                return
            gpus = tuple(range(taken[host], taken[host] + layout.gpus))
            taken[host] += layout.gpus
            yield Worker(role=role, number=number, host=host, gpus=gpus, options=said)


def options(decision: Decision, layout: Layout) -> list[str]:
    """Of one replica."""
    asked, form = decision.asked, decision.chosen.form
    limits = asked.stepper(layout, form).replica.resolved
    found = ["--device", "cpu" if asked.devices.gpu.is_cpu else "cuda", "-tp", str(layout.tp)]
    found += ["-pp", str(layout.pp)] if layout.pp > 1 else []
    found += ["--max-model-len", str(limits.max_model_len)]
    found += ["--max-num-seqs", str(limits.max_num_seqs)]
    found += ["--max-num-batched-tokens", str(limits.chunk)]
    if asked.limits.utilization is not None:
        found += ["--gpu-memory-utilization", f"{limits.utilization:g}"]
    if floats := dtype_option(form, asked.geometry, asked.devices.gpu):
        found += ["--dtype", floats]
    if form.name in ON_LOAD and not asked.geometry.quant_method:
        found += ["--quantization", form.name]
    if KV_BYTES[cache := kv_format(asked.kv_dtype)] == 1:
        found += ["--kv-cache-dtype", cache]
    return found


def commands(decision: Decision, model: str) -> list[list[str]]:
    """Of each host: a shell's line for each replica, and on the first host one for the gateway."""
    hosts: list[list[str]] = [[] for _ in range(decision.asked.devices.hosts)]
    address = ["--host", "0.0.0.0"] if len(hosts) > 1 else []
    to = ["--model", shlex.quote(model), "--redis", '"$REDIS_URL"', *address]
    for one in workers(decision):
        cards = () if decision.asked.devices.gpu.is_cpu else (_cards(one),)
        words = (*cards, "ekiden serve", one.role, *to, *one.options)
        hosts[one.host].append(" ".join(words))
    hosts[0].append(" ".join(("ekiden serve gateway", *to)))
    return hosts


def _cards(one: Worker) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, one.gpus))}"
