"""Two results side by side: what changed by more than chance explains.

Requests of one run are no independent draws: a queue makes neighbours slow together. So blocks of
neighbouring requests are drawn again and again, with their order kept inside (circular block
bootstrap, Politis and Romano 1992). The logarithm of the ratio B / A gets an interval of
Student's t, and a figure is called changed when that leaves out 0. The confidence is that of the
whole comparison: each of the figures compared gets its share of what may go wrong (Bonferroni).

What differs between two starts of a server, or between two hours of a busy machine, a single run
of each does not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ekiden.bench.result import Result, Simulated
from ekiden.core.errors import SetupError
from ekiden.measures.run import Run, Samples

LEAST = 50
"""Requests of a level: with fewer nothing is said."""
_POINTS = {"p50": (50.0, LEAST), "p95": (95.0, 100)}
"""Percentiles, and how many values one needs."""
_TIMES = ("ttft_ms", "tpot_ms", "itl_std_ms", "e2e_ms")
CAME = "answers that came"
_ROUNDS = 1000
_LENGTHS = 3.0
"""A block is as many times as long as requests hang together."""
_APART = 20
"""As many lengths a level must have, or an interval would be too narrow."""
_NOTHING = 1e-9
"""Below it a figure is taken for this much, so that there is a ratio."""
_AT_ONCE = 1 << 21
"""Values drawn at a time, which bounds the memory."""

Values = NDArray[np.float64]
Told = Result | Simulated


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one level. ``ratio`` is B / A, within ``low`` and ``high``."""

    level: str
    figure: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: str
    """``worse``, ``better``, ``same`` (not told apart) or ``unclear``: neighbouring requests hang
    together so closely that the run is too short to say."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of the levels that both results have."""

    schema: str = "ekiden.bench.compare/1"
    confidence: float
    before: str
    after: str
    changes: list[Change]
    notes: list[str]
    failed: list[str] = []
    """Levels in which requests of B failed and none of A."""

    @property
    def worse(self) -> bool:
        """Beyond chance; a failure where there was none needs no more proof."""
        return bool(self.failed) or any(change.verdict == "worse" for change in self.changes)


def compare(before: Told, after: Told, *, confidence: float = 0.95, seed: int = 0) -> Comparison:
    """Raises SetupError when the results have no level in common."""
    common = _pairs(before, after)
    pairs = [(a, b) for a, b in common if min(a.requests, b.requests) >= LEAST]
    chance = np.random.default_rng(seed)
    figures = len(pairs) * (len(_TIMES) * len(_POINTS) + 1)
    alpha = (1 - confidence) / max(1, figures)
    changes = [change for a, b in pairs for change in _level(a, b, alpha, chance)]
    return Comparison(
        confidence=confidence,
        before=_name(before),
        after=_name(after),
        changes=changes,
        notes=[*_unlike(before, after), *(note for a, b in common for note in _notes(a, b))],
        failed=[a.name for a, b in common if b.errors and not a.errors],
    )


def lines(found: Comparison) -> Iterator[str]:
    """The comparison as text, what changed first."""
    yield f"A: {found.before}"
    yield f"B: {found.after}"
    yield from (f"note: {note}" for note in found.notes)
    changed = [change for change in found.changes if change.verdict in ("worse", "better")]
    for change in changed:
        yield (
            f"{change.level}: {change.figure} is {change.verdict}: {change.before:,.4g} -> "
            f"{change.after:,.4g} ({change.ratio - 1:+.1%}, from {change.low - 1:+.1%} to "
            f"{change.high - 1:+.1%})"
        )
    if unclear := [c for c in found.changes if c.verdict == "unclear"]:
        yield (
            f"{len(unclear)} figures are unclear, for queueing ties neighbouring requests together "
            f"and a run is too short: {', '.join(f'{c.level} {c.figure}' for c in unclear)}"
        )
    left = len(found.changes) - len(changed) - len(unclear)
    yield (
        f"{left} of {len(found.changes)} figures are not told apart at {found.confidence:.0%} "
        "confidence"
    )


def write(path: Path, found: Comparison) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def _pairs(before: Told, after: Told) -> list[tuple[Run, Run]]:
    """Runs of one name, and the only ones where one side is simulated."""
    only = len(before.levels) == len(after.levels) == 1
    later = {run.name: run for run in after.levels}
    common = [(run, later[run.name]) for run in before.levels if run.name in later]
    if not common and type(before) is not type(after) and only:
        common = [(before.levels[0], after.levels[0])]
    if not common:
        names = [", ".join(run.name for run in told.levels) for told in (before, after)]
        raise SetupError(f"no level is in both results: A has {names[0]}; B has {names[1]}")
    return common


def _notes(a: Run, b: Run) -> Iterator[str]:
    if a.name != b.name:
        yield f"the only levels have other names: {a.name} against {b.name}"
    if min(a.requests, b.requests) < LEAST:
        yield f"{a.name}: fewer than {LEAST} requests, nothing is said of it"
    elif min(a.succeeded, b.succeeded) < LEAST:
        yield f"{a.name}: fewer than {LEAST} answers, nothing is said of their times"
    if b.errors and not a.errors:
        lost = b.requests - b.succeeded
        yield f"{a.name}: {lost} of {b.requests} requests of B failed, and none of A"


