"""The rotary embedding as ``config.json`` describes it, in its old and its new form. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
_OLD_NAMES = {"su": "longrope"}


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of every head. Only the fields of its ``kind`` mean anything."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """What YaRN and LongRoPE multiply cos and sin by; None takes what their papers say."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rotated: float = 1.0
    """Share of a head's dims that is rotated, the first ones."""
    short_factors: tuple[float, ...] = ()
    """LongRoPE: what each wave is slowed by, up to the original length."""
    long_factors: tuple[float, ...] = ()
    """LongRoPE: the same beyond it."""

    def is_long(self, max_model_len: int) -> bool:
        """Whether a replica that serves ``max_model_len`` takes the long factors (LongRoPE).

        One choice for all of its sequences, as in vLLM: KV that was computed under the other
        factors would be wrong.
        """
        return self.kind == "longrope" and max_model_len > self.original_max_position

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


def parse_ropes(
    config: dict[str, Any], max_position: int, file: Path
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of all layers; or of full and of windowed layers (Gemma 3).

    Read from ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (4).

    Raises:
        SetupError: a kind of scaling that is not supported, or one that lacks a field.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("model_type") != "gemma3_text":
        theta = given.get("rope_theta") or config.get("rope_theta") or 10_000.0
        return _parse(given, theta, config, max_position, file), None
    by_kind = config.get("rope_parameters") or {}
    full = by_kind.get("full_attention") or config.get("rope_scaling") or {}
    sliding = by_kind.get("sliding_attention") or {}
    theta = full.get("rope_theta") or config.get("rope_theta") or 1_000_000.0
    local = sliding.get("rope_theta") or config.get("rope_local_base_freq") or 10_000.0
    return (
        _parse(full, theta, config, max_position, file),
        _parse(sliding, local, config, max_position, file),
    )


def _parse(
    given: dict[str, Any], theta: float, config: dict[str, Any], max_position: int, file: Path
) -> RopeConfig:
    kind = _kind(given, config, file)
    partial = _refuse_variants(given, config, file)
    if kind == "default":
        return RopeConfig(theta=float(theta), rotated=partial)
    original = given.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    if kind == "longrope":
        return _longrope(
            given, float(theta), partial, int(original or max_position), max_position, file
        )
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


def _kind(given: dict[str, Any], config: dict[str, Any], file: Path) -> str:
    named = given.get("rope_type") or given.get("type") or "default"
    kind = _OLD_NAMES.get(named, named)
    if config.get("model_type") == "phi3" and kind == "yarn":
        kind = "longrope"  # early Phi-3 files call it so
    if kind not in KINDS:
        raise SetupError(
            f"{file}: RoPE scaling {named!r} is not supported: choose {', '.join(KINDS)}"
        )
    return kind


def _longrope(
    given: dict[str, Any],
    theta: float,
    partial: float,
    original: int,
    max_position: int,
    file: Path,
) -> RopeConfig:
    """LongRoPE (arXiv:2402.13753)."""
    for name in ("short_factor", "long_factor"):
        values = given.get(name)
        if not isinstance(values, list) or not all(isinstance(v, (int, float)) for v in values):
            raise SetupError(f"{file}: longrope RoPE scaling needs {name}, a list of numbers")
    return RopeConfig(
        theta=theta,
        kind="longrope",
        factor=float(given.get("factor") or max_position / original),
        original_max_position=original,
        attention_factor=given.get("attention_factor"),
        rotated=partial,
        short_factors=tuple(float(v) for v in given["short_factor"]),
        long_factors=tuple(float(v) for v in given["long_factor"]),
    )


def _refuse_variants(given: dict[str, Any], config: dict[str, Any], file: Path) -> float:
    """Refuse fields that would change the numbers and that no code here reads.

    Returns the share of a head that is rotated, which only Phi may choose.
    """
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and config.get("model_type") != "phi3":
        raise SetupError(f"{file}: partial_rotary_factor {partial} is not supported: only 1.0 is")
    for name in ("mscale", "mscale_all_dim", "mrope_section"):
        if given.get(name):
            raise SetupError(f"{file}: RoPE scaling with {name} is not supported: remove it")
    return float(partial)
