"""How far the planner is from what others measured: ``ekiden plan --score FILE.csv``.

Errors are shares of what was measured. Nothing is fitted here: a row is read, its replica is summed
up as any other, and the two figures are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.fit import fits
from ekiden.planner.hardware import GIB
from ekiden.planner.layout import check_layout
from ekiden.planner.memory import memory
from ekiden.planner.score_perf import METRICS, TPOT, TTFT, foretold, is_sparse
from ekiden.planner.score_rows import (
    FIT_KIND,
    KV_KIND,
    MEASURED_TERMS,
    PERF_KIND,
    Row,
    loaded,
    read,
    replica,
)
from ekiden.planner.weights import rank_weights

KV, WEIGHTS, FIT, ROW = "kv_capacity", "weights", "fit", "row"
EXEMPT = "should fit by arithmetic"
"""With which a row says itself that it failed of something else than this sum."""
_FAILED, _FITTED = ("fail", "oom", "out of memory"), ("ok", "fit", "work")


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One row in one respect: a prediction beside the measurement, or why there is none."""

    id: str
    what: str
    """``kv_capacity``, ``weights``, ``fit``, ``tpot``, ``ttft``; ``row``: nothing of it."""
    measured: float | None = None
    """Tokens, GiB or ms; for ``fit`` 1.0 and 0.0."""
    predicted: float | None = None
    unit: str = ""
    sparse: bool = False
    """The model has experts."""
    unscored: str = ""
    """The reason; empty where it was scored."""

    @property
    def error(self) -> float | None:
        """|predicted - measured| / measured; None for a fit, and for a row that is not scored."""
        if not self.measured or self.predicted is None or self.what == FIT:
            return None
        return abs(self.predicted - self.measured) / self.measured


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Every row of a file in every respect that it has, in the file's order."""

    judged: tuple[Judged, ...]

    def of(self, what: str) -> list[Judged]:
        return [one for one in self.judged if one.what == what]

    def summary(self) -> dict[str, Any]:
        """What ``--json`` prints; errors as shares, null where no row was scored."""
        fit = [one for one in self.of(FIT) if not one.unscored]
        return {
            **{what: _spread(self.of(what)) for what in (KV, WEIGHTS)},
            TPOT: {
                "dense": _spread([one for one in self.of(TPOT) if not one.sparse]),
                "moe": _spread([one for one in self.of(TPOT) if one.sparse]),
            },
            TTFT: _spread(self.of(TTFT)),
            "oom_called_fitting": sum(one.predicted == 1 != one.measured for one in fit),
            "fitting_called_oom": sum(one.measured == 1 != one.predicted for one in fit),
            "unscored": {
                what: {one.id: one.unscored for one in self.of(what) if one.unscored}
                for what in (KV, WEIGHTS, FIT, TPOT, TTFT, ROW)
            },
        }


def score(file: Path) -> Score:
    """Judge every row of a CSV file with the columns of ``score_rows.COLUMNS``.

    Raises:
        SetupError: the file cannot be read, or lacks columns.
    """
    return Score(judged=tuple(one for row in read(file) for one in _judge(row)))


def _judge(row: Row) -> list[Judged]:
    try:
        return [_one(row, what) for what in _respects(row)]
    except SetupError as error:
        return [Judged(id=row.name, what=ROW, unscored=error.message)]


def _respects(row: Row) -> list[str]:
    """In which a row can be compared. Raises SetupError: in none."""
    if row.kind not in _KINDS:
        raise SetupError(f"kind {row.text('kind')!r} is not scored: {', '.join(_KINDS)} are")
    metric = row.text("metric").lower()
    if row.kind == PERF_KIND and metric not in METRICS:
        raise SetupError(f"metric {metric!r} is not scored: {', '.join(METRICS)} are")
    found = [{KV_KIND: KV, FIT_KIND: FIT}.get(row.kind) or METRICS[metric]]
    return [*found, WEIGHTS] if row.text("weights_gib_per_gpu") else found


_KINDS = (KV_KIND, FIT_KIND, PERF_KIND)


def _one(row: Row, what: str) -> Judged:
    judge = {KV: _kv_capacity, WEIGHTS: _weights, FIT: _fit, TPOT: _latency, TTFT: _latency}[what]
    try:
        return judge(row)
    except SetupError as error:
        return Judged(id=row.name, what=what, unscored=error.message)


