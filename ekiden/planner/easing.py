"""An objective of TTFT that nobody stated, eased where the GPUs at hand leave no room for it.

What people find quick enough may be about what one long prompt takes alone. A plan that keeps it
would serve next to nothing, for an objective that nobody asked for.
"""

from __future__ import annotations

import math

import msgspec

from ekiden.planner.options import Asked, layouts, why_not

TIMES = 3.0
"""Of the longest prompt alone, on the layout of one pool that is quickest: one that is served, one
that is ahead of it, and the steps of others."""
_ROUND_S = 0.5


def eased(asked: Asked) -> Asked:
    """The same question with an assumed TTFT that is no less than ``TIMES`` a prompt alone, in the
    model's own format; as it is where somebody stated one, or where nothing fits."""
    usual = asked.objectives.ttft_p95
    if "ttft" not in asked.objectives.assumed or usual is None or asked.objectives.eased_from:
        return asked
    least = math.ceil(TIMES * _quickest(asked) / _ROUND_S) * _ROUND_S
    if least <= usual:
        return asked
    objectives = msgspec.structs.replace(asked.objectives, ttft_p95=least, eased_from=usual)
    return msgspec.structs.replace(asked, objectives=objectives)


def _quickest(asked: Asked) -> float:
    """Seconds of the longest prompt alone; 0 where no replica within a host fits."""
    kind = max(asked.work.kinds, key=lambda kind: kind.prompt)
    fresh = asked.work.fresh(kind)
    found = 0.0
    considered = [asked.pinned] if asked.pinned else layouts(asked.geometry, asked.devices)
    for layout in considered:
        if layout.gpus > asked.devices.per_host and found:
            break  # larger ones follow, and a host is enough
        one = asked.stepper(layout, asked.own)
        if why_not(one, asked.sequences):
            continue
        seconds = one.told.request_s + one.prompt(fresh, kind.prompt - fresh).total
        found = min(found or seconds, seconds)
    return found


def told(asked: Asked) -> str:
    """That it was eased, in a sentence; else empty."""
    if (usual := asked.objectives.eased_from) is None:
        return ""
    longest = max(kind.prompt for kind in asked.work.kinds)
    return (
        f"TTFT P95 of {asked.objectives.ttft_p95:g} s is assumed, and not {usual:g} s as usual: a "
        f"prompt of {longest} tokens alone takes about a third of it on these GPUs. State what you "
        "need with --ttft-p95."
    )
