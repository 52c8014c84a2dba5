"""The comparison sees every kind of difference, calls only real ties ties, and names the place."""

import numpy as np
import pytest

from ekiden.cache.layout import KvLayout, RankLayout
from ekiden.verify.compare import (
    Reference,
    first_difference,
    first_kv_difference,
    rank_bits,
    whole_cache,
)

REFERENCE = Reference(prompt=(1,), tokens=(5, 6, 7, 8), gaps=(1.0, 1.0, 5e-5, 1.0))


def test_equal_tokens_have_no_difference() -> None:
    assert first_difference(REFERENCE, [5, 6, 7, 8]) is None
    assert first_difference(REFERENCE, [7, 8], start=2) is None


def test_the_first_differing_position_is_named() -> None:
    found = first_difference(REFERENCE, [5, 9, 9, 8])
    assert found is not None
    assert (found.position, found.expected, found.got, found.tie) == (1, 6, 9, False)


@pytest.mark.parametrize(("got", "position"), [([5, 6, 7], 3), ([5, 6, 7, 8, 9], 4), ([], 0)])
def test_a_missing_or_surplus_token_is_a_difference_and_never_a_tie(
    got: list[int], position: int
) -> None:
    found = first_difference(REFERENCE, got)
    assert found is not None
    assert (found.position, found.tie) == (position, False)


def test_only_a_position_with_two_best_logits_close_together_is_a_tie() -> None:
    at_tie = first_difference(REFERENCE, [5, 6, 9, 8])
    elsewhere = first_difference(REFERENCE, [5, 6, 7, 9])
    assert at_tie is not None
    assert at_tie.tie
    assert elsewhere is not None
    assert not elsewhere.tie


def test_positions_count_from_the_start_of_the_output_behind_a_tie() -> None:
    found = first_difference(REFERENCE, [7, 1], start=2)
    assert found is not None
    assert found.position == 3


def _layout(tp: int, heads: list[tuple[int, int]], size: int) -> KvLayout:
    ranks = tuple(
        RankLayout(tp_rank=i, pp_rank=0, head_start=a, head_stop=b, layer_start=0, layer_stop=3)
        for i, (a, b) in enumerate(heads)
    )
    return KvLayout(
        dtype="float32",
        block_size=size,
        num_layers=3,
        num_kv_heads=2,
        head_dim=4,
        tp=tp,
        pp=1,
        ranks=ranks,
    )


def _blocks(layout: KvLayout, rank: int, whole: np.ndarray, tokens: int) -> list[bytes]:
    """The blocks of one rank that hold ``whole`` [layers, heads, tokens, 2, dim]."""
    r = layout.ranks[rank]
    mine = whole[:, r.head_start : r.head_stop]
    size = layout.block_size
    return [
        np.ascontiguousarray(mine[:, :, at : at + size].transpose(1, 0, 3, 2, 4)).tobytes()
        for at in range(0, tokens, size)
    ]


def test_kv_of_other_splits_and_block_sizes_compares_equal_and_names_one_flipped_bit() -> None:
    prefill, decode = _layout(1, [(0, 2)], 16), _layout(2, [(0, 1), (1, 2)], 32)
    whole = np.random.default_rng(0).integers(0, 2**32, (3, 2, 64, 2, 4)).astype(np.uint32)
    source = whole_cache(prefill, {0: rank_bits(prefill, 0, _blocks(prefill, 0, whole, 64))})
    assert np.array_equal(source, whole)

    def arrived(content: np.ndarray) -> dict[int, np.ndarray]:
        return {r: rank_bits(decode, r, _blocks(decode, r, content, 64)) for r in (0, 1)}

    assert first_kv_difference(source, decode, arrived(whole), 64) is None
    flipped = whole.copy()
    flipped[2, 1, 37, 1, 3] ^= 1
    found = first_kv_difference(source, decode, arrived(flipped), 64)
    assert found is not None
    assert (found.layer, found.head, found.position, found.part, found.rank) == (2, 1, 37, "V", 1)
    assert first_kv_difference(source, decode, arrived(flipped), 32) is None


def test_a_wrong_replica_of_a_head_is_found_although_the_other_is_right() -> None:
    decode = _layout(3, [(0, 1), (1, 2), (1, 2)], 16)
    whole = np.arange(3 * 2 * 16 * 2 * 4, dtype=np.uint32).reshape(3, 2, 16, 2, 4)
    bad = whole.copy()
    bad[0, 1, 3, 0, 0] += 1
    shares = {r: rank_bits(decode, r, _blocks(decode, r, whole, 16)) for r in (0, 1)}
    shares[2] = rank_bits(decode, 2, _blocks(decode, 2, bad, 16))
    found = first_kv_difference(whole, decode, shares, 16)
    assert found is not None
    assert (found.rank, found.head, found.position) == (2, 1, 3)
