"""What would bring more than the chosen deployment: other weights, another cache, more patience."""

from __future__ import annotations

import msgspec

from ekiden.planner.decision import Decision, choice, computed, nearest
from ekiden.planner.evaluate import server, together
from ekiden.planner.options import AGGREGATED, Option
from ekiden.planner.precision import KV_BYTES, kv_format
from ekiden.planner.reasons import figure, gain, gpus, milliseconds

WORTH_A_LOOK = 1.5
"""Times the throughput of a GPU from which smaller weights are pointed at."""
MUCH = 1.2
"""The same of a smaller cache, or of more patience."""
MOST_OF_IT = 0.5
"""Share of the objective of TTFT from which the time of one prompt alone is called much of it."""


def smaller_weights(decision: Decision) -> str:
    """The best of smaller weights, where they would bring much, or all into one host."""
    chosen = decision.chosen
    found = [o for o in decision.lost if o.works and o.form.bits < chosen.form.bits]
    if not found or not chosen.works:
        return ""
    best = max(found, key=lambda o: (o.rate_per_gpu, -o.gpus))
    per_host = decision.asked.devices.per_host
    joins = best.failure_domain <= per_host < chosen.failure_domain
    if not joins and best.rate_per_gpu < WORTH_A_LOOK * chosen.rate_per_gpu:
        return ""
    return f"Smaller weights are worth a look: {best.name}, {gain(decision, best)}."


def small_kv(decision: Decision) -> str:
    """What 8 bits of KV would bring to the same layout, where that is much."""
    chosen, asked = decision.chosen, decision.asked
    if chosen.kind != AGGREGATED or not chosen.works or KV_BYTES[kv_format(asked.kv_dtype)] == 1:
        return ""
    small = asked.profile.small_kv
    smaller = msgspec.structs.replace(asked, kv_dtype=small)
    one = server(smaller, smaller.stepper(chosen.layouts[0], chosen.form))
    if isinstance(one, str):
        return ""
    found = together(smaller, one, chosen.form)
    if not found.works or found.rate_per_gpu < MUCH * chosen.rate_per_gpu:
        return ""
    return (
        f"A cache of 8 bits is worth a look: with --kv-cache-dtype {small} this layout "
        f"{gain(decision, found)}. Compare its answers too."
    )


def small_kv_helps(decision: Decision) -> str:
    """What fits, or meets the objectives, with 8 bits of KV where nothing does without."""
    asked, small = decision.asked, decision.asked.profile.small_kv
    if decision.met or KV_BYTES[kv_format(asked.kv_dtype)] == 1:
        return ""
    asked = msgspec.structs.replace(asked, kv_dtype=small)
    fitting: list[Option] = []
    for form in asked.every_format:
        options = computed(asked, form)
        if found := choice(asked, options):
            does = "fits" if decision.chosen.refused else "meets the objectives"
            return _with_small_kv(small, found, does)
        fitting += [one for one in options if not one.refused]
    if decision.chosen.refused and fitting:
        return _with_small_kv(small, nearest(fitting), "fits, and misses an objective")
    return ""


def _with_small_kv(small: str, option: Option, does: str) -> str:
    return (
        f"With a cache of 8 bits (--kv-cache-dtype {small}) {option.name} {does}: "
        f"{figure(option.rate)} requests/s on {gpus(option.gpus)}. Compare its answers too."
    )


def patience(decision: Decision) -> str:
    """What twice the time to the first token would bring, where a prompt alone takes much of it."""
    chosen, asked = decision.chosen, decision.asked
    most = asked.objectives.ttft_p95
    if most is None or asked.work.rate is not None or not chosen.works:
        return ""
    longest = max(kind.prompt for kind in asked.work.kinds)
    alone = asked.stepper(chosen.layouts[0], chosen.form).prompt(longest).total
    if alone < MOST_OF_IT * most:
        return ""
    patient = msgspec.structs.replace(asked.objectives, ttft_p95=2 * most)
    asked = msgspec.structs.replace(asked, objectives=patient)
    found = choice(asked, computed(asked, chosen.form))
    if found is None or found.rate < MUCH * chosen.rate:
        return ""
    return (
        f"A prompt of {longest} tokens alone takes {milliseconds(alone)} of the "
        f"{milliseconds(most)} that TTFT P95 may be. With {milliseconds(2 * most)} {found.name} "
        f"would serve {figure(found.rate)} requests/s, {figure(found.rate / chosen.rate)} times as "
        "many."
    )
