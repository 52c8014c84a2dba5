"""Published latencies as closed loops: TPOT and TTFT of the rows of kind ``perf``."""

from __future__ import annotations

import re

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.calibration import calibration
from ekiden.planner.catalogue import by_name
from ekiden.planner.closed import Loop, closed_loop
from ekiden.planner.devices import PCIE, devices
from ekiden.planner.hardware import gpu
from ekiden.planner.layout import Layout, check_layout
from ekiden.planner.limits import Limits
from ekiden.planner.memory import Replica
from ekiden.planner.precision import WeightFormat, weight_format
from ekiden.planner.profiles import profile
from ekiden.planner.score_rows import Row, card, engine_of
from ekiden.planner.small import multiplies_small
from ekiden.planner.steps import Stepper

TPOT, TTFT = "tpot", "ttft"
METRICS = {"tpot": TPOT, "ttft_mean_or_p50": TTFT, "ttft_p50": TTFT, "ttft": TTFT}
"""Of the file, and in which respect each is judged."""
SEQUENCES, CHUNK = 1024, 8192
"""Defaults of the engines on the cards of the table, where a row does not state its own."""


def foretold(row: Row) -> Loop:
    """What the model says of a row's closed loop.

    Raises:
        SetupError: the row does not say enough, or says what the planner does not know.
    """
    replica = _replica(row)
    layout = replica.layout
    prompt, output, clients = (_stated(row, name) for name in ("isl", "osl", "concurrency"))
    known = gpu(row.text("gpu"))
    pcie = "pcie" in row.text("interconnect").lower()
    found = devices(
        known,
        per_host=max(1, min(layout.gpus, known.gpus_per_host)),
        hosts=max(1, -(-layout.gpus // known.gpus_per_host)),
        interconnect=PCIE if pcie else "auto",
    )
    stepper = Stepper(replica, found, calibration(engine_of(row)))
    return closed_loop(stepper, prompt=prompt, output=output, clients=clients)


def is_sparse(row: Row) -> bool:
    """Whether the row's model has experts. Raises SetupError: no such model."""
    return by_name(row.text("model")).is_moe


def _stated(row: Row, name: str) -> int:
    value = row.count(name)
    if not value or value < 1:
        raise SetupError(f"{name} is not stated")
    return value


def _replica(row: Row) -> Replica:
    engine = engine_of(row)
    if re.search(r"\bp-?d\b", engine):
        raise SetupError(
            f"engine {row.text('engine')!r}: the layouts of its two pools are not stated"
        )
    if row.count("tp") is None:
        raise SetupError("tp is not stated")
    if not engine:
        raise SetupError("engine is not stated")
    calibration(engine)
    _check_source(row)
    geometry = by_name(row.text("model"))
    layout = Layout(**{name: row.count(name) or 1 for name in ("tp", "pp", "dp", "ep")})
    check_layout(geometry, layout)
    form = _weights(row, geometry.dtype)
    length = _stated(row, "isl") + _stated(row, "osl")
    return Replica(
        geometry=geometry,
        card=card(row),
        layout=layout,
        weights=form,
        kv_dtype=row.text("kv_dtype") or _usual_kv(engine, form),
        limits=Limits(
            max_model_len=row.count("max_model_len") or length,
            max_num_seqs=row.count("max_num_seqs") or SEQUENCES,
            chunk=row.count("max_batched_tokens") or CHUNK,
            utilization=row.number("gpu_mem_util"),
        ),
        profile=msgspec.structs.replace(profile("vllm"), tp_divides=False),
    )


_TP_OF_SOURCE = re.compile(r"_tp(\d+)_")


def _check_source(row: Row) -> None:
    """A row whose own source names another TP than its column."""
    named = _TP_OF_SOURCE.search(row.text("source"))
    if named and int(named[1]) != row.count("tp"):
        raise SetupError(
            f"tp {row.count('tp')}, and its source names tp{named[1]}: one of them is wrong"
        )


def _weights(row: Row, dtype: str) -> WeightFormat:
    """As stated, else as the model was published."""
    return weight_format(row.text("weights_quant") or dtype)


def _usual_kv(engine: str, form: WeightFormat) -> str:
    """TensorRT-LLM's published checkpoints of 8 and 4 bits ask for a cache of 8 bits."""
    small = multiplies_small(form) or form.name == "nvfp4"
    return "fp8" if engine == "trtllm" and small else "auto"
