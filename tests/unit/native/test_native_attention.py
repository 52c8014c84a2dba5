"""Native attention equals a slow reference, and a row's bits depend on its own sequence alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.layers.backends.native import operations
from ekiden.layers.backends.native.library import KernelFailed
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.batch import ForwardBatch
from ekiden.layers.ops import AttentionKind
from tests.unit.native.native_rig import LAYER, PagedBatch, needs_native, run

pytestmark = needs_native

# Decode rows and chunks; past 64 keys there are several tiles, past 512 several chunks of keys.
LENGTHS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 30, 63, 64, 200, 511, 512, 700]),
        st.sampled_from([1, 1, 1, 2, 5, 40]),
    ),
    min_size=1,
    max_size=5,
)
KINDS = st.builds(
    AttentionKind,
    scale=st.sampled_from([0.1, 0.3]),
    window=st.sampled_from([0, 0, 1, 5, 70, 550]),
    soft_cap=st.sampled_from([0.0, 0.0, 5.0]),
)


def attend(
    paged: PagedBatch,
    kind: AttentionKind,
    *,
    batch: ForwardBatch | None = None,
    q_TND: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    q_TND = paged.q_TND if q_TND is None else q_TND
    out = torch.full_like(q_TND, float("nan"))
    run(operations.attend(q_TND, paged.cache, LAYER, batch or paged.batch, kind, out), threads)
    return out


def reference(paged: PagedBatch, kind: AttentionKind) -> Tensor:
    """Every query of every sequence by itself, over whole scores, in float64."""
    rows = []
    queries = iter(paged.q_TND.double())
    for (cached, new), k, v in zip(paged.lengths, paged.k_LKD, paged.v_LKD, strict=True):
        group = paged.q_TND.shape[1] // k.shape[1]
        k_NLD, v_NLD = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        for position in range(cached, cached + new):
            first = max(0, position + 1 - kind.window) if kind.window else 0
            seen = slice(first, position + 1)
            scores_NL = (k_NLD[:, seen] @ next(queries)[:, :, None])[..., 0] * kind.scale
            if kind.soft_cap:
                scores_NL = (scores_NL / kind.soft_cap).tanh() * kind.soft_cap
            rows.append((scores_NL.softmax(-1)[:, None] @ v_NLD[:, seen])[:, 0])
    return torch.stack(rows)


@settings(max_examples=25, deadline=None)
@example([(511, 2), (0, 600)], 1, 3, 64, 16, AttentionKind(0.1, 70), torch.bfloat16, 2)
# Five chunks of keys: a peak that a merge keeps wrongly shows from the third on.
@example([(2300, 1), (1700, 3)], 2, 3, 64, 16, AttentionKind(0.3), torch.float32, 2)
@given(
    lengths=LENGTHS,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8]),
    dim=st.sampled_from([2, 16, 48, 64, 80, 128]),
    block_size=st.sampled_from([4, 16, 48, 64]),
    kind=KINDS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.integers(1, 3),
)
def test_attention_equals_the_reference(
    lengths: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    kind: AttentionKind,
    dtype: torch.dtype,
    threads: int,
) -> None:
    paged = PagedBatch(
        lengths, kv_heads=kv_heads, group=group, dim=dim, dtype=dtype, block_size=block_size
    )
    out, expected = attend(paged, kind, threads=threads), reference(paged, kind)
    # float32 sums and weights; in bfloat16 a weight and the result keep 8 bits.
    bound = 2e-6 if dtype == torch.float32 else 1e-2
    assert (out.double() - expected).abs().max() <= bound * expected.abs().max()


@settings(max_examples=8, deadline=None)
@given(
    kind=KINDS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cuts=st.lists(st.integers(1, 1099), max_size=4, unique=True),
    group=st.sampled_from([1, 3, 17]),
)
def test_a_row_has_the_same_bits_in_any_batch_chunk_and_team(
    kind: AttentionKind, dtype: torch.dtype, cuts: list[int], group: int
) -> None:
    """1,100 tokens at once, in chunks beside other sequences, one by one; one to four threads."""
    total = 1100
    lengths = [(0, total), (300, 1), (20, 1)]
    paged = PagedBatch(lengths, kv_heads=2, group=group, dim=32, dtype=dtype)
    whole = attend(paged, kind)
    for threads in (2, 3, 4):
        assert torch.equal(attend(paged, kind, threads=threads), whole)
    edges = [0, *sorted(cuts), total]
    for start, stop in pairwise(edges):
        batch = paged.part([(start, stop - start), (300, 1)])
        q_TND = torch.cat((paged.q_TND[start:stop], paged.q_TND[total : total + 1]))
        part = attend(paged, kind, batch=batch, q_TND=q_TND, threads=2)
        assert torch.equal(part[:-1], whole[start:stop])
        assert torch.equal(part[-1], whole[total])
    for position in (0, 63, 511, 512, 1023, 1024, 1099):
        batch = paged.part([(position, 1)])
        for threads in (1, 3, 4):
            row = attend(
                paged, kind, batch=batch, q_TND=paged.q_TND[position, None], threads=threads
            )
            assert torch.equal(row[0], whole[position])


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"), [(torch.int8, torch.float32), (torch.float8_e4m3fn, torch.bfloat16)]
)
def test_every_length_over_a_quantised_cache_equals_plain_torch(
    kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """F15: a fault that showed from position 97 on; here each length from 1 to 300 is a row."""
    lengths = [(length, 1) for length in range(300)]
    paged = PagedBatch(lengths, kv_heads=1, group=2, dim=24, dtype=dtype, kv_dtype=kv_dtype)
    kind = AttentionKind(0.2)
    out = attend(paged, kind, threads=2).float()
    expected = TorchOps().attend(paged.q_TND, paged.cache, LAYER, paged.batch, kind).float()
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert ((out - expected).abs().amax((1, 2)) <= bound).all()


def test_a_key_or_value_that_is_not_a_number_shows() -> None:
    """Broken numbers must reach the logits, where they are refused, and not fade away."""
    for dtype in (torch.float32, torch.bfloat16):
        for part in (0, 1):
            paged = PagedBatch([(70, 1), (70, 1)], kv_heads=1, group=2, dim=16, dtype=dtype)
            block = paged.tables[0][2]
            paged.cache[block, 0, LAYER, part, 3, 5] = float("nan")
            out = attend(paged, AttentionKind(0.3))
            assert out[0].isnan().any(dim=1).all()
            assert out[1].isfinite().all()


def test_a_padded_row_without_keys_gives_zeros() -> None:
    paged = PagedBatch([(40, 1), (0, 1)], kv_heads=2, group=2, dim=16, dtype=torch.float32)
    before = attend(paged, AttentionKind(0.3))
    paged.batch.kv_lengths_S[1] = 0
    out = attend(paged, AttentionKind(0.3), threads=2)
    assert torch.equal(out[0], before[0])
    assert (out[1] == 0).all()


@pytest.mark.parametrize("block", [-1, 7, 1 << 30])
def test_a_block_that_the_cache_does_not_have_is_refused(block: int) -> None:
    paged = PagedBatch([(40, 1), (15, 1)], kv_heads=1, group=1, dim=16, dtype=torch.float32)
    assert len(paged.cache) < 8
    paged.batch.block_tables_SM[0, 1] = block
    for threads in (1, 2):
        with pytest.raises(KernelFailed, match="argument"):
            attend(paged, AttentionKind(0.3), threads=threads)


def test_a_block_that_the_cache_does_not_have_is_refused_when_threads_take_turns() -> None:
    """A long prompt's items go to whoever is free; after a refusal they are all dealt again."""
    paged = PagedBatch([(0, 600)], kv_heads=2, group=8, dim=16, dtype=torch.float32)
    whole = attend(paged, AttentionKind(0.3))
    right = paged.batch.block_tables_SM[0, 20].item()
    for threads in (2, 3):
        paged.batch.block_tables_SM[0, 20] = -1
        with pytest.raises(KernelFailed, match="argument"):
            attend(paged, AttentionKind(0.3), threads=threads)
        paged.batch.block_tables_SM[0, 20] = right
        assert torch.equal(attend(paged, AttentionKind(0.3), threads=threads), whole)
