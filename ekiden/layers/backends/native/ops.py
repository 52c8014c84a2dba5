"""The native kernels as ``ekiden.layers.ops.Ops``: on CPUs that have what they need.

What lies between operations comes from an arena. A recording has an arena of its own, since its
addresses are used again at every replay, whatever else has been computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ekiden.core.errors import InvariantBroken
from ekiden.layers import width_norm
from ekiden.layers.backends.native import operations, packed
from ekiden.layers.backends.native.arena import Arena
from ekiden.layers.backends.native.build import NativeUnavailable
from ekiden.layers.backends.native.cores import Seat
from ekiden.layers.backends.native.library import DTYPES, Op, Pool
from ekiden.layers.backends.native.tape import Outputs, Tape, run
from ekiden.layers.batch import ForwardBatch
from ekiden.layers.ops import AttentionKind, HeadShape, Linear, WidthNorm
from ekiden.layers.rope import Rotation
from ekiden.layers.weights import DenseWeight, GroupedWeight, LinearWeight
from ekiden.parallel.communicator import Communicator, SharedSums

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_RECORDED_ROWS = 256
"""Larger decode steps hide the calls of Python behind their work."""


class NativeOps:
    """Implements ``ekiden.layers.ops.Ops`` for one dtype of activations, on one thread's behalf."""

    name = "native"

    def __init__(self, dtype: torch.dtype, threads: int, seat: Seat | None = None) -> None:
        """Raises NativeUnavailable where the kernels cannot be had, or not for ``dtype``."""
        if dtype not in DTYPES:
            raise NativeUnavailable(f"they compute in float32 and bfloat16, not {dtype}")
        self.dtype = dtype
        self.pool = Pool(threads, seat=seat)
        self._eager = Arena()
        self._between = Arena()
        self._tape: Tape | None = None

    def linear(
        self, weight: LinearWeight, bias: Tensor | None, *, float_out: bool = False
    ) -> Linear:
        out = torch.float32 if float_out else self.dtype
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        if isinstance(weight, DenseWeight):
            return DenseLinear(self, weight, bias, out)
        return GroupedLinear(self, weight, bias, out)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = self.empty(x.shape, x.dtype)
        rows, out_rows = _rows(x), out.view(-1, x.shape[-1])
        self.do(operations.norm(rows, weight, eps, out_rows))
        return out

    def add_norm(
        self, residual_TC: Tensor, x_TC: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out_TC = self.empty(x_TC.shape, x_TC.dtype)
        self.do(operations.add_norm(_rows(residual_TC), _rows(x_TC), weight, eps, out_TC))
        return out_TC, residual_TC

    def add(self, residual_TC: Tensor, x_TC: Tensor) -> Tensor:
        self.call(lambda: _add_into(residual_TC, x_TC))
        return residual_TC

    def width_norm(self, qkv_TE: Tensor, norm: WidthNorm, tp: Communicator) -> Tensor:
        if tp.size > 1:
            return self._width_norm_of_ranks(qkv_TE, norm, tp)
        q_TQ, k_TW, _ = width_norm.parts(qkv_TE, norm)
        self.do(operations.norm(q_TQ, norm.q_weight_Q, norm.eps, q_TQ))
        self.do(operations.norm(k_TW, norm.k_weight_W, norm.eps, k_TW))
        return qkv_TE

    def _width_norm_of_ranks(self, qkv_TE: Tensor, norm: WidthNorm, tp: Communicator) -> Tensor:
        squares_T2 = self.empty((len(qkv_TE), 2), torch.float32)
        self.call(lambda: _copy_into(squares_T2, width_norm.squares(qkv_TE, norm)))
        total_T2 = self.all_reduce(squares_T2, tp)
        self.call(lambda: _copy_into(qkv_TE, width_norm.scale(qkv_TE, total_T2, norm)))
        return qkv_TE

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        out_TI = self.empty((len(gate_up), gate_up.shape[1] // 2), gate_up.dtype)
        self.do(operations.gated(_rows(gate_up), activation, out_TI))
        return out_TI

    def rotate_and_store(
        self,
        qkv_TE: Tensor,
        shape: HeadShape,
        rotation: Rotation,
        cache: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        q_TND = self.empty((len(qkv_TE), shape.num_q, shape.head_dim), qkv_TE.dtype)
        qkv_TE = _rows(qkv_TE)
        self.do(operations.rotate_and_store(qkv_TE, shape, rotation, cache, batch, q_TND))
        return q_TND

    def attend(
        self, q_TND: Tensor, cache: Tensor, layer: int, batch: ForwardBatch, kind: AttentionKind
    ) -> Tensor:
        out_TND = self.empty(q_TND.shape, q_TND.dtype)
        self.do(operations.attend(q_TND, cache, layer, batch, kind, out_TND))
        return out_TND

    def embed(self, tokens_T: Tensor, table_VC: Tensor, first: int, scale: float = 1.0) -> Tensor:
        out_TC = self.empty((len(tokens_T), table_VC.shape[1]), table_VC.dtype)
        self.do(operations.embed(tokens_T, table_VC, first, scale, out_TC))
        return out_TC

    def all_reduce(self, x: Tensor, tp: Communicator) -> Tensor:
        if tp.size == 1:
            return x
        sums = tp.shared_sums() if x.dtype in DTYPES else None
        if sums is not None:
            self.do(operations.all_reduce(x, tp.rank, sums), sums)
        elif self._tape is None:
            return tp.all_reduce(x)
        else:
            self._tape.call(lambda: _sum_into(x, tp))
        return x

    def bucket(self, rows: int) -> int:
        """Every number of rows has a tape of its own: padding costs more than recording does."""
        return rows if rows <= MAX_RECORDED_ROWS else 0

    def record(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """As ``Ops.record``, but nothing is computed before the first replay."""
        if self._tape is not None:
            raise InvariantBroken("a step is recorded inside of another")
        tape = self._tape = Tape(self.pool)
        try:
            outputs = run()
        finally:
            self._tape = None
        return tape.finish(outputs, run)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised; its memory is used again when nobody shows it any more."""
        arena = self._eager if self._tape is None else self._between
        return arena.empty(shape, dtype)

    def do(self, op: Op, sums: SharedSums | None = None) -> None:
        """Run one operation, or record it. ``sums`` is the group of an all-reduce."""
        if self._tape is not None:
            self._tape.add(op, sums)
        else:
            run(self.pool, (Op * 1)(op), () if sums is None else (sums,))

    def call(self, function: Callable[[], None]) -> None:
        """Run what no kernel does, or record it."""
        if self._tape is not None:
            self._tape.call(function)
        else:
            function()


class DenseLinear:
    """[T, in] to [T, out] by a packed matrix of floats."""

    def __init__(
        self, ops: NativeOps, weight: DenseWeight, bias: Tensor | None, out: torch.dtype
    ) -> None:
        self.ops, self.bias, self.out = ops, bias, out
        self.packed = packed.pack_dense(
            weight.values, weight.scale, dtype=ops.dtype, threads=ops.pool.threads
        )

    def __call__(self, x_TI: Tensor) -> Tensor:
        out_TO = self.ops.empty((len(x_TI), self.packed.outputs), self.out)
        self.ops.do(packed.linear_op(self.packed, x_TI, out_TO, self.bias))
        return out_TO


class GroupedLinear:
    """[T, in] to [T, out] by a packed matrix of small whole numbers."""

    def __init__(
        self, ops: NativeOps, weight: GroupedWeight, bias: Tensor | None, out: torch.dtype
    ) -> None:
        self.ops, self.bias, self.out, self.order = ops, bias, out, weight.order
        inputs, groups = weight.shape[1], weight.scales.shape[1]
        centred = bool((weight.zeros == 2 ** (weight.bits - 1)).all())
        self.packed = packed.pack_quantised(
            weight.values,
            weight.scales,
            None if centred else weight.zeros,
            bits=weight.bits,
            # One group may be of any size; the kernel's are of some.
            group_size=weight.group_size if groups > 1 else max(inputs, packed.MAX_GROUP),
        )

    def __call__(self, x_TI: Tensor) -> Tensor:
        x_TI = self._ordered(x_TI)
        out_TO = self.ops.empty((len(x_TI), self.packed.outputs), self.out)
        self.ops.do(packed.quantised_linear_op(self.packed, x_TI, out_TO, self.bias))
        return out_TO

    def _ordered(self, x_TI: Tensor) -> Tensor:
        order = self.order
        if order is None:
            return x_TI
        sorted_TI = self.ops.empty(x_TI.shape, x_TI.dtype)
        self.ops.call(lambda: _select_into(sorted_TI, x_TI, order))
        return sorted_TI


def _rows(x: Tensor) -> Tensor:
    """``x [..., C]`` as rows whose elements lie side by side, the same memory.

    Raises:
        ValueError: it does not lie so: a copy made now would not follow it at a replay.
    """
    if x.stride(-1) == 1 and (x.dim() == 2 or x.is_contiguous()):
        return x if x.dim() == 2 else x.view(-1, x.shape[-1])
    raise ValueError(f"rows of {list(x.shape)} with strides {list(x.stride())} do not lie in rows")


def _add_into(total: Tensor, x: Tensor) -> None:
    total += x


def _copy_into(out: Tensor, x: Tensor) -> None:
    out.copy_(x)


def _sum_into(x: Tensor, tp: Communicator) -> None:
    total = tp.all_reduce(x)
    if total is not x:
        x.copy_(total)


def _select_into(out: Tensor, x: Tensor, order: Tensor) -> None:
    torch.index_select(x, 1, order, out=out)
