"""Why a deployment was chosen, in sentences: does it fit, is it busy, is it slow?"""

from __future__ import annotations

import math

import msgspec

from ekiden.planner import easing
from ekiden.planner.decision import Decision
from ekiden.planner.devices import NVLINK
from ekiden.planner.dtypes import narrowed, widened
from ekiden.planner.fit import fit
from ekiden.planner.layout import Layout
from ekiden.planner.options import AGGREGATED, DISAGGREGATED, Asked, Option
from ekiden.planner.reasons import figure, lost, milliseconds, misses
from ekiden.planner.why_long import long_prompts
from ekiden.planner.why_more import patience, small_kv, small_kv_helps, smaller_weights
from ekiden.planner.work import busiest
from ekiden.planner.workload import VOICE

SLOW_LINK = 0.25
"""Share of communication in a decode step from which a link is called slow."""
NEARLY_ALL = 0.95


def why(decision: Decision) -> list[str]:
    """Sentences, the first question first: does it fit, is it busy, is it slow?"""
    chosen = decision.chosen
    if chosen.refused:
        return [s for s in (_nothing_fits(decision), _floats(decision)) if s]
    carried, helps = decision.most or decision, small_kv_helps(decision)
    found = [_room(decision), _shape(decision), _shortfall(decision), helps, patience(decision)]
    found += [_format(decision), _floats(decision), _link(decision), smaller_weights(carried)]
    found += [easing.told(decision.asked), _split(decision), _interference(decision)]
    found += ["" if helps else small_kv(carried), _full(decision), _uneven(decision)]
    found += [long_prompts(decision), _voice(decision)]
    return [sentence for sentence in found if sentence]


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
    tried = " or ".join(form.name for form in asked.every_format)
    spare = f" with {asked.spare} more of each replica" if asked.spare else ""
    said = (
        f"{asked.geometry.name} does not fit on {devices.gpus} x {devices.gpu.name}{spare} in any "
        f"layout, in {tried}. The nearest, {chosen.name}: {chosen.refused}."
    )
    return " ".join(filter(None, (said, larger(asked), small_kv_helps(decision))))


def larger(asked: Asked) -> str:
    """Of the model in its own format, the fewest of these GPUs that would do, and what else would
    that was not tried: KV of 8 bits is (``small_kv_helps``)."""
    layout = Layout(tp=min(asked.devices.per_host, asked.geometry.heads))
    smaller = ("fp8" if asked.devices.gpu.fp8_tflops else "int8", "int4")
    tried = [form.name for form in asked.formats]
    found = fit(
        asked.stepper(layout, asked.own).replica,
        sequences=asked.sequences,
        per_host=asked.devices.gpu.gpus_per_host,
        smaller=[name for name in smaller if name not in tried],
    )
    longest = found.longest if found.longest >= asked.work.longest else 0
    found = msgspec.structs.replace(found, longest=longest, cache="")
    return f"In {asked.own.name}, {found.advice}." if found.advice else ""


def _room(decision: Decision) -> str:
    one, chosen = _single(decision), decision.chosen
    if one is None:
        return ""
    card = decision.asked.devices.gpu.name
    form = "" if chosen.form == decision.asked.own else f" in {chosen.form.name}"
    if one.refused:
        return f"It does not fit on one {card}: {one.refused}. So the model is split."
    if chosen.failure_domain > 1:
        said = f"It fits on one {card}{form}, and is split all the same"
        return f"{said}. TP1: {lost(decision, one)}."
    if chosen.gpus == 1 and not decision.met:
        return f"It fits on one {card}{form}: it is not memory that lacks."
    if chosen.gpus == 1 and decision.asked.devices.gpus == 1:
        return f"It fits on one {card}{form}: there is nothing to split."
    if chosen.gpus == 1:
        return f"It fits on one {card}{form}, and one is enough: there is nothing to split."
    return f"It fits on one {card}{form}: more traffic takes more replicas, not a split model."


def _shape(decision: Decision) -> str:
    """What the layout of the (decode) replica is for."""
    layout, devices = decision.chosen.layouts[-1], decision.asked.devices
    if layout.dp > 1:
        return (
            f"{layout}: each GPU, or group of TP, has the attention of its own sequences and "
            f"1/{layout.ep} of the experts, so KV is not replicated and each expert sees the "
            f"tokens of {'both' if layout.dp == 2 else f'all {layout.dp}'} groups."
        )
    if layout.pp > 1:
        where = "hosts" if layout.gpus > devices.per_host else "GPUs"
        within = f", TP stays within {layout.tp} GPUs" if layout.tp > 1 else ""
        return f"{layout}: only activations cross between stages, on different {where}{within}."
    if layout.tp > 1:
        return (
            f"{layout}: every layer's matrices are cut over {layout.tp} GPUs joined by "
            f"{devices.link_of(layout.tp)}{_less(decision, layout)}."
        )
    return ""


