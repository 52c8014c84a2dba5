"""Options of ``ekiden sim``, and the scenarios that they ask for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ekiden.cli.options import LOCAL_PREFILL, add_options, at_least, between, seconds, share
from ekiden.cli.plan_options import add_devices, add_engine, add_work, positive
from ekiden.cli.sim_experts import add_experts
from ekiden.cli.slo import SLO_HELP, slo_of
from ekiden.core.config import ServiceConfig
from ekiden.core.hashes import GRANULE
from ekiden.registry.record import POLL_S, RENEW_S

if TYPE_CHECKING:
    from ekiden.sim.scenario import Kill

POLICIES = ("router", "round-robin", "least-requests")
REQUESTS = 1000


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
    add("--requests", type=between(1, 10_000_000), metavar="N",
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
    add("--gateways", type=between(1, 1000), default=1, metavar="N",
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
