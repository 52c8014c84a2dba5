"""What the options of ``ekiden sim`` ask for: scenarios, and the requests that come."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ekiden.cli.plan_question import question, workload_of
from ekiden.cli.sim_experts import layout
from ekiden.cli.sim_options import REQUESTS

if TYPE_CHECKING:
    from ekiden.measures.goodput import Slo
    from ekiden.planner.layout import Layout
    from ekiden.planner.options import Asked as Question
    from ekiden.planner.steps import Stepper
    from ekiden.sim.asked import Asked
    from ekiden.sim.scenario import Autoscale, Scenario


MOST_REPLICAS = 100_000
"""That many take 16 s and 0.6 GB before a request comes."""


def subject(args: argparse.Namespace) -> Question:
    """The model, the devices and the limits. Raises SetupError as a plan's question does, and where
    the workload is not stated.

    A trace may have requests that are longer than ``--max-model-len``: they are left out.
    """
    import msgspec

    from ekiden.core.errors import SetupError

    if args.trace and args.rate:
        raise SetupError(
            f"--rate {args.rate:g} and --trace each say when requests come: choose one; "
            "--trace-speed replays a trace faster or slower"
        )
    if not args.trace and not args.rate:
        raise SetupError("no --rate: give requests a second, as --rate 4, or a --trace")
    stated = args.max_model_len
    found = question(argparse.Namespace(**{**vars(args), "max_model_len": None}))
    usual = min(found.limits.max_model_len or 0, found.geometry.max_positions)
    limits = msgspec.structs.replace(found.limits, max_model_len=stated or usual)
    return msgspec.structs.replace(found, limits=limits)


def runs(args: argparse.Namespace, asked: Question) -> Iterator[tuple[str, Scenario]]:
    """A name and a scenario for each ratio and policy. Raises SetupError for what cannot be."""
    from ekiden.planner.neighbours import beside
    from ekiden.sim.scenario import Scenario

    stepper = _fitting(asked, layout(args, asked))
    rate = (asked.work.rate or 0.0) * args.trace_speed
    for ratio in args.ratio:
        prefill, decode = _shared_out(ratio, args.replicas)
        one, other = beside(stepper, stepper, asked.work, rate, (prefill, decode))
        for policy in args.policy:
            name = f"{prefill}:{decode}" + (f" {policy}" if len(args.policy) > 1 else "")
            yield (
                name,
                Scenario(
                    prefill=prefill,
                    decode=decode,
                    prefill_stepper=one,
                    decode_stepper=other,
                    policy=policy,
                    gateways=args.gateways,
                    block_size=args.block_size,
                    blocks=args.num_gpu_blocks_override,
                    local_prefill_tokens=args.local_prefill_tokens,
                    renew_s=args.renew_interval,
                    poll_s=args.poll_interval,
                    timeout_s=args.timeout,
                    kills=args.kill,
                    mtbf_s=args.mtbf,
                    mttr_s=args.mttr,
                    autoscale=_autoscale(args),
                    expert_skew=args.expert_skew,
                    seed=args.seed,
                ).check(),
            )


def _fitting(asked: Question, layout: Layout) -> Stepper:
    """Of a replica that has room for KV. Raises SetupError that names the nearest one that has."""
    import msgspec

    from ekiden.core.errors import SetupError
    from ekiden.planner.options import why_not

    found = asked.stepper(layout, asked.own)
    if not (why := why_not(found, 0)) and found.tokens:
        return found
    wider = (
        msgspec.structs.replace(
            layout, tp=layout.tp << power, ep=layout.ep << power if layout.ep > 1 else 1
        )
        for power in range(1, 7)
    )
    fits = (x for x in wider if not why_not(asked.stepper(x, asked.own), 1))
    nearest = next(fits, None)
    hint = f"the nearest that fits is {nearest}" if nearest else "no TP up to 64 times that fits"
    raise SetupError(
        f"{asked.geometry.name} in {asked.own.name} does not fit on {layout} of "
        f"{asked.devices.gpu.name}: {why or why_not(found, 1)}; {hint}"
    )


def requests(args: argparse.Namespace, scenario: Scenario) -> tuple[list[Asked], int]:
    """What comes, the trace's requests or drawn ones; and how many of the trace are left out."""
    import random

    from ekiden.planner.trace import read_trace
    from ekiden.sim.asked import drawn, replayed
    from ekiden.sim.run import longest

    if args.trace:
        lines = read_trace(args.trace)[: args.requests]
        found = replayed(lines, speed=args.trace_speed, longest=longest(scenario))
        return found, len(lines) - len(found)
    work, rng = workload_of(args), random.Random(f"{args.seed} requests")
    return drawn(work, args.rate, args.requests or REQUESTS, rng), 0


def slo(args: argparse.Namespace) -> Slo:
    """The limits of a request that counts for goodput."""
    from ekiden.measures.goodput import Slo

    return Slo(**{f"{name}_ms": value for name, value in args.slo.items()})


def _shared_out(ratio: tuple[int, int], replicas: int | None) -> tuple[int, int]:
    """Prefill and decode replicas, at least one of each where the ratio has both."""
    from ekiden.core.errors import SetupError

    if (count := sum(ratio) if replicas is None else replicas) > MOST_REPLICAS:
        raise SetupError(
            f"{count:,} replicas are more than are simulated: choose up to {MOST_REPLICAS:,}"
        )
    if replicas is None:
        return ratio
    if ratio[0] and replicas < 2:
        raise SetupError(
            f"--replicas {replicas} cannot be shared out {ratio[0]}:{ratio[1]}: choose 2 or more, "
            "or --ratio 0:1"
        )
    prefill = round(replicas * ratio[0] / sum(ratio))
    if ratio[0]:
        prefill = min(max(prefill, 1), replicas - 1)
    return prefill, replicas - prefill


def _autoscale(args: argparse.Namespace) -> Autoscale | None:
    from ekiden.sim.scenario import Autoscale

    if args.autoscale is None:
        return None
    least, most = args.autoscale
    return Autoscale(least=least, most=most, target=args.autoscale_target, start_s=args.start_delay)
