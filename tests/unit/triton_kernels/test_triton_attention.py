"""Paged attention on the device equals a slow reference, whatever lies in the blocks."""

from __future__ import annotations

import torch
from attention_cases import PagedCase, attention_reference, paged_case
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.layers.backends.triton import kv
from ekiden.layers.backends.triton.decode import decode_attention
from ekiden.layers.backends.triton.prefill import prefill_attention
from ekiden.layers.ops import AttentionKind

SHAPES = {
    "kv_heads": st.integers(1, 2),
    "group": st.sampled_from([1, 3, 4]),
    "head_dim": st.sampled_from([16, 24]),
    "block_size": st.sampled_from([4, 16]),
    "window": st.sampled_from([0, 1, 17, 70]),
    "softcap": st.sampled_from([0.0, 5.0]),
}


def decode(case: PagedCase, kind: AttentionKind, *, parts: int = 0) -> Tensor:
    out = torch.full_like(case.q_TND, 7.0)
    view = kv.layer_view(case.cache, case.layer)
    decode_attention(case.q_TND, view, case.table_SM, case.lengths_S, out, kind, parts=parts)
    return out


def prefill(case: PagedCase, kind: AttentionKind, *, longest: int) -> Tensor:
    out = torch.full_like(case.q_TND, 7.0)
    prefill_attention(
        case.q_TND, kv.layer_view(case.cache, case.layer), case.table_SM, case.lengths_S,
        case.query_starts, out, kind, longest_query=longest,
    )  # fmt: skip
    return out


@settings(max_examples=8, deadline=None)
@example(
    lengths=[200, 0, 64], parts=3, kv_heads=2, group=3, head_dim=24, block_size=16, window=0,
    softcap=0.0,
)  # fmt: skip
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    parts=st.sampled_from([1, 2, 5]),
    **SHAPES,
)
def test_decode_attention_equals_the_reference(
    device: str, lengths: list[int], parts: int, window: int, softcap: float, **shape: int
) -> None:
    case = paged_case(
        [(length, 1) for length in lengths], dtype=torch.float32, device=device, **shape
    )
    kind = AttentionKind(0.3, window, softcap)
    out, expected = decode(case, kind, parts=parts), attention_reference(case, kind)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-5, atol=2e-5)


@settings(max_examples=8, deadline=None)
@example(
    lengths=[(70, 20), (0, 40), (30, 1)], kv_heads=2, group=3, head_dim=16, block_size=16,
    window=17, softcap=0.0,
)  # fmt: skip
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 80), st.sampled_from([1, 2, 13, 40])), min_size=1, max_size=3
    ),
    **SHAPES,
)
def test_prefill_attention_equals_the_reference(
    device: str, lengths: list[tuple[int, int]], window: int, softcap: float, **shape: int
) -> None:
    case = paged_case(lengths, dtype=torch.float32, device=device, **shape)
    longest = max(new for _, new in lengths)
    kind = AttentionKind(0.3, window, softcap)
    out, expected = prefill(case, kind, longest=longest), attention_reference(case, kind)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-5, atol=2e-5)


def test_a_row_without_keys_is_zero(device: str) -> None:
    """The rows that pad a recorded step have the length 0."""
    case = paged_case(
        [(40, 1), (3, 1)], kv_heads=1, group=2, head_dim=16, block_size=16,
        dtype=torch.float32, device=device,
    )  # fmt: skip
    case.lengths_S[1] = 0
    for parts in (1, 2):
        out = decode(case, AttentionKind(1.0), parts=parts)
        assert (out[1] == 0).all()
        assert out[0].isfinite().all()
