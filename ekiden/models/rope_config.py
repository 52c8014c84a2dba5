"""The rotary embedding as ``config.json`` describes it, in its old and its new form. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError

KINDS = ("default", "linear", "llama3", "yarn")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding over the whole head. Only the fields of its ``kind`` mean anything."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """YaRN: what cos and sin are multiplied by; None takes the paper's 0.1 ln(factor) + 1."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def reach(self, max_position_embeddings: int) -> int:
        """The longest sequence: YaRN and linear scaling stretch what the model was trained on.

        Llama 3's scaling states the stretched length itself. A YaRN file may state either
        length, so the larger of the two holds.
        """
        if self.kind == "yarn":
            return max(max_position_embeddings, int(self.original_max_position * self.factor))
        if self.kind == "linear":
            return int(max_position_embeddings * self.factor)
        return max_position_embeddings


def parse_rope(config: dict[str, Any], max_position: int, file: Path) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (4).

    Raises:
        SetupError: a kind of scaling that is not supported, or one that lacks a field.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in KINDS:
        raise SetupError(
            f"{file}: RoPE scaling {kind!r} is not supported: choose {', '.join(KINDS)}"
        )
    _refuse_variants(given, config, file)
    theta = given.get("rope_theta") or config.get("rope_theta") or 10_000.0
    if kind == "default":
        return RopeConfig(theta=float(theta))
    required = {"llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ("factor",))
    for name in required:
        if not isinstance(given.get(name), (int, float)):
            raise SetupError(f"{file}: {kind} RoPE scaling needs {name}, a number")
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(given["factor"]),
        original_max_position=int(given.get("original_max_position_embeddings") or max_position),
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        attention_factor=given.get("attention_factor"),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
    )


def _refuse_variants(given: dict[str, Any], config: dict[str, Any], file: Path) -> None:
    """Fields that would change the numbers and that no code here reads."""
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise SetupError(f"{file}: partial_rotary_factor {partial} is not supported: only 1.0 is")
    for name in ("mscale", "mscale_all_dim", "mrope_section"):
        if given.get(name):
            raise SetupError(f"{file}: RoPE scaling with {name} is not supported: remove it")
