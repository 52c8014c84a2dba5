"""Rows of published measurements as replicas. What a row does not say is never guessed.

Columns are those of ``id,kind,model,...``; an empty cell (or ``nan``) is not stated.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.catalogue import by_name
from ekiden.planner.geometry import Geometry
from ekiden.planner.hardware import GIB, gpu
from ekiden.planner.layout import Layout
from ekiden.planner.limits import Limits
from ekiden.planner.memory import Replica, card_of
from ekiden.planner.precision import UNKNOWN, WeightFormat, weight_format
from ekiden.planner.profiles import Card, Profile, profile

COLUMNS = (
    *("id", "kind", "model", "weights_quant", "kv_dtype", "gpu", "interconnect", "engine"),
    *("engine_version", "tp", "pp", "dp", "ep", "gpu_mem_util", "max_model_len"),
    *("max_batched_tokens", "max_num_seqs", "gpu_total_gib", "weights_gib_per_gpu"),
    *("activation_gib", "nontorch_gib", "kv_gib_per_gpu", "kv_tokens", "block_size"),
    *("outcome", "quality", "meaning"),
)
PERF_COLUMNS = ("isl", "osl", "concurrency", "metric", "value", "unit", "source")
"""Of rows of latencies; with ``COLUMNS``, all that scoring reads."""
KV_KIND, FIT_KIND, PERF_KIND = "kv", "oom", "perf"
_REPLICA = ("weights_quant", "gpu", "engine", "tp")
NEEDED = {
    "": ("kind", "model"),
    KV_KIND: (*_REPLICA, "gpu_mem_util"),
    FIT_KIND: (*_REPLICA, "outcome"),
    PERF_KIND: ("gpu", "engine", "tp", "isl", "osl", "concurrency", "metric", "value", "unit"),
}
"""Columns without which no row, or none of a kind, can be scored; all others may be left out."""
_ALL = (*COLUMNS, *PERF_COLUMNS)
MOST = 10**9
"""Of anything that is counted in a row."""
MEASURED_TERMS = ("weights_gib_per_gpu", "activation_gib", "nontorch_gib", "kv_gib_per_gpu")
"""That together are the share of the card which an engine took."""


class Row:
    """One line of the file, cells by column."""

    def __init__(self, cells: Mapping[str, str | None], name: str = "") -> None:
        self._cells = {column: (cells.get(column) or "").strip() for column in _ALL}
        self.name = self._cells["id"] or name
        """By which a person finds it: its id, or the number of its line."""

    @property
    def kind(self) -> str:
        return self.text("kind").lower()

    def text(self, name: str) -> str:
        """A cell; empty where the row says that it is not known."""
        value = self._cells[name]
        return "" if value.lower() in UNKNOWN else value

    def number(self, name: str) -> float | None:
        """A cell's number. Raises SetupError: it has none."""
        if not (text := self.text(name)):
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.inf
        if not math.isfinite(value):
            raise SetupError(f"{name} {text!r} is not a number")
        return value

    def count(self, name: str) -> int | None:
        """A cell's whole number, which may be written as 8.0. Raises SetupError: it has none."""
        if (value := self.number(name)) is None:
            return None
        if value != int(value) or not 0 <= value <= MOST:
            raise SetupError(
                f"{name} {self.text(name)!r} counts nothing: a whole number from 0 to {MOST:,} does"
            )
        return int(value)


def read(file: Path) -> list[Row]:
    """Every row of a CSV file but blank ones; names of columns in any case.

    Raises:
        SetupError: no such file, or columns are missing without which nothing in it, or no row of
            a kind that it has, can be scored; names them.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            lines = csv.reader(text)
            found = [(lines.line_num, cells) for cells in lines if any(map(str.strip, cells))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SetupError(f"{file} cannot be read: {error}") from None
    header = [name.strip().lower() for name in found[0][1]] if found else []
    rows = [
        Row(dict(zip(header, cells, strict=False)), f"line {number}") for number, cells in found[1:]
    ]
    _check_columns(file, header, {row.kind for row in rows})
    return _told_apart(rows)


def _check_columns(file: Path, header: Sequence[str], kinds: Collection[str]) -> None:
    for kind, needed in NEEDED.items():
        missing = [name for name in needed if name not in header]
        if missing and (not kind or kind in kinds):
            which = f", which rows of kind {kind} need" if kind else ""
            raise SetupError(f"{file} lacks the columns {', '.join(missing)}{which}")


def _told_apart(rows: list[Row]) -> list[Row]:
    """Rows of one id get numbers, so that each keeps a line of its own."""
    seen: Counter[str] = Counter()
    for row in rows:
        seen[row.name] += 1
        if seen[row.name] > 1:
            row.name = f"{row.name} ({seen[row.name]})"
    return rows


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a row measured, whatever the card."""

    geometry: Geometry
    layout: Layout
    weights: WeightFormat
    profile: Profile


