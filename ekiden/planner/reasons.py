"""In one sentence with its figures, why a deployment was not chosen."""

from __future__ import annotations

from ekiden.planner.decision import MARGIN, SPLIT_MARGIN, Decision
from ekiden.planner.options import AGGREGATED, DISAGGREGATED, Option
from ekiden.planner.workload import Objectives


def lost(decision: Decision, option: Option) -> str:
    """Why ``option`` was not taken."""
    chosen, asked = decision.chosen, decision.asked
    if option.refused:
        return f"does not fit: {option.refused}"
    if option.latency.limit:
        return f"cannot keep up with {figure(option.rate)} requests/s: {option.latency.limit}"
    if option.missed:
        return misses(asked.objectives, option, quiet=asked.work.rate is None)
    if option.form != chosen.form:
        return _other_format(decision, option)
    if option.kind == DISAGGREGATED and chosen.kind == AGGREGATED:
        return _no_cheaper(decision, option)
    if asked.work.rate is None:
        return _slower(chosen, option)
    return _dearer(chosen, option)


def milliseconds(seconds: float) -> str:
    """As people read them: ``48.2 ms``, ``1.42 s``."""
    if seconds == float("inf"):
        return "without end"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def figure(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def label(objective: str) -> str:
    """``TTFT P95`` for ``ttft_p95``."""
    return objective.upper().replace("_", " ")


def misses(objectives: Objectives, option: Option, *, quiet: bool) -> str:
    """Which objectives, and by how much; ``quiet``: at next to no load."""
    stated = objectives.stated()
    parts = [
        f"{label(name)} is {milliseconds(getattr(option.latency, name))}, {times - 1:.1%} over "
        f"{milliseconds(stated[name])}"
        for name, times in option.missed
    ]
    when = ", even with next to no load" if quiet else ""
    return f"too slow: {' and '.join(parts)}{when}"


def _other_format(decision: Decision, option: Option) -> str:
    if option.form is decision.asked.own:
        return "the model's own format; nothing in it meets the objectives better"
    takes = "take another checkpoint and " if decision.asked.geometry.quant_method else ""
    return (
        f"{gain(decision, option)}, but smaller weights {takes}change answers: compare those first"
    )


def gain(decision: Decision, option: Option) -> str:
    """What other weights would bring, in figures."""
    chosen, rate = decision.chosen, f"{figure(option.rate)} requests/s"
    if decision.asked.work.rate is None:
        if option.rate < chosen.rate * (1 + MARGIN):
            return f"would serve {rate}, and the chosen {figure(chosen.rate)}"
        times = option.rate / chosen.rate if chosen.rate else float("inf")
        return f"would serve {rate}, {figure(times)} times the chosen"
    if option.gpus != chosen.gpus:
        return f"would take {gpus(option.gpus)}, not {chosen.gpus}"
    if not decision.asked.work.decodes:
        return f"would take {gpus(option.gpus)} too"
    return (
        f"would take {gpus(option.gpus)} too, with a TPOT P95 of "
        f"{milliseconds(option.latency.tpot_p95)}"
    )


def gpus(count: int) -> str:
    """``1 GPU``, ``8 GPUs``."""
    return f"{count} GPU{'s' * (count != 1)}"


def _no_cheaper(decision: Decision, option: Option) -> str:
    one = decision.aggregated
    if one is None:
        return ""
    if decision.asked.work.rate is not None:
        fewer = f"no fewer than {one.name}" if option.gpus == one.gpus else ""
        return f"takes {gpus(option.gpus)}, {fewer or f'and {one.name} takes {one.gpus}'}"
    return (
        f"serves {figure(option.rate)} requests/s against {figure(one.rate)} of {one.name}: two "
        f"pools must win by {SPLIT_MARGIN:.0%} to be worth their running"
    )


def _slower(chosen: Option, option: Option) -> str:
    if option.rate * (1 + MARGIN) < chosen.rate:
        return (
            f"serves {figure(option.rate)} requests/s within the objectives, and the chosen "
            f"{figure(chosen.rate)}"
        )
    margin = SPLIT_MARGIN if _stages(option) > _stages(chosen) else MARGIN
    return (
        f"serves {figure(option.rate)} requests/s, less than {margin:.0%} from the chosen "
        f"{figure(chosen.rate)}, and {_domain(chosen, option)}"
    )


def _dearer(chosen: Option, option: Option) -> str:
    if option.gpus > chosen.gpus:
        return f"takes {gpus(option.gpus)}, and {chosen.gpus} will do"
    return f"takes {gpus(option.gpus)} too, and {_domain(chosen, option)}"


def _domain(chosen: Option, option: Option) -> str:
    if option.failure_domain > chosen.failure_domain:
        return (
            f"one failure takes {gpus(option.failure_domain)} with it, not {chosen.failure_domain}"
        )
    if _stages(option) > _stages(chosen):
        return "stages do not make one request faster"
    ours, its = milliseconds(chosen.latency.tpot_p95), milliseconds(option.latency.tpot_p95)
    return f"its TPOT P95 is {its}, not {ours}" if its != ours else "it has no advantage"


def _stages(option: Option) -> int:
    return max(layout.pp for layout in option.layouts)
