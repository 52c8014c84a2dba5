"""What this engine serves in place of a plan that it does not serve yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ekiden.planner.decision import Decision, choice, computed, nearest
from ekiden.planner.flags import blocked
from ekiden.planner.options import Asked, Option
from ekiden.planner.reasons import figure, gpus, milliseconds, misses


def instead(decision: Decision, served: Collection[str]) -> Option | None:
    """Of everything that was computed, what would have been chosen if only that counted which is
    served; where none of it meets the objectives, the nearest that fits. None: nothing is."""
    found = decision.most or decision
    ours = _served(found.asked, (found.chosen, *found.lost), served)
    seen = {one.form for one in (found.chosen, *found.lost)}
    if decision.asked.geometry.model_type in served and choice(found.asked, ours) is None:
        for form in (one for one in found.asked.every_format if one not in seen):
            ours += _served(found.asked, computed(found.asked, form), served)
    return choice(found.asked, ours) or (nearest(ours) if ours else None)


def _served(asked: Asked, options: Iterable[Option], served: Collection[str]) -> list[Option]:
    return [one for one in options if not blocked(asked, one, served)]


def pin(asked: Asked, option: Option) -> str:
    """Options of ``ekiden plan`` that leave only this layout; empty where none do, since they name
    one layout and two pools may have two."""
    layout = option.layouts[0]
    if any(one != layout for one in option.layouts):
        return ""
    stages = f" -pp {layout.pp}" if layout.pp > 1 else ""
    form = "" if option.form == asked.own else f" --weights {option.form.name}"
    return f"-tp {layout.tp}{stages}{form}"


def compared(decision: Decision, option: Option) -> str:
    """Its figures, and how much less, or more, it gives than what was chosen."""
    asked, latency = decision.asked, option.latency
    if not option.works:
        quiet = asked.work.rate is None or decision.short
        return latency.limit or misses(asked.objectives, option, quiet=quiet)
    felt = f"TTFT P95 {milliseconds(latency.ttft_p95)}"
    if asked.work.decodes:
        felt += f", TPOT P95 {milliseconds(latency.tpot_p95)}"
    figures = f"{figure(option.rate)} requests/s on {gpus(option.gpus)}, {felt}"
    smaller = option.form.bits < decision.chosen.form.bits
    answers = ", with smaller weights, which change answers" if smaller else ""
    return f"{figures}; {_beside(decision, option)}{answers}"


def _beside(decision: Decision, option: Option) -> str:
    chosen = decision.chosen
    if decision.asked.work.rate is not None and not decision.short:
        return f"the chosen takes {chosen.gpus}"
    share = option.rate / chosen.rate
    return f"{1 - share:.0%} less than the chosen" if share < 1 else f"{share:.3g} times the chosen"
