"""The copies between a device and the host are those of the slow reference, on any layout."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden.cache.tensors import as_stored
from kv_transfer.across import copy_across
from kv_transfer.boxes import copy_by_torch
from kv_transfer.places import Places


@st.composite
def units(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[int, int]], int]:
    """A cache, units of it that do not overlap, and the tokens of a unit."""
    tokens, per_block, blocks = draw(st.sampled_from([1, 4, 16])), draw(st.integers(1, 3)), 5
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]))
    shape = (blocks, draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2, tokens * per_block, 8)
    cache = torch.randint(0, 255, (*shape[:-1], 8 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    spots = [(block, at * tokens) for block in range(blocks) for at in range(per_block)]
    chosen = draw(st.lists(st.sampled_from(spots), unique=True, min_size=1))
    return cache, chosen, tokens


@settings(max_examples=60, deadline=None)
@given(case=units())
def test_units_are_packed_and_unpacked_as_by_the_reference(
    case: tuple[torch.Tensor, list[tuple[int, int]], int],
) -> None:
    cache, spots, tokens = case
    shape = (len(spots), *cache.shape[1:4], tokens, cache.shape[5])
    packed = {copy: torch.empty(shape, dtype=cache.dtype) for copy in (copy_across, copy_by_torch)}
    back = {copy: torch.zeros_like(as_stored(cache)).view(cache.dtype) for copy in packed}
    for copy, message in packed.items():
        there = Places(message, [(unit, 0) for unit in range(len(spots))])
        copy(Places(cache, spots), there, tokens)
        copy(there, Places(back[copy], spots), tokens)
    for results in (packed, back):
        ours, reference = (as_stored(results[copy]) for copy in (copy_across, copy_by_torch))
        assert torch.equal(ours.view(torch.uint8), reference.view(torch.uint8))


def test_the_share_of_some_heads_and_layers_is_written_and_nothing_else() -> None:
    cache = torch.zeros(3, 4, 4, 2, 16, 8)
    share = cache[:, 1:3, 2:4]
    message = torch.ones(2, 2, 2, 2, 16, 8)
    copy_across(Places(message, [(0, 0), (1, 0)]), Places(share, [(2, 0), (0, 0)]), 16)
    assert cache[[0, 2], 1:3, 2:4].min() == 1
    assert cache.sum() == message.sum()
