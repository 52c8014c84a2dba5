"""Formats that multiply as small as they are stored, and what that spares."""

from __future__ import annotations

from ekiden.planner.hardware import Gpu
from ekiden.planner.peaks import ACTIVATION_BYTES
from ekiden.planner.precision import WeightFormat


def multiplies_small(form: WeightFormat) -> bool:
    """Whether activations are made as small as the weights: only such formats use 8-bit units."""
    return form.name.startswith(("fp8", "w8a8"))


def small_tflops(gpu: Gpu, form: WeightFormat) -> float | None:
    """Peak of the units that multiply a format as small as it is; None: 16 bits do."""
    if form.name == "nvfp4":
        return gpu.fp4_tflops
    return gpu.fp8_tflops if multiplies_small(form) else None


SCALED = 128
"""Numbers of a token that share a float32 scale when they are sent as 8 bits."""


def dispatch_bytes(gpu: Gpu, form: WeightFormat) -> float:
    """Of one number of a token on its way to experts: 8 bits and its part of a scale where these
    multiply in 8 bits, else 16."""
    if gpu.fp8_tflops and multiplies_small(form):
        return 1 + 4 / SCALED
    return ACTIVATION_BYTES
