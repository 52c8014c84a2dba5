"""Which format a model has on a GPU, and in which floats it is computed there."""

from __future__ import annotations

from ekiden.core.errors import SetupError
from ekiden.planner.geometry import Geometry
from ekiden.planner.hardware import Gpu
from ekiden.planner.precision import FLOATS, WeightFormat, published, weight_format

AUTO = "auto"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What ``--dtype`` calls each of ``FLOATS``."""


def own_format(name: str, geometry: Geometry, gpu: Gpu) -> WeightFormat:
    """The format called ``name``; ``auto``: that in which the model is published, with fp16 for
    bf16 on a GPU without it, which takes as many bytes.

    Raises:
        SetupError: a name that is no format, or bf16 for such a GPU; names what works.
    """
    if name == AUTO:
        found = published(geometry.quant_method, geometry.dtype, geometry.model_type)
        return weight_format("fp16") if found.name == "bf16" and not gpu.has_bf16 else found
    found = weight_format(name)
    if found.name == "bf16" and not gpu.has_bf16:
        raise SetupError(
            f"weights {name}: {gpu.name} has compute capability {gpu.compute_capability}, and bf16 "
            "begins with 8.0: choose fp16, which takes as many bytes, or auto"
        )
    return found


def computed_in(form: WeightFormat, geometry: Geometry, gpu: Gpu) -> str:
    """One of ``FLOATS``: that of the weights, or of the model where they are smaller."""
    if form.name in FLOATS:
        return form.name
    floats = weight_format(geometry.dtype).name
    return "fp16" if floats == "bf16" and not gpu.has_bf16 else floats


def dtype_option(form: WeightFormat, geometry: Geometry, gpu: Gpu) -> str:
    """The value of ``--dtype``; empty where ``auto`` finds it in the model's config."""
    floats = computed_in(form, geometry, gpu)
    return "" if floats == weight_format(geometry.dtype).name else DTYPES[floats]


def narrowed(geometry: Geometry, gpu: Gpu, form: WeightFormat) -> str:
    """In a sentence, that a model of bf16 is computed in fp16; empty where it is not."""
    if gpu.has_bf16 or dtype_option(form, geometry, gpu) != DTYPES["fp16"]:
        return ""
    return (
        f"{gpu.name} has no bf16 (compute capability {gpu.compute_capability}, it begins at 8.0), "
        "and the model is published in it: it is planned in fp16, which takes as many bytes but "
        "reaches less far. Compare its answers."
    )


def widened(gpu: Gpu, form: WeightFormat) -> str:
    """In a sentence, that weights of FP8 are multiplied as 16 bits; empty where they are not."""
    if gpu.fp8_tflops or not form.name.startswith("fp8"):
        return ""
    return (
        f"{gpu.name} has no FP8: the sums are those of an engine that holds such weights in 8 bits "
        "and multiplies in 16, as vLLM does. ekiden holds 16 bits there."
    )