def _less(decision: Decision, layout: Layout) -> str:
    """Why half of a TP is not enough."""
    half = Layout(tp=layout.tp // 2)
    if half.tp < 2 or decision.chosen.kind != AGGREGATED:
        return ""
    found = [o for o in decision.lost if o.layouts == (half,) and o.form == decision.chosen.form]
    return f". {found[0].layouts[0]}: {lost(decision, found[0])}" if found else ""


def _shortfall(decision: Decision) -> str:
    if decision.met:
        return ""
    chosen, asked = decision.chosen, decision.asked
    if decision.short and asked.work.rate:
        step = math.gcd(*(layout.gpus for layout in chosen.layouts))
        needed = math.ceil(asked.work.rate / chosen.rate_per_gpu / step) * step
        return (
            f"These GPUs do not carry {figure(asked.work.rate)} requests/s within the objectives. "
            f"This carries the most, {figure(chosen.rate)}; about {needed} such GPUs would carry "
            "all."
        )
    said = chosen.latency.limit or misses(asked.objectives, chosen, quiet=asked.work.rate is None)
    return f"Nothing meets the objectives on these GPUs; this comes nearest: {said}."


def _floats(decision: Decision) -> str:
    asked, form = decision.asked, decision.chosen.form
    return narrowed(asked.geometry, asked.devices.gpu, form) or widened(asked.devices.gpu, form)


def _format(decision: Decision) -> str:
    chosen, own = decision.chosen, decision.asked.own
    if chosen.form == own or not chosen.works:
        return ""
    ours = [option for option in decision.lost if option.form == own]
    lacks = "fits" if all(option.refused for option in ours) else "meets the objectives"
    return (
        f"In {own.name} no layout {lacks} on these GPUs; with {chosen.form.name} weights this one "
        "does. Compare its answers with the wider model's before you rely on it."
    )


def _link(decision: Decision) -> str:
    chosen, devices = decision.chosen, decision.asked.devices
    decode = chosen.latency.decode.communication_share
    prompt = chosen.latency.prefill.communication_share
    if max(layout.gpus for layout in chosen.layouts) == 1 or max(decode, prompt) < SLOW_LINK:
        return ""
    shares = f"{decode:.0%} of a decode step and {prompt:.0%} of a prompt"
    if devices.interconnect == NVLINK:
        return f"Communication takes {shares}."
    return (
        f"PCIe is slow for this: communication takes {shares}. Pipeline stages and smaller "
        "weights, which need less of it, are among the alternatives below."
    )


def _full(decision: Decision) -> str:
    """Where a limit is the limit, and neither the GPUs nor an objective is."""
    chosen, layout = decision.chosen, decision.chosen.layouts[-1]
    limit = decision.asked.stepper(layout, chosen.form).replica.resolved.max_num_seqs
    latency = chosen.latency
    if latency.most < limit * layout.dp or latency.running < NEARLY_ALL * latency.most:
        return ""
    return f"What bounds it is --max-num-seqs {limit}, not its KV or an objective."


def _uneven(decision: Decision) -> str:
    """What heads cost that TP does not divide."""
    attention = max(decision.asked.geometry.kinds, key=lambda one: one.attention.heads).attention
    for layout in decision.chosen.layouts:
        _, most = busiest(attention, layout.tp)
        if (over := most * layout.tp / attention.heads - 1) > 0:
            return (
                f"TP{layout.tp} does not divide the {attention.heads} query heads in "
                f"{attention.kv_heads} groups evenly: the busiest GPU has {most}, {over:.0%} more "
                "than an even part, and the others wait for it in every layer. Its time is the one "
                "that is shown."
            )
    return ""


def _voice(decision: Decision) -> str:
    if decision.asked.work.name != VOICE:
        return ""
    return (
        "A speech pipeline: keep recognition, this model and synthesis each on GPUs of their own, "
        "since a burst of one delays the others. Listeners hear the jitter between tokens: the "
        f"longest gap that a prompt causes here is {milliseconds(decision.chosen.latency.stall)}."
    )


def _split(decision: Decision) -> str:
    chosen, one = decision.chosen, decision.aggregated
    if chosen.kind != DISAGGREGATED or one is None:
        return ""
    return (
        f"Prefill and decode are split. The best single pool, {one.name}: {lost(decision, one)}. "
        f"KV takes {chosen.latency.link_load:.0%} of the link, and the second token waits "
        f"{milliseconds(chosen.latency.transfer)} for it."
    )


def _interference(decision: Decision) -> str:
    chosen = decision.chosen
    if chosen.kind != AGGREGATED or not chosen.works or not decision.asked.work.decodes:
        return ""
    latency = chosen.latency
    return (
        f"Prefill and decode are not split: prompts take {latency.prefill_load:.0%} of a replica's "
        f"time and hold a token up by {milliseconds(latency.stall)} at most, and TPOT P95 is "
        f"{milliseconds(latency.tpot_p95)} with that.{_two_pools(decision)}"
    )


def _two_pools(decision: Decision) -> str:
    """How the best of two pools in the chosen format did; empty where there is one GPU."""
    chosen, gpus = decision.chosen, decision.asked.devices.gpus
    if gpus < 2 * min(layout.gpus for layout in chosen.layouts):
        return ""
    found = [o for o in decision.lost if o.kind == DISAGGREGATED and o.form == chosen.form]
    if not found:
        return f" No two pools of these {gpus} GPUs carry that in {chosen.form.name}."
    best = min(found, key=lambda o: (not o.works, o.worst, -o.rate))
    return f" The best of two pools, {best.name}: {lost(decision, best)}."
