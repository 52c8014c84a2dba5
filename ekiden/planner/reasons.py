"""Why a deployment was chosen, and in one sentence with its figures why another one was not."""

from __future__ import annotations

from ekiden.planner.decision import MARGIN, SPLIT_MARGIN, Decision
from ekiden.planner.devices import PCIE
from ekiden.planner.fit import fit
from ekiden.planner.layout import Layout
from ekiden.planner.options import AGGREGATED, DISAGGREGATED, Asked, Option
from ekiden.planner.workload import Objectives

SLOW_LINK = 0.25
"""Share of communication in a decode step from which a link is called slow."""


def why(decision: Decision) -> list[str]:
    """Sentences, the first question first: does it fit, is it busy, is it slow?"""
    chosen = decision.chosen
    if chosen.refused:
        return [_nothing_fits(decision)]
    found = [_room(decision), _shape(decision), _shortfall(decision), _format(decision)]
    found += [_link(decision), _split(decision), _interference(decision)]
    return [sentence for sentence in found if sentence]


def lost(decision: Decision, option: Option) -> str:
    """Why ``option`` was not taken."""
    chosen, asked = decision.chosen, decision.asked
    if option.refused:
        return f"does not fit: {option.refused}"
    if option.latency.limit:
        return f"cannot keep up with {option.rate:.3g} requests/s: {option.latency.limit}"
    if option.missed:
        return _misses(asked.objectives, option, quiet=asked.work.rate is None)
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


def label(objective: str) -> str:
    """``TTFT P95`` for ``ttft_p95``."""
    return objective.upper().replace("_", " ")


def _misses(objectives: Objectives, option: Option, *, quiet: bool) -> str:
    stated = objectives.stated()
    parts = [
        f"{label(name)} is {milliseconds(getattr(option.latency, name))} against "
        f"{milliseconds(stated[name])}"
        for name, _ in option.missed
    ]
    when = ", even with next to no load" if quiet else ""
    return f"too slow: {' and '.join(parts)}{when}"


def _other_format(decision: Decision, option: Option) -> str:
    chosen = decision.chosen
    if option.form is decision.asked.own:
        return "the model's own format; nothing in it meets the objectives better"
    gain = (
        f"would take {option.gpus} GPUs, not {chosen.gpus}"
        if decision.asked.work.rate is not None
        else f"would serve {option.rate:.3g} requests/s, {option.rate / chosen.rate:.2f} times the "
        "chosen"
    )
    return f"{gain}; smaller weights change answers, so compare those first"


def _no_cheaper(decision: Decision, option: Option) -> str:
    one = decision.aggregated
    if one is None:
        return ""
    if decision.asked.work.rate is not None:
        return f"takes {option.gpus} GPUs, and {one.name} takes {one.gpus}"
    return (
        f"serves {option.rate:.3g} requests/s against {one.rate:.3g} of {one.name}: two pools must "
        f"win by {SPLIT_MARGIN:.0%} to be worth their running"
    )


def _slower(chosen: Option, option: Option) -> str:
    if option.rate * (1 + MARGIN) < chosen.rate:
        return (
            f"serves {option.rate:.3g} requests/s within the objectives, and the chosen "
            f"{chosen.rate:.3g}"
        )
    return (
        f"serves {option.rate:.3g} requests/s, no more than {MARGIN:.0%} from the chosen "
        f"{chosen.rate:.3g}, and {_domain(chosen, option)}"
    )


def _dearer(chosen: Option, option: Option) -> str:
    if option.gpus > chosen.gpus:
        return f"takes {option.gpus} GPUs, and {chosen.gpus} are enough"
    return f"takes {option.gpus} GPUs too, and {_domain(chosen, option)}"


def _domain(chosen: Option, option: Option) -> str:
    if option.failure_domain > chosen.failure_domain:
        return (
            f"one failure takes {option.failure_domain} GPUs with it, not {chosen.failure_domain}"
        )
    return (
        f"its TPOT P95 is {milliseconds(option.latency.tpot_p95)}, not "
        f"{milliseconds(chosen.latency.tpot_p95)}"
    )


def _single(decision: Decision) -> Option | None:
    """What was found of one card in the chosen format."""
    everything = (decision.chosen, *decision.lost)
    return next(
        (
            option
            for option in everything
            if option.kind == AGGREGATED
            and option.layouts == (Layout(),)
            and option.form == decision.chosen.form
        ),
        None,
    )


