"""The requests of a simulation: when each is due, how long it is, what its prompt begins with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import msgspec

from ekiden.planner.trace import BLOCK, Line
from ekiden.planner.workload import Requests, Workload


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Lengths in tokens."""

    number: int
    due_s: float
    prompt: int
    output: int
    ids: tuple[int, ...] = ()
    """One for each ``BLOCK`` tokens of the prompt: equal ids are equal tokens. What they do not
    cover is the request's own."""


def replayed(lines: Sequence[Line], *, speed: float = 1.0, longest: int = 0) -> list[Asked]:
    """The requests of a trace in order of time, ``speed`` times as fast; those of more than
    ``longest`` tokens, if that is given, are left out."""
    ordered = sorted(lines, key=lambda line: line.timestamp)
    first = ordered[0].timestamp
    fitting = [x for x in ordered if not longest or x.input_length + x.output_length <= longest]
    return [
        Asked(
            number=number,
            due_s=(line.timestamp - first) / 1e3 / speed,
            prompt=line.input_length,
            output=line.output_length,
            ids=line.hash_ids[: -(-line.input_length // BLOCK)],
        )
        for number, line in enumerate(fitting)
    ]


def drawn(work: Workload, rate: float, requests: int, rng: random.Random) -> list[Asked]:
    """``requests`` of a workload that come at random (Poisson), ``rate`` a second.

    Every prompt begins with ``work.prefix_share`` of it, in whole blocks, that all prompts share.
    """
    own, found, due = count(1 << 20), [], 0.0
    shares = [kind.share for kind in work.kinds]
    for number in range(requests):
        due += rng.expovariate(rate)
        kind = rng.choices(work.kinds, shares)[0]
        found.append(
            Asked(
                number=number,
                due_s=due,
                prompt=kind.prompt,
                output=kind.output,
                ids=_ids(kind, work.prefix_share, own),
            )
        )
    return found


def _ids(kind: Requests, share: float, own: count[int]) -> tuple[int, ...]:
    blocks = -(-kind.prompt // BLOCK)
    shared = int(kind.prompt * share) // BLOCK
    return tuple(block if block < shared else next(own) for block in range(blocks))