def loaded(row: Row) -> Loaded:
    """The model as the row's engine held it.

    Raises:
        SetupError: the row does not say enough, or says what the planner does not know: the reason
            why it cannot be scored.
    """
    said = f"{row.text('quality')} {row.text('meaning')}"
    geometry = by_name(row.text("model"))
    if re.search(r"\bvision tower\b", said, re.IGNORECASE) and not geometry.tower_parameters:
        raise SetupError(f"a vision tower was loaded too, which {geometry.name} has not")
    if not row.text("weights_quant"):
        raise SetupError("weights_quant is not stated")
    return Loaded(
        geometry=geometry,
        layout=Layout(**{name: row.count(name) or 1 for name in ("tp", "pp", "dp", "ep")}),
        weights=weight_format(row.text("weights_quant")),
        profile=engine_profile(row),
    )


def replica(row: Row) -> Replica:
    """The whole replica that a row measured. Raises SetupError as ``loaded`` and ``card``."""
    found = loaded(row)
    block = row.count("block_size") or found.profile.block_size
    return Replica(
        geometry=found.geometry,
        card=card(row),
        layout=found.layout,
        weights=found.weights,
        kv_dtype=row.text("kv_dtype") or "auto",
        limits=Limits(
            max_model_len=row.count("max_model_len"),
            max_num_seqs=row.count("max_num_seqs"),
            chunk=row.count("max_batched_tokens"),
            utilization=row.number("gpu_mem_util"),
        ),
        profile=msgspec.structs.replace(found.profile, block_size=block),
    )


def card(row: Row) -> Card:
    """The card's memory as the row states it, or as the table of GPUs has it.

    Raises:
        SetupError: it states none, and no such GPU is known.
    """
    name, stated = row.text("gpu"), row.number("gpu_total_gib")
    nvlink = "pcie" not in row.text("interconnect").lower()
    if stated is not None:
        return Card(name=name, memory_bytes=int(stated * GIB), nvlink=nvlink)
    known = card_of(gpu(name))
    return msgspec.structs.replace(known, nvlink=known.nvlink and nvlink)


_ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "tensorrtllm": "trtllm"}
"""As ``engine_of`` compares them: without case, spaces, dashes and underscores."""


def engine_of(row: Row) -> str:
    """The row's engine by our name for it, or as it stands there; empty where it is not stated."""
    stated = row.text("engine").lower()
    return _ENGINES.get(re.sub(r"[\W_]", "", stated), stated)


_MINOR = re.compile(r"\b0\.(\d+)(x?)(?:\.(\d+))?")
_IN_PROSE = re.compile(r"\bv(0\.\d+\S*)")


def engine_profile(row: Row) -> Profile:
    """By engine and version, which may stand in ``meaning``; without one, today's usual vLLM.

    Raises:
        SetupError: an engine that has no profile.
    """
    if engine_of(row) != "vllm":
        said = row.text("engine") or "not stated"
        raise SetupError(f"engine {said!r} has no profile: only vllm has")
    version = row.text("engine_version")
    if not version and (prose := _IN_PROSE.search(row.text("meaning"))):
        version = prose[1]
    return profile(_profile_name(version))


def _profile_name(version: str) -> str:
    found = _MINOR.search(version)
    minor, patch = 8, 4
    if found:
        minor = int(found[1]) * (10 if found[2] else 1)
        patch = int(found[3]) if found[3] else 4
    if minor >= 16:
        return "vllm-0.16"
    if minor <= 2:
        return "vllm-0.2"
    if (minor, patch) < (5, 4):
        return "vllm-0.3"
    if "V0" in version or (minor < 8 and "V1" not in version):
        return "vllm-v0"
    return "vllm"