def _nothing_fits(decision: Decision) -> str:
    asked = decision.asked
    chosen, devices = decision.chosen, asked.devices
    return (
        f"{asked.geometry.name} does not fit on {devices.gpus} x {devices.gpu.name} in any layout "
        f"or format. The nearest, {chosen.layouts[0]} in {chosen.form.name}: {chosen.refused}. "
        f"{larger(asked)}"
    )


def larger(asked: Asked) -> str:
    """Of the model in its own format, the fewest of these GPUs that would do."""
    layout = Layout(tp=min(asked.devices.per_host, asked.geometry.heads))
    found = fit(
        asked.stepper(layout, asked.own).replica,
        sequences=asked.sequences,
        per_host=asked.devices.gpu.gpus_per_host,
    )
    return f"In {asked.own.name}, {found.advice}." if found.advice else ""


def _room(decision: Decision) -> str:
    one, chosen = _single(decision), decision.chosen
    if one is None:
        return ""
    card = decision.asked.devices.gpu.name
    if one.refused:
        return f"It does not fit on one {card}: {one.refused}. So the model is split."
    if chosen.failure_domain > 1:
        return f"It fits on one {card}, but {lost(decision, one)}."
    if chosen.gpus == 1:
        return f"It fits on one {card}, and one is enough: there is nothing to split."
    return f"It fits on one {card}: more traffic takes more replicas, not a split model."


def _shape(decision: Decision) -> str:
    """What the layout of the (decode) replica is for."""
    layout, devices = decision.chosen.layouts[-1], decision.asked.devices
    if layout.dp > 1:
        return (
            f"{layout}: each GPU, or group of TP, has the attention of its own sequences and "
            f"1/{layout.ep} of the experts, so KV is not replicated and each expert sees the "
            f"tokens of all {layout.dp} groups."
        )
    if layout.pp > 1:
        where = "between hosts" if layout.gpus > devices.per_host else "over the slower link"
        return (
            f"{layout}: only activations cross the {layout.pp - 1} borders of stages, {where}; TP "
            f"stays within {layout.tp} GPUs."
        )
    if layout.tp > 1:
        return (
            f"{layout} is the least that is quick enough and leaves room for KV: every layer's "
            f"matrices are cut over {layout.tp} GPUs joined by {devices.link_of(layout.tp)}."
        )
    return ""


def _shortfall(decision: Decision) -> str:
    if decision.met:
        return ""
    chosen, asked = decision.chosen, decision.asked
    said = chosen.latency.limit or _misses(asked.objectives, chosen, quiet=asked.work.rate is None)
    return f"Nothing meets the objectives on these GPUs; this comes nearest, and is {said}."


def _format(decision: Decision) -> str:
    chosen, own = decision.chosen, decision.asked.own
    if chosen.form == own:
        return ""
    return (
        f"In {own.name} no layout meets the objectives on these GPUs; with {chosen.form.name} "
        "weights this one does. Compare its answers with the wider model's before you rely on it."
    )


def _link(decision: Decision) -> str:
    chosen, devices = decision.chosen, decision.asked.devices
    share = chosen.latency.decode.communication_share
    if max(layout.tp for layout in chosen.layouts) == 1 or share < SLOW_LINK:
        return ""
    link = "PCIe" if devices.interconnect == PCIE else "the link"
    return (
        f"{share:.0%} of a decode step is communication over {link}: pipeline stages and smaller "
        "weights are among the alternatives below."
    )


def _split(decision: Decision) -> str:
    chosen, one = decision.chosen, decision.aggregated
    if chosen.kind != DISAGGREGATED or one is None:
        return ""
    against = lost(decision, one) if one is not chosen else ""
    return (
        f"Prefill and decode are split, since the best single pool, {one.name}, {against}. "
        f"KV takes {chosen.latency.link_load:.0%} of the link, and the second token waits "
        f"{milliseconds(chosen.latency.transfer)} for it."
    )


def _interference(decision: Decision) -> str:
    chosen = decision.chosen
    if chosen.kind != AGGREGATED or chosen.latency.limit:
        return ""
    latency = chosen.latency
    return (
        f"Prefill and decode are not split: prompts take {latency.prefill_load:.0%} of a replica's "
        f"time and hold a token up by {milliseconds(latency.stall)} at most, and TPOT P95 is "
        f"{milliseconds(latency.tpot_p95)} with that."
    )
