"""The constants of the latency model, fitted to what one machine was seen to do.

Least squares over the logarithms of all measured times at once, by Levenberg and Marquardt
(Marquardt 1963), with the shipped constants as what is believed before anything is measured: what
the measurements say nothing about stays near them. numpy has no such solver, and nothing else here
needs scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ekiden.planner.calibration import Calibration, check
from ekiden.planner.devices import devices
from ekiden.planner.hardware import Gpu
from ekiden.planner.memory import Replica
from ekiden.planner.steps import Stepper

MEASURED = 0.04
"""Relative spread of a measured time."""
SHARES = ("memory_share", "kv_share", "compute_share", "attention_share")
TIMES = ("layer_s", "step_s", "sequence_s", "request_s")
BELIEVED = {**dict.fromkeys(SHARES, 1.0), **dict.fromkeys(TIMES, 2.0)}
"""How far each may lie from what was believed: in logits of a share, in logarithms of a time."""
ROUNDS = 60
FOLDS = 3
_STEP = 1e-4
_SCALINGS = 4

Vector = NDArray[np.float64]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One measured time."""

    what: str
    """``ttft`` of a prompt alone, or ``itl`` of sequences that are decoded together."""
    tokens: int
    """Of the prompt; with ``itl``, those that each sequence sees on average."""
    sequences: int = 1
    seconds: float

    def __str__(self) -> str:
        if self.what == "ttft":
            return f"TTFT of {self.tokens:,} tokens alone"
        return f"a token of {self.sequences} at {self.tokens:,} tokens"


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """``foretold``: seconds, of each point; ``unseen``: those of fits that had not seen it."""

    calibration: Calibration
    points: tuple[Point, ...]
    foretold: tuple[float, ...]
    unseen: tuple[float, ...]

    def errors(self, foretold: Sequence[float]) -> list[float]:
        """Relative, by point."""
        pairs = zip(foretold, self.points, strict=True)
        return [abs(found / point.seconds - 1) for found, point in pairs]


def fit(points: Sequence[Point], replica: Replica, believed: Calibration) -> Fitted:
    """``believed``: has the measured machine as its ``device``. At least ``FOLDS`` points."""
    model = _Model(replica, believed)
    best = model.solve(points)
    unseen = [0.0] * len(points)
    for fold in range(FOLDS):
        others = [point for i, point in enumerate(points) if i % FOLDS != fold]
        blind = model.solve(others)
        for i in range(fold, len(points), FOLDS):
            unseen[i] = model.foretell(blind, points[i : i + 1])[0]
    foretold = tuple(map(float, model.foretell(best, points)))
    found = Fitted(
        calibration=believed, points=tuple(points), foretold=foretold, unseen=tuple(unseen)
    )
    error = float(np.median(found.errors(unseen)))
    told = msgspec.structs.replace(model.calibration(best), median_error=round(error, 4))
    return msgspec.structs.replace(found, calibration=check(told))


def start(device: Gpu, longest: Point, replica: Replica, believed: Calibration) -> Calibration:
    """``believed`` with ``device``, whose peak is made such that prompts take the usual share of
    it. A share cannot pass 1, so the peak must be about right."""
    told = msgspec.structs.replace(believed, device=device)
    for _ in range(_SCALINGS):  # not all of a prompt's time is computing
        foretold = float(_Model(replica, told).foretell_with(told, [longest])[0])
        peak = device.bf16_tflops * max(foretold / longest.seconds, 1e-9)
        device = msgspec.structs.replace(device, bf16_tflops=peak)
        told = msgspec.structs.replace(believed, device=device)
    return told


class _Model:
    """Times as a function of a vector: logits of shares, logarithms of times."""

    def __init__(self, replica: Replica, believed: Calibration) -> None:
        self._replica = replica
        self._believed = believed
        self._names = (*SHARES, *TIMES)
        self._origin = np.array([_inward(n, getattr(believed, n)) for n in self._names])
        self._spread = np.array([BELIEVED[name] for name in self._names])

    def calibration(self, vector: Vector) -> Calibration:
        values = {
            name: _outward(name, float(value))
            for name, value in zip(self._names, vector, strict=True)
        }
        return msgspec.structs.replace(self._believed, **values)

    def foretell(self, vector: Vector, points: Sequence[Point]) -> Vector:
        return self.foretell_with(self.calibration(vector), points)

    def foretell_with(self, told: Calibration, points: Sequence[Point]) -> Vector:
        assert told.device is not None  # whoever fits has measured a machine
        machine = devices(told.device, per_host=1, interconnect="pcie")
        stepper = Stepper(self._replica, machine, told)
        return np.array([_seconds(stepper, point) for point in points])

    def solve(self, points: Sequence[Point]) -> Vector:
        measured = np.log([point.seconds for point in points])

        def residuals(vector: Vector) -> Vector:
            off = (np.log(self.foretell(vector, points)) - measured) / MEASURED
            return np.concatenate([off, (vector - self._origin) / self._spread])

        return minimise(residuals, self._origin)


def minimise(residuals: Callable[[Vector], Vector], origin: Vector) -> Vector:
    """The vector near ``origin`` at which the sum of squares is least."""
    vector, damping = origin.copy(), 1e-2
    found = residuals(vector)
    for _ in range(ROUNDS):
        slopes = _slopes(residuals, vector, found)
        square = slopes.T @ slopes
        damped = square + damping * np.diag(np.diag(square))
        step = np.linalg.solve(damped, -slopes.T @ found)
        tried = residuals(vector + step)
        if tried @ tried < found @ found:
            vector, found, damping = vector + step, tried, damping / 3
        else:
            damping *= 5
        if np.abs(step).max() < _STEP:
            break
    return vector


def _slopes(residuals: Callable[[Vector], Vector], vector: Vector, found: Vector) -> Vector:
    columns = []
    for i in range(len(vector)):
        moved = vector.copy()
        moved[i] += _STEP
        columns.append((residuals(moved) - found) / _STEP)
    return np.stack(columns, axis=1)


def _seconds(stepper: Stepper, point: Point) -> float:
    if point.what == "ttft":
        return stepper.told.request_s + stepper.prompt(point.tokens).total
    return stepper.decode(point.sequences, point.tokens).total


def _inward(name: str, value: float) -> float:
    value = max(value, 1e-9)
    return (
        float(np.log(value / (1 - min(value, 0.999)))) if name in SHARES else float(np.log(value))
    )


def _outward(name: str, value: float) -> float:
    if name in SHARES:
        return float(1 / (1 + np.exp(-np.clip(value, -20, 20))))
    return float(min(np.exp(np.clip(value, -25, 2)), 9.0))
