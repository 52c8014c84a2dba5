"""Every op of the seam on the Triton kernels beside plain torch, over random inputs.

Used by the unit tests (interpreted) and by tests/gpu (on a card).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ekiden.cache.layout import SCALE_BYTES
from ekiden.cache.scaled import LARGEST
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.backends.triton.ops import TritonOps
from ekiden.layers.batch import ForwardBatch, Span
from ekiden.layers.ops import AttentionKind, HeadNorm, HeadShape, Ops, WidthNorm
from ekiden.layers.quantised import quantise, quantise_e4m3
from ekiden.layers.rope import Rope
from ekiden.layers.weights import DenseWeight, LinearWeight
from ekiden.parallel.local import local_meshes

Differences = Iterator[tuple[str, float]]
"""What was compared, and the largest difference over the bound: right below 1."""

BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Absolute and relative, of numbers around 1."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    lengths: tuple[int, ...]
    """Of the sequences whose prompts are computed, and then a token of each."""
    rows: int
    """Of a large product; the others have 1 and 5."""


TINY = Sizes(
    heads=6, kv_heads=2, head_dim=16, hidden=64, inner=40, vocab=50, lengths=(21, 5, 1, 34), rows=40
)
LARGE = Sizes(
    heads=32, kv_heads=8, head_dim=128, hidden=2048, inner=5632, vocab=32000,
    lengths=(1000, 77, 1, 2500, 512, 16), rows=500,
)  # fmt: skip


def compare(
    device: str, dtype: torch.dtype, sizes: Sizes, kv_dtype: torch.dtype | None = None
) -> Differences:
    """All ops; ``kv_dtype`` (int8 or float8_e4m3fn) quantises the cache."""
    where, inputs = torch.device(device), Inputs(device, dtype)
    theirs, ours = TorchOps(), TritonOps(where)
    yield from _simple(theirs, ours, inputs, sizes)
    yield from _linears(theirs, ours, inputs, sizes)
    for normed, window, cap in ((False, 0, 0.0), (True, 30, 0.0), (False, 0, 5.0)):
        kind = AttentionKind(sizes.head_dim**-0.5, window, cap)
        yield from _attention(theirs, ours, inputs, sizes, kind, normed, kv_dtype)


class Inputs:
    """Random tensors of one dtype on one device, always the same ones."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(1)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.device, dtype or self.dtype)

    def difference(self, ours: Tensor, theirs: Tensor) -> float:
        assert ours.dtype == theirs.dtype, f"{ours.dtype} is not {theirs.dtype}"
        bound = BOUNDS[self.dtype] * (1 + theirs.float().abs())
        return float(((ours.float() - theirs.float()).abs() / bound).nan_to_num(1e9).max())


def _simple(theirs: Ops, ours: Ops, inputs: Inputs, sizes: Sizes) -> Differences:
    x, residual = inputs(7, sizes.hidden), inputs(7, sizes.hidden)
    weight = inputs(sizes.hidden, dtype=torch.float32)
    gate_up, table = inputs(7, 2 * sizes.inner), inputs(sizes.vocab, sizes.hidden)
    qkv, one = inputs(7, 3 * sizes.hidden), local_meshes(1, 1)[0].tp
    wide = WidthNorm(weight, weight, (sizes.hidden, sizes.hidden), True, 1e-5)
    tokens = torch.tensor([3, 9, 0, sizes.vocab - 1, 12], device=inputs.device)
    calls: dict[str, Callable[[Ops], Tensor]] = {
        "norm": lambda ops: ops.norm(x, weight, 1e-5),
        "add_norm": lambda ops: torch.cat(ops.add_norm(residual.clone(), x, weight, 1e-5)),
        "add": lambda ops: ops.add(residual.clone(), x),
        "width norm": lambda ops: ops.width_norm(qkv.clone(), wide, one),
        "silu gate": lambda ops: ops.gated(gate_up, "silu"),
        "gelu gate": lambda ops: ops.gated(gate_up, "gelu_tanh"),
        "embed": lambda ops: ops.embed(tokens, table, 0),
        "embed a shard, scaled": lambda ops: ops.embed(tokens, table[:9].contiguous(), 4, 8.0),
    }
    for name, call in calls.items():
        yield name, inputs.difference(call(ours), call(theirs))


