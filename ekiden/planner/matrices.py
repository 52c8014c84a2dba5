"""Matrices that know how tensor parallelism cuts them.

A matrix has ``rows`` outputs and ``cols`` inputs, as torch's ``Linear.weight``; a vector has one
column. Everything else here counts elements, in no unit of bytes.
"""

from __future__ import annotations

import msgspec

WHOLE, HEADS, KV_HEADS, INNER, VOCAB = "whole", "heads", "kv_heads", "inner", "vocab"
"""How a matrix is cut over TP ranks: not at all, by query heads, by KV heads, evenly along the
inner width of an MLP, evenly along the vocabulary."""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """``copies`` tensors of [rows, cols] that are stored and cut alike."""

    name: str
    part: str
    """``attention``, ``mlp``, ``shared``, ``expert``, ``router``, ``norm``, ``bias``, ``embedding``
    or ``head``: formats of weights choose by it what they make small."""
    rows: int
    cols: int = 1
    copies: int = 1
    """Experts of a MoE layer; 1 elsewhere."""
    cut: str = WHOLE
    axis: int = 0
    """0: rows are cut, 1: columns."""

    @property
    def elements(self) -> int:
        return self.copies * self.rows * self.cols


def column(
    name: str, part: str, rows: int, cols: int, cut: str, *, bias: bool = False
) -> list[Matrix]:
    """Outputs cut, and their bias with them."""
    weight = Matrix(name=name, part=part, rows=rows, cols=cols, cut=cut)
    return [weight, Matrix(name=f"{name}.bias", part="bias", rows=rows, cut=cut)][: 1 + bias]


def row(
    name: str, part: str, rows: int, cols: int, cut: str, *, bias: bool = False
) -> list[Matrix]:
    """Inputs cut; the bias is added once, after the sum, and each rank has room for all of it."""
    weight = Matrix(name=name, part=part, rows=rows, cols=cols, cut=cut, axis=1)
    return [weight, Matrix(name=f"{name}.bias", part="bias", rows=rows)][: 1 + bias]


def whole(name: str, part: str, rows: int, cols: int = 1) -> Matrix:
    """The same on every rank."""
    return Matrix(name=name, part=part, rows=rows, cols=cols)
