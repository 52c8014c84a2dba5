"""The CUDA path behind the one seam: Triton kernels, cuBLAS for float matrices, CUDA graphs.

Shapes: T tokens, C hidden size, N query heads, K KV heads, D head dim, I inner width, V rows of a
table, E = (N + 2 K) * D; all of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ekiden.layers import width_norm
from ekiden.layers.backends.triton import embed, gated, graphs, kv, norm, rope
from ekiden.layers.backends.triton.decode import decode_attention
from ekiden.layers.backends.triton.linear import make_linear
from ekiden.layers.backends.triton.prefill import prefill_attention
from ekiden.layers.batch import ForwardBatch
from ekiden.layers.ops import AttentionKind, HeadShape, Linear, WidthNorm
from ekiden.layers.rope import Rotation
from ekiden.layers.weights import LinearWeight
from ekiden.parallel.communicator import Communicator


class TritonOps:
    """Implements ``ekiden.layers.ops.Ops`` on one CUDA device, or interpreted on the CPU."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        """Makes ``device`` the thread's current one: Triton launches there."""
        self._graphs = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._graphs = graphs.Graphs(device)

    def linear(
        self, weight: LinearWeight, bias: Tensor | None, *, float_out: bool = False
    ) -> Linear:
        return make_linear(weight, bias, float_out=float_out)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_norm(
        self, residual_TC: Tensor, x_TC: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x_TC, residual_TC, weight, eps)

    def add(self, residual_TC: Tensor, x_TC: Tensor) -> Tensor:
        return residual_TC + x_TC

    def width_norm(self, qkv_TE: Tensor, norm: WidthNorm, tp: Communicator) -> Tensor:
        squares_T2 = self.all_reduce(width_norm.squares(qkv_TE, norm), tp)
        return width_norm.scale(qkv_TE, squares_T2, norm)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        return gated.gated(gate_up, activation)

    def rotate_and_store(
        self,
        qkv_TE: Tensor,
        shape: HeadShape,
        rotation: Rotation,
        cache: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        q_TND = qkv_TE.new_empty((len(qkv_TE), shape.num_q, shape.head_dim))
        q_weight, k_weight, eps = shape.norm or (None, None, 0.0)
        rope.rotate_and_store(
            qkv_TE,
            *rotation,
            batch.slots_T,
            kv.layer_view(cache, shape.layer),
            q_TND,
            q_weight_D=q_weight,
            k_weight_D=k_weight,
            eps=eps,
        )
        return q_TND

    def attend(
        self, q_TND: Tensor, cache: Tensor, layer: int, batch: ForwardBatch, kind: AttentionKind
    ) -> Tensor:
        """Rows that are alone in their sequence go to the decode kernel, others to prefill's."""
        view, out_TND = kv.layer_view(cache, layer), torch.empty_like(q_TND)
        inputs = (q_TND, view, batch.block_tables_SM, batch.kv_lengths_S)
        starts_S1 = batch.query_starts_S1
        if len(q_TND) == len(batch.kv_lengths):
            decode_attention(*inputs, out_TND, kind)
            return out_TND
        counts = [stop - start for start, stop in pairwise(batch.query_starts)]
        mixed = min(counts) == 1
        if mixed:
            decode_attention(*inputs, out_TND, kind, query_starts=starts_S1)
        prefill_attention(
            *inputs, starts_S1, out_TND, kind, longest_query=max(counts), skip_single=mixed
        )
        return out_TND

    def embed(self, tokens_T: Tensor, table_VC: Tensor, first: int, scale: float = 1.0) -> Tensor:
        return embed.embed(tokens_T, table_VC, first, scale)

    def all_reduce(self, x: Tensor, tp: Communicator) -> Tensor:
        return tp.all_reduce(x) if self._graphs is None else self._graphs.all_reduce(x, tp)

    def bucket(self, rows: int) -> int:
        return graphs.bucket_of(rows)

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        if self._graphs is not None:
            return self._graphs.record(run)
        run()  # interpreted: the padded rows and fixed inputs of a graph, without one
        return run
