"""The kernels of one kind of device, behind one signature: what layers compute with.

``backends.torch_ops`` is the reference (plain torch, any device), ``backends.native`` the fast path
of CPUs, ``backends.triton`` that of CUDA. All give the same results within rounding.

Shapes: T tokens, C hidden size, N query heads, K KV heads, D head dim, R rotated dims (R <= D),
E = (N + 2 K) * D, I inner width, V rows of a table; all of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from ekiden.layers.batch import ForwardBatch
from ekiden.layers.rope import Rotation
from ekiden.layers.weights import LinearWeight
from ekiden.parallel.communicator import Communicator

Linear = Callable[[Tensor], Tensor]
"""[T, in] to [T, out], in the input's dtype unless made with ``float_out``."""


class HeadNorm(NamedTuple):
    """RMSNorm over every head of q and of k before they are rotated; weights float32 [D]."""

    q_weight_D: Tensor
    k_weight_D: Tensor
    eps: float


class WidthNorm(NamedTuple):
    """RMSNorm over the whole width of q and over that of k, all ranks' heads together (OLMo 2)."""

    q_weight_Q: Tensor
    """float32, this rank's part."""
    k_weight_W: Tensor
    widths: tuple[int, int]
    """Of q and of k, over all ranks."""
    counts_k: bool
    """No rank before this one has its KV heads, so their squares are added here."""
    eps: float


class HeadShape(NamedTuple):
    """The heads of one rank's attention layer, and its place in the rank's cache."""

    num_q: int
    num_kv: int
    head_dim: int
    layer: int
    norm: HeadNorm | None


class AttentionKind(NamedTuple):
    """How scores become weights: ``softmax(soft_cap * tanh(scale * q k / soft_cap))``."""

    scale: float
    window: int = 0
    """Last positions that a token sees, itself included; 0 for all."""
    soft_cap: float = 0.0
    """0 for none."""


class Ops(Protocol):
    """Tensors in, tensors out; arithmetic inside is float32 unless said otherwise."""

    name: str

    def linear(
        self, weight: LinearWeight, bias: Tensor | None, *, float_out: bool = False
    ) -> Linear:
        """Make ready (pack, move) one matrix. ``bias`` is [out] in any dtype.

        ``float_out`` gives float32, for logits.
        """

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension of ``x [..., C]``; ``weight`` float32 [C]."""

    def add_norm(
        self, residual_TC: Tensor, x_TC: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum), where sum = residual + x rounded to their dtype.

        ``residual_TC`` may be overwritten with the sum.
        """

    def add(self, residual_TC: Tensor, x_TC: Tensor) -> Tensor:
        """``residual_TC + x_TC``; the first may be overwritten."""

    def width_norm(self, qkv_TE: Tensor, norm: WidthNorm, tp: Communicator) -> Tensor:
        """[T, E] with q and k normed and v as it is; ``qkv_TE`` may be overwritten.

        Raises:
            ReplicaFailed: as ``tp.all_reduce``.
        """

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """``act(gate) * up`` of ``[T, 2 I]`` halves, as [T, I]; act is ``silu`` or ``gelu_tanh``.

        act(gate) is rounded to the dtype before it is multiplied.
        """

    def rotate_and_store(
        self,
        qkv_TE: Tensor,
        shape: HeadShape,
        rotation: Rotation,
        cache: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        """Norm and rotate q and k, write k and v into the cache's slots, return q [T, N, D].

        Only the first R dims of a head are rotated. A negative slot is not written.
        """

    def attend(
        self, q_TND: Tensor, cache: Tensor, layer: int, batch: ForwardBatch, kind: AttentionKind
    ) -> Tensor:
        """Softmax attention of every row over its own sequence's cache, [T, N, D].

        ``cache [blocks, K, layers, 2, block_size, row]`` already holds this step's keys and
        values. A block may hold anything, NaN too, beyond its sequence's end.
        """

    def embed(self, tokens_T: Tensor, table_VC: Tensor, first: int, scale: float = 1.0) -> Tensor:
        """Rows ``tokens - first`` of the table times ``scale``; zeros for tokens elsewhere."""

    def all_reduce(self, x: Tensor, tp: Communicator) -> Tensor:
        """``tp.all_reduce(x)``, in a form that a recording can hold.

        Raises:
            ReplicaFailed: as ``tp.all_reduce``.
        """

    def bucket(self, rows: int) -> int:
        """Rows (>= ``rows``) with which to record a decode step of ``rows``; 0: do not record."""

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        """Run a step once and give back what runs it again on the same memory.

        ``run`` may call nothing but these ops. What it reads (inputs, weights, cache) must stay
        where it is, and is read anew at each replay; the tensors that come back are overwritten by
        the next replay of any recording of these ops, which share the memory of what lies between.
        """