def _linears(theirs: Ops, ours: Ops, inputs: Inputs, sizes: Sizes) -> Differences:
    matrix = inputs(sizes.inner, sizes.hidden, dtype=torch.float32) * sizes.hidden**-0.5
    group = min(128, sizes.hidden)
    weights: dict[str, LinearWeight] = {
        "linear": DenseWeight(values=matrix.to(inputs.dtype)),
        "int8 linear": quantise(matrix, 8, group),
        "int4 linear": quantise(matrix, 4, group),
        "fp8 linear": quantise_e4m3(matrix),
    }
    for name, weight in weights.items():
        for rows, float_out in ((1, True), (5, False), (sizes.rows, False)):
            x, bias = inputs(rows, sizes.hidden), inputs(sizes.inner)
            out, expected = (
                ops.linear(weight, bias, float_out=float_out)(x) for ops in (ours, theirs)
            )
            yield f"{name}, {rows} rows", inputs.difference(out, expected)


def _attention(
    theirs: Ops,
    ours: Ops,
    inputs: Inputs,
    sizes: Sizes,
    kind: AttentionKind,
    normed: bool,
    kv_dtype: torch.dtype | None,
) -> Differences:
    """Prompts in one step, then one step that mixes a chunk with decode rows, then decode alone."""
    norm = None
    if normed:
        weights = [1 + inputs(sizes.head_dim, dtype=torch.float32) / 4 for _ in range(2)]
        norm = HeadNorm(weights[0], weights[1], 1e-6)
    shape = HeadShape(sizes.heads, sizes.kv_heads, sizes.head_dim, 1, norm)
    steps, blocks = _steps(sizes.lengths)
    row = sizes.head_dim + (SCALE_BYTES if kv_dtype in LARGEST else 0)
    empty = torch.zeros(blocks, sizes.kv_heads, 2, 2, 16, row, device=inputs.device)
    caches = [empty.to(kv_dtype or inputs.dtype) for _ in range(2)]
    for step, spans in steps.items():
        batch = ForwardBatch.build(spans, 16, inputs.device)
        qkv = inputs(len(batch.tokens_T), (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim)
        rotation = _rope(sizes.head_dim, inputs.device).rotation(batch.positions_T)
        queries = [
            ops.rotate_and_store(qkv, shape, rotation, cache, batch)
            for ops, cache in zip((ours, theirs), caches, strict=True)
        ]
        yield f"{step}: rotated queries", inputs.difference(*queries)
        yield f"{step}: cache", _cache_difference(inputs, *caches)
        caches[0].copy_(caches[1])
        out, expected = (
            ops.attend(queries[1], caches[1], 1, batch, kind) for ops in (ours, theirs)
        )
        what = f"{step}: attention, window {kind.window}, cap {kind.soft_cap:g}"
        yield what, inputs.difference(out, expected)


def _steps(lengths: tuple[int, ...]) -> tuple[dict[str, list[Span]], int]:
    """Three steps over the same sequences, and how many blocks they take."""
    widths = [length // 16 + 2 for length in lengths]
    ids = list(range(sum(widths) + 1))
    random.Random(2).shuffle(ids)
    tables = [[ids.pop() for _ in range(width)] for width in widths]
    prompts = [Span([1] * n, 0, table, 1) for n, table in zip(lengths, tables, strict=True)]
    one_more = [Span([1], n, table, 1) for n, table in zip(lengths, tables, strict=True)]
    mixed = [prompts[0], *one_more[1:]]
    steps = {"prefill": prompts, "chunk and decode": mixed, "decode": one_more}
    return steps, sum(widths) + 1


def _rope(head_dim: int, device: str) -> Rope:
    places = torch.arange(head_dim // 2, device=device) / (head_dim // 2)
    return Rope(1e4**-places)


def _cache_difference(inputs: Inputs, ours: Tensor, theirs: Tensor) -> float:
    """Of a plain cache as of any result; of a quantised one the share of bytes that differ, over
    a thousandth: where a sum was rounded otherwise, a byte may be its neighbour."""
    if ours.dtype not in LARGEST:
        return inputs.difference(ours, theirs)
    return float((ours.view(torch.uint8) != theirs.view(torch.uint8)).float().mean()) / 1e-3
