"""Attention of decode rows over the paged cache, the keys of a sequence split over programs.

After flash decoding (split-K): each program takes one sequence, one KV head and one part of the
keys; the query heads that share the KV head are the rows of one matrix product (grouped-query
attention, arXiv:2305.13245). A second kernel joins the parts by their log-sum-exp.

Shapes: S sequences, T rows, N query heads, K KV heads, H = N / K, D head dim, B block size,
M blocks of a table, P parts. All of this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ekiden.layers.backends.triton import kv
from ekiden.layers.backends.triton.softmax import attend_range
from ekiden.layers.ops import AttentionKind

_KEYS = 64
"""Keys of one turn of the loop."""
_MAX_PARTS = 64
_LEAST_KEYS = 256
"""Keys that are worth a program of their own."""


def decode_attention(
    q_TND: Tensor, view: Tensor, table_SM: Tensor, lengths_S: Tensor, out_TND: Tensor,
    kind: AttentionKind, *, query_starts: Tensor | None = None, parts: int = 0,
) -> None:  # fmt: skip
    """Attend every sequence's one query over its keys; writes ``out_TND``.

    ``view [blocks, K, 2, B, row]`` is one layer of the cache (``kv.layer_view``) and already holds
    this step's keys. ``table_SM`` and ``lengths_S`` are int32 or int64; a length of 0 (a padded
    row) gives zeros. Row s belongs to sequence s, or to ``query_starts[s]`` where that is given;
    then sequences of several queries are left alone. ``parts`` of 0 chooses.

    Raises:
        ValueError: a cache that does not hold rows of this head dim.
    """
    view, stored = kv.rows_of(view, q_TND.shape[2])
    sequences, kv_heads = table_SM.shape[0], view.shape[1]
    parts = parts or choose_parts(
        sequences * kv_heads, table_SM.shape[1] * view.shape[3], kind.window, q_TND.device
    )
    shape = (sequences, q_TND.shape[1], parts)
    part_out = (
        out_TND if parts == 1 else q_TND.new_empty((*shape, q_TND.shape[2]), dtype=torch.float32)
    )
    part_lse = part_out if parts == 1 else q_TND.new_empty(shape, dtype=torch.float32)
    _launch_parts(
        q_TND, view, table_SM, lengths_S, query_starts, out_TND, part_out, part_lse, kind, stored,
        parts,
    )  # fmt: skip
    if parts > 1:
        _launch_join(part_out, part_lse, query_starts, out_TND)


def choose_parts(programs: int, longest: int, window: int, device: torch.device) -> int:
    """Parts a sequence is split in: about two programs a multiprocessor, none with few keys.

    ``longest`` is what the block tables can hold, not what they do: the host may not know, and a
    recorded graph serves all lengths.
    """
    keys = min(longest, window) if window else longest
    wanted = -(-2 * multiprocessors(device) // max(programs, 1))
    useful = -(-keys // _LEAST_KEYS)
    return max(1, min(wanted, useful, _MAX_PARTS))


_multiprocessors: dict[int, int] = {}


def multiprocessors(device: torch.device) -> int:
    """Of the CUDA device; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    index = device.index or 0
    if index not in _multiprocessors:
        _multiprocessors[index] = torch.cuda.get_device_properties(index).multi_processor_count
    return _multiprocessors[index]


