"""From a layout to a deployment: how many replicas it takes, or the most that it serves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import mul

import msgspec

from ekiden.planner.closed import room
from ekiden.planner.hosts import has_room
from ekiden.planner.options import (
    AGGREGATED,
    DISAGGREGATED,
    Asked,
    Option,
    places,
    why_not,
)
from ekiden.planner.precision import WeightFormat
from ekiden.planner.serving import Latency, aggregated, disaggregated, prompt_costs
from ekiden.planner.steps import Stepper
from ekiden.planner.workload import Objectives

HALVINGS = 12
"""Of the search for the most requests a second: to one part in 4,096 of its range."""
QUIET = 1e-3
"""Share of the most that a replica could serve at which nobody waits."""
Foretell = Callable[[float], Latency]


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that fits, with the most that one could serve whatever the objectives."""

    stepper: Stepper
    most: int
    """Replicas for which there is room."""
    fewest: int
    """Replicas that hold the requests of full length which were asked for."""
    ceiling: float
    """Requests a second of one replica with no time left."""
    prompts: float
    """The same, if it computes prompts only."""
    tokens: float
    """The same, if it decodes only."""


def server(asked: Asked, stepper: Stepper) -> Server | str:
    """The replica, or in one sentence why it cannot be."""
    most = places(asked.devices, stepper.replica.layout)
    if (left := most - asked.spare) < 1:
        return (
            f"with --spare-replicas {asked.spare} it takes {asked.spare + 1} replicas, and there "
            f"is room for {most}"
        )
    if reason := why_not(stepper, -(-asked.sequences // left)):
        return reason
    work, dp = asked.work, stepper.replica.layout.dp
    held = room(stepper, work.context)
    full = work.output * stepper.decode(held, work.context).total / held if work.decodes else 0.0
    shares = [kind.share for kind in work.kinds]
    fresh = [(work.fresh(kind), kind.prompt) for kind in work.kinds]
    alone = sum(map(mul, shares, [stepper.busy(new, all_ - new) for new, all_ in fresh])) / dp
    added = sum(map(mul, shares, prompt_costs(stepper, work, held / dp))) / dp if full else alone
    return Server(
        stepper=stepper,
        most=most,
        fewest=-(-asked.sequences * stepper.memory.limits.max_model_len // stepper.tokens),
        ceiling=1 / (added + full),
        prompts=1 / alone,
        tokens=1 / full if full else math.inf,
    )


def together(asked: Asked, one: Server, form: WeightFormat) -> Option:
    """As many aggregated replicas as the rate takes; without a rate as many as there are GPUs.

    Figures are those with the spare ones lost.
    """
    layout = one.stepper.replica.layout
    usable = one.most - asked.spare

    def with_replicas(count: int) -> Foretell:
        return lambda rate: aggregated(one.stepper, asked.work, rate, count)

    bare = Option(kind=AGGREGATED, form=form, layouts=(layout,), replicas=(one.most,))
    if asked.work.rate is None:
        return most_within(asked, bare, with_replicas(usable), one.ceiling * usable)
    count = least(
        lambda n: not with_replicas(n)(asked.work.rate or 0.0).missed(asked.objectives),
        max(one.fewest, math.ceil(asked.work.rate / one.ceiling)),
        usable,
    )
    latency = with_replicas(count or usable)(asked.work.rate)
    replicas = ((count or usable) + asked.spare,)
    return settled(asked, msgspec.structs.replace(bare, replicas=replicas), latency)


def least(works: Callable[[int], bool], start: int, most: int) -> int:
    """The smallest number from ``start`` on that works; 0: none up to ``most`` does."""
    if start > most or not works(most):
        return 0
    low, high = max(1, start), most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle + 1, high)
    return low


def settled(asked: Asked, option: Option, latency: Latency) -> Option:
    """The option at the rate that was asked for."""
    return msgspec.structs.replace(
        option,
        latency=latency,
        rate=asked.work.rate or 0.0,
        missed=tuple(latency.missed(asked.objectives).items()),
    )


def after_losing(
    asked: Asked, option: Option, rate: float, lost: tuple[int, ...] | None = None
) -> Latency:
    """Of an option at ``rate``, with so many replicas of each pool lost; None: the spare ones."""
    steppers = [asked.stepper(layout, option.form) for layout in option.layouts]
    gone = lost or (asked.spare,) * len(steppers)
    left = [n - less for n, less in zip(option.replicas, gone, strict=True)]
    if option.kind == AGGREGATED:
        return aggregated(steppers[0], asked.work, rate, left[0])
    return disaggregated(steppers[0], steppers[1], asked.work, rate, (left[0], left[1]))


def most_within(asked: Asked, option: Option, foretell: Foretell, ceiling: float) -> Option:
    """The option at the highest rate at which no objective is missed; at next to none, if even
    that misses one."""
    quiet = foretell(QUIET * ceiling)
    if missed := quiet.missed(asked.objectives):
        return msgspec.structs.replace(
            option, latency=quiet, rate=QUIET * ceiling, missed=tuple(missed.items())
        )
    rate = highest(lambda rate: not foretell(rate).missed(asked.objectives), ceiling)
    return msgspec.structs.replace(option, latency=foretell(rate), rate=rate)


def highest(works: Callable[[float], bool], ceiling: float) -> float:
    """By halving the range from next to nothing to ``ceiling``."""
    low, high = QUIET * ceiling, ceiling
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def apart(asked: Asked, servers: list[Server], form: WeightFormat) -> Option | None:
    """The best of two pools: any layout for prefill, any for decode. None: not two fit.

    Prefill alone decides TTFT and decode alone TPOT, so each pool is sized by itself.
    """
    pairs = _for_rate(asked, servers) if asked.work.rate is not None else _for_most(asked, servers)
    best: Option | None = None
    for prefill, decode, counts in pairs:
        bare = Option(
            kind=DISAGGREGATED,
            form=form,
            layouts=(prefill.stepper.replica.layout, decode.stepper.replica.layout),
            replicas=counts,
        )
        found = _computed(asked, bare, prefill, decode, counts)
        if best is None or _better(found, best):
            best = found
    return best


Pair = tuple[Server, Server, tuple[int, int]]
TRIED = 6
"""Pairs of layouts that are computed in full; the estimate orders them."""


def _computed(
    asked: Asked, bare: Option, prefill: Server, decode: Server, counts: tuple[int, int]
) -> Option:
    used = (counts[0] - asked.spare, counts[1] - asked.spare)

    def foretell(rate: float) -> Latency:
        return disaggregated(prefill.stepper, decode.stepper, asked.work, rate, used)

    if asked.work.rate is not None:
        return settled(asked, bare, foretell(asked.work.rate))
    ceiling = min(used[0] * prefill.prompts, used[1] * decode.tokens)
    return most_within(asked, bare, foretell, ceiling)


def _better(one: Option, other: Option) -> bool:
    return (one.works, -one.worst, one.rate, -one.gpus, -one.failure_domain) > (
        other.works,
        -other.worst,
        other.rate,
        -other.gpus,
        -other.failure_domain,
    )


def _part(objectives: Objectives, what: str) -> Objectives:
    """Those of TTFT alone, or of TPOT alone."""
    other = "tpot" if what == "ttft" else "ttft"
    return msgspec.structs.replace(objectives, **{f"{other}_p{q}": None for q in (50, 95, 99)})


def _for_rate(asked: Asked, servers: list[Server]) -> list[Pair]:
    rate = asked.work.rate or 0.0
    wanted = _part(asked.objectives, "ttft")
    prefills = [(s, _pool(asked, s, rate, wanted, s.prompts, prefill=True)) for s in servers]
    wanted = _part(asked.objectives, "tpot")
    decodes = [(s, _pool(asked, s, rate, wanted, s.tokens, prefill=False)) for s in servers]
    found = [
        (p, d, (np + asked.spare, nd + asked.spare))
        for p, np in prefills
        for d, nd in decodes
        if np and nd and _fits(asked, p, d, (np + asked.spare, nd + asked.spare))
    ]
    return sorted(found, key=lambda pair: _gpus(*pair))[:TRIED]


def _pool(
    asked: Asked, one: Server, rate: float, wanted: Objectives, alone: float, *, prefill: bool
) -> int:
    """Replicas that one pool takes, with the other so large that it does not matter."""

    def works(count: int) -> bool:
        pools = (count, one.most * 64) if prefill else (one.most * 64, count)
        found = disaggregated(one.stepper, one.stepper, asked.work, rate, pools)
        return not found.missed(wanted)

    fewest = 1 if prefill else one.fewest
    return least(works, max(fewest, math.ceil(rate / alone)), one.most - asked.spare)


def _for_most(asked: Asked, servers: list[Server]) -> list[Pair]:
    """All the GPUs, in the proportion in which neither pool waits for the other."""
    found: list[tuple[float, Pair]] = []
    for prefill in servers:
        for decode in servers:
            for used in _shares(asked, prefill, decode):
                counts = (used[0] + asked.spare, used[1] + asked.spare)
                if used[1] >= decode.fewest and _fits(asked, prefill, decode, counts):
                    rate = min(used[0] * prefill.prompts, used[1] * decode.tokens)
                    found.append((rate, (prefill, decode, counts)))
    found.sort(key=lambda pair: -pair[0])
    return [pair for _, pair in found[:TRIED]]


def _shares(asked: Asked, prefill: Server, decode: Server) -> Iterator[tuple[int, int]]:
    """The two ways of sharing the GPUs out, less those of spare replicas, that are next to the even
    one."""
    one, other = prefill.stepper.replica.layout.gpus, decode.stepper.replica.layout.gpus
    gpus = asked.devices.gpus - asked.spare * (one + other)
    most = (gpus - other) // one
    even = int(gpus * decode.tokens / (other * prefill.prompts + one * decode.tokens))
    for count in {min(max(1, even), most), min(even + 1, most)}:
        if count > 0:
            yield count, (gpus - count * one) // other


def _gpus(prefill: Server, decode: Server, counts: tuple[int, int]) -> int:
    sizes = (prefill.stepper.replica.layout.gpus, decode.stepper.replica.layout.gpus)
    return counts[0] * sizes[0] + counts[1] * sizes[1]


def _fits(asked: Asked, prefill: Server, decode: Server, counts: tuple[int, int]) -> bool:
    """Whether there are hosts for both pools, the larger replicas placed first."""
    pools = zip((prefill, decode), counts, strict=True)
    return has_room(asked.devices, *((s.stepper.replica.layout.gpus, n) for s, n in pools))
