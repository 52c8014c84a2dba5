"""Options of ``ekiden sim``, and the scenarios that they ask for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ekiden.cli.options import LOCAL_PREFILL, add_options, at_least, seconds, share
from ekiden.cli.plan_options import (
    add_devices,
    add_engine,
    add_work,
    positive,
    question,
    workload_of,
)
from ekiden.cli.sim_experts import add_experts, layout
from ekiden.cli.slo import SLO_HELP, slo_of
from ekiden.core.config import ServiceConfig
from ekiden.core.hashes import GRANULE
from ekiden.registry.record import POLL_S, RENEW_S

if TYPE_CHECKING:
    from ekiden.measures.goodput import Slo
    from ekiden.planner.layout import Layout
    from ekiden.planner.options import Asked as Question
    from ekiden.planner.steps import Stepper
    from ekiden.sim.asked import Asked
    from ekiden.sim.scenario import Autoscale, Kill, Scenario

POLICIES = ("router", "round-robin", "least-requests")
REQUESTS = 1000
MOST_REPLICAS = 100_000
"""That many take 16 s and 0.6 GB before a request comes."""
_UNASKED = {
    "smaller_weights": "none",
    "concurrency": 1,
    "spare_replicas": 0,
    "gpu_price": None,
    **{f"{what}_p{q}": None for what in ("ttft", "tpot") for q in (50, 95, 99)},
}
"""What a plan's question has beside: nothing of it is simulated."""


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Everything that a simulation follows from."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a config.json, the directory of a model, or a name such as Llama-3.1-8B",
    )  # fmt: skip
    add_devices(parser.add_argument_group("devices"))
    work = parser.add_argument_group("workload")
    add_work(work, rate="needed unless there is a --trace")
    _add_traffic(work)
    add_engine(
        parser.add_argument_group("engine"),
        tp="GPUs that split every layer of a replica (default: 1)",
        pp="stages that split the layers (default: 1)",
    )
    add_experts(parser.add_argument_group("mixtures of experts"))
    _add_deployment(parser.add_argument_group("deployment"))
    _add_trouble(parser.add_argument_group("failures and scale"))
    parser.set_defaults(**_UNASKED)


def _add_traffic(group: Any) -> None:
    add = group.add_argument
    add("--requests", type=at_least(1), metavar="N",
        help=f"that come (default: {REQUESTS}, or all of the trace)")  # fmt: skip
    add("--trace-speed", type=positive, default=1.0, metavar="X",
        help="replay faster or slower (default: 1)")  # fmt: skip
    add("--timeout", type=seconds, default=600.0, metavar="SECONDS",
        help="of a whole request (default: 600)")  # fmt: skip
    add("--slo", type=slo_of(positive), default={}, metavar="ttft=MS,...",
        help=SLO_HELP)  # fmt: skip
    add("--seed", type=at_least(0), default=0, metavar="N",
        help="of arrivals, ties and failures (default: 0)")  # fmt: skip


def _add_deployment(group: Any) -> None:
    add = group.add_argument
    add("--ratio", type=_several(_ratio), default=((0, 1),), metavar="P:D,...",
        help="prefill to decode replicas, a run for each; 0:N is one pool that does both "
        "(default: 0:1)")  # fmt: skip
    add("--replicas", type=at_least(1), metavar="N",
        help="of both pools, shared out by --ratio (default: those that it names)")  # fmt: skip
    add("--policy", type=_several(_policy), default=POLICIES[:1], metavar="NAME,...",
        help=f"{', '.join(POLICIES)}: a run for each (default: the gateway's router)")  # fmt: skip
    add("--gateways", type=at_least(1), default=1, metavar="N",
        help="that place requests in turn, each by its own knowledge (default: 1)")  # fmt: skip
    add("--block-size", type=at_least(1), default=GRANULE, metavar="N",
        help=f"tokens in a KV block; larger ones take less time (default: {GRANULE})")  # fmt: skip
    add("--num-gpu-blocks-override", type=at_least(0), default=0, metavar="N",
        help="KV blocks of a replica (default: 0, as many as there is memory for)")  # fmt: skip
    add_options(group, (LOCAL_PREFILL,), ServiceConfig)
    add("--renew-interval", type=positive, default=RENEW_S, metavar="SECONDS",
        help=f"at which replicas tell their figures (default: {RENEW_S:g})")  # fmt: skip
    add("--poll-interval", type=positive, default=POLL_S, metavar="SECONDS",
        help=f"at which the gateway reads them (default: {POLL_S:g})")  # fmt: skip


def _add_trouble(group: Any) -> None:
    add = group.add_argument
    add("--kill", type=_several(_kill), default=(), metavar="ROLE-N@SECONDS,...",
        help="replicas that die, as decode-0@30")  # fmt: skip
    add("--mtbf", type=seconds, default=0.0, metavar="SECONDS",
        help="mean time until a replica dies (default: 0, none does by chance)")  # fmt: skip
    add("--mttr", type=positive, default=60.0, metavar="SECONDS",
        help="until a dead one is back (default: 60)")  # fmt: skip
    add("--autoscale", type=_bounds, metavar="LEAST:MOST",
        help="replicas of each pool, which follows its load")  # fmt: skip
    add("--autoscale-target", type=share, default=0.7, metavar="SHARE",
        help="of its load that a pool is kept at (default: 0.7)")  # fmt: skip
    add("--start-delay", type=seconds, default=60.0, metavar="SECONDS",
        help="until a new replica serves (default: 60)")  # fmt: skip


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


def _several(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        return tuple(parse(one) for one in text.split(","))

    return values


def _ratio(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not int(match[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no ratio: prefill to decode replicas, as 1:3, or 0:4 for one pool"
        )
    return int(match[1]), int(match[2])


def _bounds(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no range: the least replicas of a pool, 1 or more, and the most, as 2:40"
        )
    return int(match[1]), int(match[2])


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no policy: choose some of {', '.join(POLICIES)}"
        )
    return text


def _kill(text: str) -> Kill:
    from ekiden.sim.scenario import Kill

    match = re.fullmatch(r"(prefill|decode)-(\d+)@(\d+(?:\.\d+)?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} names no death: the replica and the second, as decode-0@30 or prefill-1@5.5"
        )
    return Kill(role=match[1], number=int(match[2]), at_s=float(match[3]))