def _launch_parts(
    q_TND: Tensor, view: Tensor, table_SM: Tensor, lengths_S: Tensor, query_starts: Tensor | None,
    out_TND: Tensor, part_out: Tensor, part_lse: Tensor, kind: AttentionKind, stored: int,
    parts: int,
) -> None:  # fmt: skip
    _, heads, head_dim = q_TND.shape
    _, kv_heads, _, block_size, width = view.shape
    group = heads // kv_heads
    _decode_parts[(table_SM.shape[0], kv_heads, parts)](
        q_TND, view, table_SM, lengths_S, table_SM if query_starts is None else query_starts,
        out_TND, part_out, part_lse, q_TND.stride(0), q_TND.stride(1), out_TND.stride(0),
        out_TND.stride(1), view.stride(0), view.stride(1), table_SM.stride(0), kind.scale,
        kind.window, SOFTCAP=kind.soft_cap, RAGGED=query_starts is not None, STORED=stored,
        GROUP=group, GROUP_ROWS=max(16, triton.next_power_of_2(group)), HEADS=heads,
        HEAD_DIM=head_dim, DIMS=max(16, triton.next_power_of_2(head_dim)), WIDTH=width,
        BLOCK_SIZE=block_size, KEYS=_KEYS, PARTS=parts, EXACT=q_TND.dtype == torch.float32,
        num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _decode_parts(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, starts_ptr, out_ptr, part_ptr, lse_ptr, q_row, q_head,
    out_row, out_head, cache_block, cache_head, table_row, scale, window, SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = sequence
    if RAGGED:
        row = tl.load(starts_ptr + sequence)
        if tl.load(starts_ptr + sequence + 1) - row != 1:
            return
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    share = tl.cdiv(tl.cdiv(length - first, PARTS), KEYS) * KEYS
    begin = first + part * share
    end = tl.minimum(begin + share, length)

    group = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIMS)
    heads = kv_head * GROUP + group
    real = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_HD = tl.load(
        q_ptr + row.to(tl.int64) * q_row + heads[:, None] * q_head + dims[None, :],
        mask=real,
        other=0.0,
    )
    best, total, acc = attend_range(
        q_HD, cache_ptr + kv_head.to(tl.int64) * cache_head,
        table_ptr + sequence.to(tl.int64) * table_row, begin, end, cache_block,
        tl.full((GROUP_ROWS,), length - 1, tl.int32), scale, window, SOFTCAP, False, STORED,
        GROUP_ROWS, HEAD_DIM, DIMS, WIDTH, BLOCK_SIZE, KEYS, EXACT,
    )  # fmt: skip
    out_HD = tl.where((total > 0)[:, None], acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    if PARTS == 1:
        places = out_ptr + row.to(tl.int64) * out_row + heads[:, None] * out_head + dims[None, :]
        tl.store(places, out_HD.to(out_ptr.dtype.element_ty), mask=real)
    else:
        slots = (sequence.to(tl.int64) * HEADS + heads) * PARTS + part
        tl.store(part_ptr + slots[:, None] * HEAD_DIM + dims[None, :], out_HD, mask=real)
        lse_H = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + slots, lse_H, mask=group < GROUP)


def _launch_join(
    part_out: Tensor, part_lse: Tensor, query_starts: Tensor | None, out_TND: Tensor
) -> None:
    sequences, heads, parts, head_dim = part_out.shape
    _join_parts[(sequences, heads)](
        part_out, part_lse, part_lse if query_starts is None else query_starts, out_TND,
        out_TND.stride(0), out_TND.stride(1), RAGGED=query_starts is not None, HEADS=heads,
        HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim), PARTS=parts,
        PARTS_ROWS=triton.next_power_of_2(parts), num_warps=4 if parts * head_dim > 2048 else 2,
    )  # fmt: skip


@triton.jit
def _join_parts(
    part_ptr, lse_ptr, starts_ptr, out_ptr, out_row, out_head, RAGGED: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PARTS: tl.constexpr,
    PARTS_ROWS: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = sequence
    if RAGGED:
        row = tl.load(starts_ptr + sequence)
        if tl.load(starts_ptr + sequence + 1) - row != 1:
            return
    parts, dims = tl.arange(0, PARTS_ROWS), tl.arange(0, DIMS)
    slots = (sequence.to(tl.int64) * HEADS + head) * PARTS + parts
    lse_P = tl.load(lse_ptr + slots, mask=parts < PARTS, other=float("-inf"))
    best = tl.max(lse_P, axis=0)
    weights_P = tl.exp2(lse_P - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights_P, axis=0)
    values_PD = tl.load(
        part_ptr + slots[:, None] * HEAD_DIM + dims[None, :],
        mask=(parts < PARTS)[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    out_D = tl.sum(values_PD * weights_P[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    places = out_ptr + row.to(tl.int64) * out_row + head * out_head + dims
    tl.store(places, out_D.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