def _unlike(before: Told, after: Told) -> list[str]:
    """What else differs: then the figures may differ for that reason."""
    fields = ("model", "endpoint", "workload", "arrival", "seed", "prompts")
    return [
        f"{field} differs: {getattr(before, field)} against {getattr(after, field)}"
        for field in fields
        if hasattr(before, field)
        and hasattr(after, field)
        and getattr(before, field) != getattr(after, field)
    ]


def _name(told: Told) -> str:
    if isinstance(told, Simulated):
        return f"{told.model}, simulated, {told.workload}"
    return f"{told.started}, {told.model} at {told.url}, {told.workload}"


def _level(a: Run, b: Run, alpha: float, chance: np.random.Generator) -> Iterator[Change]:
    for figure in _TIMES:
        runs = [_values(x.samples, figure) for x in (a, b)]
        for point, (percent, least) in _POINTS.items():
            if min(map(len, runs)) < least or not np.percentile(runs[0], percent):
                continue  # too few, or no ratio to nothing
            figure_of = partial(np.percentile, q=percent, axis=1)
            yield _change(a.name, f"{figure} {point}", runs, figure_of, alpha, chance)
    if a.errors or b.errors:
        runs = [np.array([not error for error in x.samples.error], dtype=float) for x in (a, b)]
        yield _change(a.name, CAME, runs, partial(np.mean, axis=1), alpha, chance)


def _change(
    level: str,
    figure: str,
    runs: Sequence[Values],
    figure_of: Callable[[Values], Any],
    alpha: float,
    chance: np.random.Generator,
) -> Change:
    before, after = (float(figure_of(values[None])[0]) for values in runs)
    draws = [np.log(np.maximum(_draws(values, figure_of, chance), _NOTHING)) for values in runs]
    ratio = max(after, _NOTHING) / max(before, _NOTHING)
    blocks = min(len(values) // _block(values) for values in runs)
    reach = math.exp(_quantile(1 - alpha / 2, blocks) * float((draws[1] - draws[0]).std()))
    low, high = ratio / reach, ratio * reach
    return Change(
        level=level,
        figure=figure,
        before=before,
        after=after,
        ratio=ratio,
        low=low,
        high=high,
        verdict=_verdict(low, high, more_is_better=figure == CAME) if _enough(runs) else "unclear",
    )


def _verdict(low: float, high: float, *, more_is_better: bool) -> str:
    if low <= 1 <= high:
        return "same"
    return "better" if (low > 1) == more_is_better else "worse"


def _enough(runs: Sequence[Values]) -> bool:
    return all(len(values) / _hanging_together(values) >= _APART for values in runs)


def _quantile(share: float, blocks: int) -> float:
    """Student's t of so many blocks less one, by the expansion of Fisher and Cornish (1960)."""
    z, free = NormalDist().inv_cdf(share), max(1, blocks - 1)
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)


def _values(samples: Samples, figure: str) -> Values:
    """Of the answers that came, in the order in which they were due."""
    if not hasattr(samples, figure):
        return np.array([])  # gaps between tokens, which nobody simulates
    pairs = zip(getattr(samples, figure), samples.error, strict=True)
    return np.array([v for v, error in pairs if v is not None and not error], dtype=np.float64)


def _draws(values: Values, figure: Callable[[Values], Any], chance: np.random.Generator) -> Values:
    """The figure of each of ``_ROUNDS`` resamplings."""
    at_once = max(1, _AT_ONCE // len(values))
    parts = [
        figure(_resampled(values, min(at_once, _ROUNDS - begun), chance))
        for begun in range(0, _ROUNDS, at_once)
    ]
    return np.concatenate(parts)


def _hanging_together(values: Values) -> float:
    """After how many requests one says nothing any more of the next: the autocorrelation, summed
    up to where it is lost in noise."""
    size = len(values)
    ranks = np.unique(values, return_inverse=True)[1]  # an outlier must not hide the rest
    ranks = ranks - ranks.mean()
    spectrum = np.fft.rfft(ranks, 2 * size)
    together = np.fft.irfft(np.abs(spectrum) ** 2)[:size]
    shares = together / max(together[0], _NOTHING)
    below = np.flatnonzero(shares < 2 / math.sqrt(size))
    return 1 + 2 * float(shares[1 : below[0] if below.size else size].sum())


def _block(values: Values) -> int:
    size = len(values)
    length = math.ceil(_LENGTHS * _hanging_together(values))
    return min(size, max(math.ceil(math.cbrt(size)), length))


def _resampled(values: Values, rounds: int, chance: np.random.Generator) -> Values:
    """``[rounds, len(values)]``: blocks that begin anywhere, round the end to the start."""
    size, block = len(values), _block(values)
    starts = chance.integers(0, size, (rounds, math.ceil(size / block)))
    places = (starts[:, :, None] + np.arange(block)) % size
    return values.take(places.reshape(rounds, -1)[:, :size])
