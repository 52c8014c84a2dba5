"""From a layout to a deployment: how many replicas it takes, or the most that it serves."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from ekiden.planner.closed import room
from ekiden.planner.latency import Latency
from ekiden.planner.neighbours import aggregated, disaggregated
from ekiden.planner.options import (
    AGGREGATED,
    Asked,
    Option,
    places,
    prompt_layouts,
    why_not,
)
from ekiden.planner.precision import WeightFormat
from ekiden.planner.steady import prompt_costs
from ekiden.planner.steps import Stepper

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
    prompts: float
    """Requests a second of one replica that computes prompts only."""
    ceiling: float = 0.0
    """Of one that does both, with no time left; 0: it does not decode."""
    tokens: float = 0.0
    """Of one that decodes only."""


def server(asked: Asked, stepper: Stepper) -> Server | str:
    """The replica, or in one sentence why it cannot be."""
    layout = stepper.replica.layout
    most = places(asked.devices, layout)
    if (left := most - asked.spare) < 1:
        return (
            f"with --spare-replicas {asked.spare} it takes {asked.spare + 1} replicas, and there "
            f"is room for {most}"
        )
    if reason := why_not(stepper, -(-asked.sequences // left)):
        return reason
    work, dp = asked.work, layout.dp
    fresh = [(work.fresh(kind), kind.prompt) for kind in work.kinds]
    alone = work.mean(stepper.busy(new, all_ - new) for new, all_ in fresh) / dp
    found = Server(
        stepper=stepper,
        most=most,
        fewest=-(-asked.sequences * stepper.memory.limits.max_model_len // stepper.tokens),
        prompts=1 / alone,
    )
    if layout.cp > 1:
        return found
    if not work.decodes:
        return msgspec.structs.replace(found, ceiling=found.prompts)
    held = room(stepper, work.context)
    full = work.output * stepper.decode(held, work.context).total / held
    added = work.mean(prompt_costs(stepper, work, held / dp)) / dp
    return msgspec.structs.replace(found, ceiling=1 / (added + full), tokens=1 / full)


def prompt_servers(asked: Asked, form: WeightFormat) -> list[Server]:
    """Replicas that cut prompts over CP groups, for prefill alone: in decode every group would wait
    for the others' part of each context, layer by layer and token by token."""
    found = (
        server(asked, asked.stepper(layout, form))
        for layout in prompt_layouts(asked.geometry, asked.devices)
    )
    return [one for one in found if isinstance(one, Server)]


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
