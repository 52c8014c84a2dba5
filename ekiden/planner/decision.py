"""Which deployment to take, and in a sentence each why the others lost.

The order is that of docs/plan.md: what meets the objectives; of that the fewest GPUs (or, where no
rate is stated, the most requests on the GPUs there are); of that the smallest failure domain. The
model's own format of weights comes before smaller ones, and one pool before two.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.easing import eased
from ekiden.planner.evaluate import Server, prompt_servers, server, together
from ekiden.planner.fit import check_length
from ekiden.planner.layout import Layout, check_layout
from ekiden.planner.options import AGGREGATED, DISAGGREGATED, Asked, Option, layouts
from ekiden.planner.pools import apart
from ekiden.planner.precision import WeightFormat

MARGIN = 0.1
"""Shares of throughput that are taken for equal: the model is not better than that."""
SPLIT_MARGIN = 0.2
"""By how much two pools must be better than the best single one, and stages than none: more to run,
and nine of ten published rows are foretold to within it."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to deploy; ``lost`` has everything else that was computed, the nearest first."""

    asked: Asked
    chosen: Option
    lost: tuple[Option, ...]
    aggregated: Option | None
    """The best of one pool, against which two pools were measured; None: none fits."""
    most: Decision | None = None
    """Without the rate, where that is more than these GPUs carry: ``chosen`` is its."""

    @property
    def short(self) -> bool:
        """The rate that was asked for is more than these GPUs carry; ``chosen`` carries most."""
        return self.most is not None

    @property
    def met(self) -> bool:
        """Whether the objectives are; else ``chosen`` is what comes nearest."""
        return self.chosen.works and not self.short


def decide(asked: Asked, *, all_formats: bool = True) -> Decision:
    """Compute every option and choose; without ``all_formats`` smaller ones only where nothing
    meets the objectives in a wider one.

    Raises:
        SetupError: a limit that cannot be, a context beyond the model's, or a layout that was asked
            for and cannot be; names it and the nearest that works.
    """
    check(asked)
    asked = eased(asked)
    everything: list[Option] = []
    for form in asked.every_format:
        if all_formats or choice(asked, everything) is None:
            everything += computed(asked, form)
    most = None
    if (chosen := choice(asked, everything)) is None:
        most = _without_rate(asked)
        chosen = most.chosen if most else nearest(everything)
    ours = [o for o in everything if o.form == chosen.form and o.kind == AGGREGATED]
    lost = [option for option in everything if option is not chosen]
    return Decision(
        asked=asked,
        chosen=chosen,
        lost=tuple(lost),
        aggregated=choice(asked, ours) or nearest(ours),
        most=most,
    )


def _without_rate(asked: Asked) -> Decision | None:
    """What carries the most within the objectives, where a rate was more than that; else None."""
    if asked.work.rate is None:
        return None
    work = msgspec.structs.replace(asked.work, rate=None)
    found = decide(msgspec.structs.replace(asked, work=work), all_formats=False)
    return found if found.met else None


def choice(asked: Asked, options: Collection[Option]) -> Option | None:
    """The best of those that meet the objectives, in the first format in which any does; None:
    none does."""
    for form in asked.every_format:
        if working := [option for option in options if option.form == form and option.works]:
            return best(asked, working)
    return None


def check(asked: Asked) -> None:
    """Refuse what no deployment could be: SetupError."""
    check_length(asked.stepper(Layout(), asked.own).replica)
    if (pinned := asked.pinned) is None:
        return
    check_layout(asked.geometry, pinned, tp_divides=asked.profile.tp_divides)
    if pinned.gpus > asked.devices.gpus:
        raise SetupError(
            f"{pinned} takes {pinned.gpus} GPUs, and there are {asked.devices.gpus}: choose a "
            "smaller one, or more --gpus-per-host or --hosts"
        )


def computed(asked: Asked, form: WeightFormat) -> list[Option]:
    """One option for each layout of one pool, and the best of two pools."""
    found: list[Option] = []
    servers: list[Server] = []
    considered = [asked.pinned] if asked.pinned else layouts(asked.geometry, asked.devices)
    for layout in considered:
        if layout.pp > 1 and servers and form is not asked.own:
            continue  # A smaller format is proposed to do without stages.
        one = server(asked, asked.stepper(layout, form))
        if isinstance(one, str):
            bare = Option(kind=AGGREGATED, form=form, layouts=(layout,), replicas=(0,), refused=one)
            found.append(bare)
            continue
        found.append(together(asked, one, form))
        servers.append(one)
    if not asked.work.decodes:
        return found
    if servers and not asked.pinned:
        servers += prompt_servers(asked, form)
    two = _without_stages(asked, *apart(asked, servers, form))
    return [*found, two] if two else found


def _without_stages(asked: Asked, whole: Option | None, staged: Option | None) -> Option | None:
    """Of two pools, unless those with stages are cheaper, or do where the others don't."""
    if whole is None or staged is None:
        return whole or staged
    if whole.works:
        return staged if staged.works and is_cheaper(asked, staged, whole) else whole
    return staged if staged.worst < whole.worst else whole


def best(asked: Asked, working: list[Option]) -> Option:
    """Of options that meet the objectives. Two pools must be cheaper than the best single one."""
    one = _cheapest(asked, [o for o in working if o.kind == AGGREGATED])
    two = _cheapest(asked, [o for o in working if o.kind == DISAGGREGATED])
    if one is None or two is None:
        return one or two or working[0]
    return two if is_cheaper(asked, two, one) else one


def is_cheaper(asked: Asked, one: Option, other: Option) -> bool:
    """By more than the model's own uncertainty where rates are compared."""
    if asked.work.rate is not None:
        return one.gpus < other.gpus
    return one.rate > other.rate * (1 + SPLIT_MARGIN)


def _cheapest(asked: Asked, options: list[Option]) -> Option | None:
    if not options:
        return None
    if asked.work.rate is not None:
        return min(
            options, key=lambda o: (o.gpus, o.failure_domain, _stages(o), o.latency.tpot_p95)
        )
    whole = [option for option in options if _stages(option) == 1]
    staged = _most([option for option in options if _stages(option) > 1])
    found = _most(whole)
    if found is None or staged is None:
        return found or staged
    return staged if staged.rate > found.rate * (1 + SPLIT_MARGIN) else found


def _most(options: list[Option]) -> Option | None:
    """The smallest failure domain of those that serve about as much as the best."""
    if not options:
        return None
    most = max(option.rate for option in options)
    close = [option for option in options if option.rate * (1 + MARGIN) >= most]
    return min(close, key=lambda o: (o.failure_domain, -o.rate))


def _stages(option: Option) -> int:
    """TP comes before PP where both do: a pipeline does not make one request faster."""
    return max(layout.pp for layout in option.layouts)


def nearest(options: Collection[Option]) -> Option:
    """Of options none of which works: the one that misses least, of what fits at all. Of what does
    not fit, the first that is cut over the most GPUs, so that each lacks least."""
    return min(
        options,
        key=lambda o: (
            bool(o.refused),
            o.worst,
            -max(one.gpus for one in o.layouts) if o.refused else o.gpus,
        ),
    )
