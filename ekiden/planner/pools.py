"""Two pools: any layout of prefill with any of decode, and how many replicas of each."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from ekiden.planner.evaluate import QUIET, Server, highest, least, most_within, settled
from ekiden.planner.hosts import has_room
from ekiden.planner.latency import Latency
from ekiden.planner.neighbours import disaggregated
from ekiden.planner.options import (
    DISAGGREGATED,
    Asked,
    Option,
)
from ekiden.planner.precision import WeightFormat
from ekiden.planner.queueing import Queue
from ekiden.planner.serving import first_tokens, in_time, moved

Pair = tuple[Server, Server, tuple[int, int]]
TRIED = 6
"""Pairs of layouts that are computed in full; the estimate orders them."""


def apart(
    asked: Asked, servers: list[Server], form: WeightFormat
) -> tuple[Option | None, Option | None]:
    """The best of two pools, any layout for prefill and any for decode: without stages, and with
    them in one at least. None: not two fit.

    Prefill alone decides TTFT and decode alone TPOT, so each pool is sized by itself.
    """
    pairs = _for_rate(asked, servers) if asked.work.rate is not None else _for_most(asked, servers)
    staged = [any(one.stepper.replica.layout.pp > 1 for one in pair[:2]) for pair in pairs]
    return (
        _best(asked, form, [p for p, there in zip(pairs, staged, strict=True) if not there]),
        _best(asked, form, [p for p, there in zip(pairs, staged, strict=True) if there]),
    )


def _best(asked: Asked, form: WeightFormat, pairs: list[Pair]) -> Option | None:
    best: Option | None = None
    for prefill, decode, counts in pairs[:TRIED]:
        bare = Option(
            kind=DISAGGREGATED,
            form=form,
            layouts=(prefill.stepper.replica.layout, decode.stepper.replica.layout),
            replicas=counts,
        )
        found = _computed(asked, bare, prefill, decode)
        if best is None or _better(found, best):
            best = found
    return best


def _computed(asked: Asked, bare: Option, prefill: Server, decode: Server) -> Option:
    if asked.work.rate is not None:
        return _with_room(asked, bare, prefill, decode)
    first, second = (count - asked.spare for count in bare.replicas)

    def foretell(rate: float) -> Latency:
        return disaggregated(prefill.stepper, decode.stepper, asked.work, rate, (first, second))

    ceiling = min(first * prefill.prompts, second * decode.tokens)
    return most_within(asked, bare, foretell, ceiling)


def _with_room(asked: Asked, bare: Option, prefill: Server, decode: Server) -> Option:
    """With as many decode replicas more as it takes to have room for prompts while these are
    computed, where so many help."""
    first, second = (count - asked.spare for count in bare.replicas)
    rate = asked.work.rate or 0.0

    def foretell(count: int) -> Latency:
        return disaggregated(prefill.stepper, decode.stepper, asked.work, rate, (first, count))

    def works(count: int) -> bool:
        return not foretell(count).missed(asked.objectives)

    left = asked.devices.gpus - bare.replicas[0] * bare.layouts[0].gpus
    most = left // bare.layouts[1].gpus - asked.spare
    while most > second and not _fits(
        asked, prefill, decode, (bare.replicas[0], most + asked.spare)
    ):
        most -= 1
    count = second if works(second) else least(works, second, most) or second
    counts = (first + asked.spare, count + asked.spare)
    return settled(asked, msgspec.structs.replace(bare, replicas=counts), foretell(count))


def _better(one: Option, other: Option) -> bool:
    return (one.works, -one.worst, one.rate, -one.gpus, -one.failure_domain) > (
        other.works,
        -other.worst,
        other.rate,
        -other.gpus,
        -other.failure_domain,
    )


def _for_rate(asked: Asked, servers: list[Server]) -> list[Pair]:
    prefills = [(s, _prefills(asked, s)) for s in servers]
    decodes = [(s, _decodes(asked, s)) for s in servers if s.tokens]
    found = [
        (p, d, (np + asked.spare, nd + asked.spare))
        for p, np in prefills
        for d, nd in decodes
        if np and nd and _fits(asked, p, d, (np + asked.spare, nd + asked.spare))
    ]
    return sorted(found, key=lambda pair: _gpus(*pair))


def _prefills(asked: Asked, one: Server) -> int:
    """Replicas that keep TTFT and send their KV in time to a decode pool of any size; 0: none."""
    rate, work, stepper = asked.work.rate or 0.0, asked.work, one.stepper

    def works(count: int) -> bool:
        fresh = work.cached(count * stepper.tokens)
        _, link_load = moved(stepper, stepper, fresh, rate, (count, one.most * PLENTY))
        queue = first_tokens(stepper, work, rate, count)
        return link_load < 1 and in_time(queue, asked.objectives)

    return least(works, math.ceil(rate / one.prompts), one.most - asked.spare)


def _decodes(asked: Asked, one: Server) -> int:
    """Replicas that keep TPOT behind a prefill pool of any size; 0: none."""
    rate, work, stepper = asked.work.rate or 0.0, asked.work, one.stepper
    wanted = msgspec.structs.replace(asked.objectives, ttft_p50=None, ttft_p95=None, ttft_p99=None)

    def works(count: int) -> bool:
        found = disaggregated(stepper, stepper, work, rate, (one.most * PLENTY, count))
        return not found.missed(wanted)

    return least(works, max(one.fewest, math.ceil(rate / one.tokens)), one.most - asked.spare)


PLENTY = 64
"""Times the replicas for which there is room: a pool for which the other never waits."""


def _for_most(asked: Asked, servers: list[Server]) -> list[Pair]:
    """All the GPUs, in the proportion in which neither pool waits for the other."""
    found: list[tuple[float, Pair]] = []
    for prefill in _in_time(asked, servers):
        for decode in (one for one in servers if one.tokens):
            for used in _shares(asked, prefill, decode):
                counts = (used[0] + asked.spare, used[1] + asked.spare)
                if used[1] >= decode.fewest and _fits(asked, prefill, decode, counts):
                    rate = min(used[0] * prefill.prompts, used[1] * decode.tokens)
                    found.append((rate, (prefill, decode, counts)))
    found.sort(key=lambda pair: -pair[0])
    return [pair for _, pair in found]


def _in_time(asked: Asked, servers: list[Server]) -> list[Server]:
    """With the prompts that each computes within the objective of TTFT, if there is room for no
    other pool; as they are where none keeps it."""
    found = []
    for one in servers:
        replicas = one.most - asked.spare
        queue = first_tokens(one.stepper, asked.work, 1.0, replicas)

        def works(rate: float, queue: Queue = queue) -> bool:
            return in_time(msgspec.structs.replace(queue, rate=rate), asked.objectives)

        ceiling = one.prompts * replicas
        if works(QUIET * ceiling):
            prompts = highest(works, ceiling) / replicas
            found.append(msgspec.structs.replace(one, prompts=prompts))
    return found or servers


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