def _kv_capacity(row: Row) -> Judged:
    """Tokens as logged; GiB of a rank where layers differ, since then a token has no one size."""
    asked = replica(row)
    if asked.limits.utilization is None:
        raise SetupError("gpu_mem_util is not stated, and a capacity follows from it")
    _check_sum(row, int(asked.card.memory_bytes * asked.limits.utilization))
    tokens, gib = row.number("kv_tokens"), row.number("kv_gib_per_gpu")
    found = memory(asked)
    for name, value in (("kv_tokens", tokens), ("kv_gib_per_gpu", gib)):
        if value is not None and value < 0:
            raise SetupError(f"{name} {value:g} is below 0")
    if tokens and not asked.geometry.is_hybrid:
        return _compared(row, KV, tokens, found.pool_tokens, "tokens")
    if gib:
        room = max(0, min(rank.kv for rank in found.ranks))
        return _compared(row, KV, gib, room / GIB, "GiB")
    if tokens:
        raise SetupError("kv_tokens of hybrid attention depend on lengths: state kv_gib_per_gpu")
    raise SetupError("neither kv_tokens nor kv_gib_per_gpu says what a rank holds")


_SLACK = 0.02
"""Of what is usable: how far a row's own rounded terms may pass it."""


def _check_sum(row: Row, usable: int) -> None:
    """A row whose own terms do not go into its own share of the card was taken at another share."""
    terms = [row.number(name) or 0.0 for name in MEASURED_TERMS]
    if (taken := sum(terms) * GIB) > usable * (1 + _SLACK):
        raise SetupError(
            f"its own terms add up to {taken / GIB:.2f} GiB, and its gpu_mem_util allows "
            f"{usable / GIB:.2f}: one of them is wrong"
        )


def _weights(row: Row) -> Judged:
    asked, measured = loaded(row), row.number("weights_gib_per_gpu")
    if not measured or measured < 0:
        raise SetupError(f"weights_gib_per_gpu {row.text('weights_gib_per_gpu')} is not above 0")
    check_layout(asked.geometry, asked.layout, tp_divides=asked.profile.tp_divides)
    ranks = rank_weights(asked.geometry, asked.layout, asked.weights, asked.profile.holding)
    return _compared(row, WEIGHTS, measured, max(ranks) / GIB, "GiB")


def _fit(row: Row) -> Judged:
    outcome = row.text("outcome").lower()
    if not outcome.startswith(_FAILED + _FITTED):
        raise SetupError(f"outcome {outcome!r} is neither ok nor a failure of one layout")
    if EXEMPT in row.text("meaning").lower():
        raise SetupError(f"the row says itself that it {EXEMPT}")
    fitted = outcome.startswith(_FITTED)
    return _compared(row, FIT, float(fitted), float(fits(replica(row))), "")


_IN_MS = {"ms": 1.0, "s": 1e3}


def _latency(row: Row) -> Judged:
    what, unit = METRICS[row.text("metric").lower()], row.text("unit").lower()
    measured = row.number("value")
    if unit not in _IN_MS or not measured or measured < 0:
        raise SetupError(f"value {row.text('value')!r} in {unit!r} is no time: s or ms are known")
    loop = foretold(row)
    seconds = loop.tpot if what == TPOT else loop.ttft
    found = _compared(row, what, measured * _IN_MS[unit], seconds * 1e3, "ms")
    return msgspec.structs.replace(found, sparse=is_sparse(row))


SENSIBLE = 1e-9, 1e15
"""What can have been measured, in any of the units: beyond, an error is no number."""


def _compared(row: Row, what: str, measured: float, predicted: float, unit: str) -> Judged:
    if what != FIT and not SENSIBLE[0] <= measured <= SENSIBLE[1]:
        raise SetupError(f"{measured:g} {unit} cannot have been measured")
    return Judged(id=row.name, what=what, measured=measured, predicted=predicted, unit=unit)


def _spread(judged: Sequence[Judged]) -> dict[str, float | int | None]:
    errors = sorted(one.error for one in judged if one.error is not None)
    return {
        "median_error": quantile(errors, 0.5),
        "p90_error": quantile(errors, 0.9),
        "rows": len(errors),
    }


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Of values in ascending order, linear between neighbours (numpy's default); None of none."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
