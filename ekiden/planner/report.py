"""A plan as plain data: what ``ekiden plan --json`` prints. Keys are only ever added."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import msgspec

from ekiden.planner import flags
from ekiden.planner.batch import Split
from ekiden.planner.calibration import calibrations
from ekiden.planner.decision import Decision
from ekiden.planner.evaluate import after_losing
from ekiden.planner.instead import compared, instead, pin
from ekiden.planner.layout import Layout
from ekiden.planner.memory import RankSum
from ekiden.planner.options import Asked, Option
from ekiden.planner.reasons import lost
from ekiden.planner.weights import rank_weights
from ekiden.planner.why import why

SCHEMA = 1
HOUR_S, MILLION = 3600, 1e6
HEADROOM = 0.9
"""Of the most within the objectives, which nobody should plan to run at."""


def report(decision: Decision, model: str, served: Collection[str]) -> dict[str, Any]:
    """``model`` as other commands know it; ``served``: model types that the engine has. Times in
    seconds, sizes in bytes."""
    chosen = decision.chosen
    return {
        "schema": SCHEMA,
        "met": decision.met,
        "short": decision.short,
        "asked": asked_of(decision.asked, model),
        "chosen": option_of(chosen),
        "why": why(decision),
        "memory": [] if chosen.refused else memories(decision),
        "cost": cost(decision),
        "headroom": headroom(decision),
        "failure": failure(decision),
        "lost": [{**option_of(one), "why": lost(decision, one)} for one in ordered(decision)],
        "measure_first": measure_first(decision),
        "deploy": deploy(decision, model, served),
        "certainty": certainty(decision),
    }


def asked_of(asked: Asked, model: str) -> dict[str, Any]:
    work, devices = asked.work, asked.devices
    return {
        "model": model,
        "geometry": asked.geometry.name,
        "parameters": asked.geometry.parameters,
        "active_parameters": asked.geometry.active_parameters,
        "gpu": devices.gpu.name,
        "gpus_per_host": devices.per_host,
        "hosts": devices.hosts,
        "interconnect": devices.interconnect,
        "network_gbps": devices.network_gbps,
        "workload": {
            "name": work.name,
            "kinds": [msgspec.structs.asdict(kind) for kind in work.kinds],
            "rate": work.rate,
            "prefix_share": work.prefix_share,
        },
        "objectives": asked.objectives.stated(),
        "objectives_assumed": bool(asked.objectives.assumed),
        "assumed": list(asked.objectives.assumed),
        "assumed_ttft_p95_usual": asked.objectives.eased_from,
        "weights": asked.own.name,
        "kv_cache_dtype": asked.kv_dtype,
        "engine": asked.profile.name,
        "spare_replicas": asked.spare,
    }


def option_of(option: Option) -> dict[str, Any]:
    return {
        "name": option.name,
        "kind": option.kind,
        "weights": option.form.name,
        "pools": [
            {"replicas": count, **msgspec.structs.asdict(layout)}
            for count, layout in zip(option.replicas, option.layouts, strict=True)
        ],
        "gpus": option.gpus,
        "failure_domain_gpus": option.failure_domain,
        "works": option.works,
        "refused": option.refused,
        "rate": option.rate,
        "missed": dict(option.missed) if math.isfinite(option.worst) else {},
        "latency": _latency(option),
    }


def _latency(option: Option) -> dict[str, Any] | None:
    """Null for what has no end, and for a TPOT where answers have one token."""
    if option.refused:
        return None
    latency = option.latency
    found = {
        name: None if _is_none(name, value) else value
        for name, value in msgspec.structs.asdict(latency).items()
    }
    return {**found, "decode": split_of(latency.decode), "prefill": split_of(latency.prefill)}


def _is_none(name: str, value: object) -> bool:
    if not isinstance(value, float):
        return False
    return not math.isfinite(value) or (name.startswith("tpot") and value == 0)


def split_of(split: Split) -> dict[str, float]:
    return {
        **msgspec.structs.asdict(split),
        "total": split.total,
        "communication_share": split.communication_share,
    }


def memories(decision: Decision) -> list[dict[str, Any]]:
    """The sum of the tightest rank of each pool."""
    found = []
    for role, (_, layout) in flags.pools(decision.chosen).items():
        stepper = decision.asked.stepper(layout, decision.chosen.form)
        sums = stepper.memory
        rank = sums.ranks[sums.tightest]
        found.append(
            {
                "pool": role,
                "rank": sums.tightest,
                **rank_of(rank),
                "kv_tokens": stepper.tokens,
                "blocks": stepper.tokens // sums.block_size,
                "block_size": sums.block_size,
                "limits": msgspec.structs.asdict(sums.limits),
            }
        )
    return found


def rank_of(rank: RankSum) -> dict[str, int]:
    return {
        "card": rank.total,
        "usable": rank.usable,
        **dict(rank.terms()),
        "kv": rank.kv,
        "kv_token": rank.shape.token_bytes,
    }


def cost(decision: Decision) -> dict[str, float | None]:
    """Of an hour, and of a million tokens written at the rate of the plan; one of each in money
    where a price is known."""
    chosen, price = decision.chosen, decision.asked.price
    tokens = chosen.rate * decision.asked.work.output * HOUR_S
    hours = chosen.gpus / tokens * MILLION if tokens and chosen.works else None
    return {
        "gpu_hours_per_hour": float(chosen.gpus),
        "gpu_hours_per_million_tokens": hours,
        "output_tokens_per_s": chosen.rate * decision.asked.work.output,
        "price_per_hour": None if price is None else price * chosen.gpus,
        "price_per_million_tokens": None if price is None or hours is None else price * hours,
    }


def headroom(decision: Decision) -> dict[str, float] | None:
    """What a little less than the most feels like; None where a rate was asked for."""
    chosen, asked = decision.chosen, decision.asked
    if asked.work.rate is not None or not chosen.works:
        return None
    rate = HEADROOM * chosen.rate
    latency = after_losing(asked, chosen, rate)
    return {"rate": rate, "ttft_p95": latency.ttft_p95, "tpot_p95": latency.tpot_p95}


def failure(decision: Decision) -> dict[str, Any]:
    """What one lost GPU takes with it, and whether the rest keeps the objectives."""
    option = decision.chosen
    return {
        "gpus": option.failure_domain,
        "share_of_pool": max((1 / n for n in option.replicas if n), default=1.0),
        "pools": [
            {"pool": role, "gpus": layout.gpus, "share": 1 / count if count else 1.0}
            for role, (count, layout) in flags.pools(option).items()
        ],
        "then": _then(decision),
    }


def _then(decision: Decision) -> str:
    """After a replica of any pool was lost, at the rate that was asked for; where spare replicas
    were, at the rate of the plan."""
    option, asked = decision.chosen, decision.asked
    asked_for = asked.work.rate is not None and not decision.short
    if min(option.replicas) < 2 or not (asked_for or asked.spare):
        return ""
    for pool in range(len(option.replicas)):
        gone = tuple(int(index == pool) for index in range(len(option.replicas)))
        if after_losing(asked, option, option.rate, gone).missed(asked.objectives):
            return "The rest misses the objectives: --spare-replicas 1 plans for that."
    return "The rest still meets the objectives."


def ordered(decision: Decision) -> list[Option]:
    """What was not taken: first what works, then what is slow, then what does not fit, of which
    each GPU of the largest replica lacks least."""
    return sorted(
        decision.lost,
        key=lambda o: (
            bool(o.refused),
            not o.works,
            o.form is not decision.asked.own,
            o.worst,
            -o.failure_domain if o.refused else -o.rate_per_gpu,
        ),
    )


def measure_first(decision: Decision) -> list[str]:
    """What to look at on the real machines before the plan is believed."""
    chosen, asked = decision.chosen, decision.asked
    step, prompt = chosen.latency.decode.total * 1e3, chosen.latency.prefill.total * 1e3
    sequences, tokens = max(1, round(chosen.latency.running)), asked.work.prompt
    some = "1 sequence" if sequences == 1 else f"{sequences} sequences"
    found = [
        f"a decode step of {some}: {step:.1f} ms are foretold",
        f"a prompt of {tokens:.0f} tokens alone: {prompt:.0f} ms are foretold",
    ][0 if asked.work.decodes else 1 :]
    if max(layout.tp for layout in chosen.layouts) > 1:
        part, of = ("decode", "decode step") if asked.work.decodes else ("prefill", "prompt")
        share = getattr(chosen.latency, part).communication_share
        found.append(
            f"TP off and on, for the share of communication: {share:.0%} of a {of} is foretold"
        )
    if chosen.form != asked.own:
        found.append(f"answers in {chosen.form.name} beside those in {asked.own.name}")
    if len(chosen.layouts) > 1:
        found.append("GB/s of KV between a prefill and a decode replica, and the best single pool")
    found.append("KV use at the busiest hour: the lengths of your own requests, not their mean")
    return [] if chosen.refused or chosen.latency.limit else found


def deploy(decision: Decision, model: str, served: Collection[str]) -> dict[str, Any]:
    """Command lines by host, or why there are none, and what is served in its place."""
    if reason := flags.blocked(decision.asked, decision.chosen, served):
        return {"blocked": reason, "hosts": [], "servable": _servable(decision, served)}
    return {"blocked": "", "hosts": flags.commands(decision, model), "servable": None}


def _servable(decision: Decision, served: Collection[str]) -> dict[str, Any] | None:
    if (option := instead(decision, served)) is None:
        return None
    pinned = pin(decision.asked, option)
    return {**option_of(option), "pin": pinned, "compared": compared(decision, option)}


SAME = 0.01
"""Relative difference below which two percentiles of TTFT are called the same."""


def ideal_servers(decision: Decision) -> int:
    """Replicas, or DP groups, whose one ideal queue lets so few wait that TTFT P99 is P95; 0 where
    P99 is more, or one server alone has a queue anyhow."""
    option, latency = decision.chosen, decision.chosen.latency
    servers = (option.replicas[0] - decision.asked.spare) * option.layouts[0].dp
    if option.refused or latency.limit or servers < 2:
        return 0
    return servers if latency.ttft_p99 <= latency.ttft_p95 * (1 + SAME) else 0


def certainty(decision: Decision) -> dict[str, Any]:
    asked = decision.asked
    told = asked.calibration
    return {
        "calibration": told.name,
        "source": told.source,
        "median_error_tpot": told.median_error,
        "shipped": calibrations().get(told.name) == told,
        "recalled": list(asked.devices.gpu.recalled),
        "checkpoint_bytes": asked.stored_bytes,
        "counted_bytes": counted_bytes(asked),
        "ideal_queue_servers": ideal_servers(decision),
    }


def counted_bytes(asked: Asked) -> int:
    """Of the whole model in its own format, without what engines hold beside it."""
    (found,) = rank_weights(asked.geometry, Layout(), asked.own)
    return found
