"""A prefix is found only where model, tenant, tokens and everything before them are the same."""

from __future__ import annotations

import pytest

from ekiden.cache import prefix_index
from ekiden.cache.prefix_index import BlockKey, KeyChain, PrefixIndex
from ekiden.core.errors import InvariantBroken
from ekiden.core.hashes import block_hashes, granule_hashes, root_hash

ROOT = root_hash("m")
TOKENS = tuple(range(16))


def keys_of(tokens: tuple[int, ...], root: bytes = ROOT, size: int = 4) -> list[BlockKey]:
    return KeyChain(root, size, 4).upto(tokens, len(tokens))


def filled(tokens: tuple[int, ...], root: bytes = ROOT) -> PrefixIndex:
    index = PrefixIndex()
    parent: bytes | int = root
    for block, key in enumerate(keys_of(tokens, root)):
        serial = index.insert(block, key, parent)
        assert serial is not None
        parent = serial
    return index


def test_the_longest_common_prefix_is_found_in_whole_blocks() -> None:
    index = filled(TOKENS)
    assert index.find(ROOT, keys_of(TOKENS)) == [0, 1, 2, 3]
    assert index.find(ROOT, keys_of((*TOKENS[:9], 99, 99, 99))) == [0, 1]
    assert index.find(ROOT, keys_of(TOKENS[:7])) == [0]
    assert index.find(ROOT, keys_of(TOKENS[4:8])) == []


def test_a_tenants_salt_that_equals_an_adapters_name_gives_no_hit() -> None:
    index = filled(TOKENS, root_hash("m", salt="a"))
    for other in (root_hash("m", adapter="a"), root_hash("m"), root_hash("ma"), root_hash("a")):
        assert index.find(other, keys_of(TOKENS, other)) == []


def test_block_keys_are_the_hashes_that_every_process_computes() -> None:
    granules = granule_hashes(ROOT, TOKENS, 4)
    assert [key.digest for key in keys_of(TOKENS)] == granules
    assert [key.digest for key in keys_of(TOKENS, size=8)] == block_hashes(granules, 8, 4)
    assert {len(key.digest) for key in keys_of(TOKENS)} == {32}


def test_keys_computed_piece_by_piece_equal_keys_computed_at_once() -> None:
    chain = KeyChain(ROOT, 4, 4)
    for end in range(len(TOKENS) + 1):
        assert chain.upto(TOKENS[:end], end) == keys_of(TOKENS)[: end // 4]


def test_a_branch_of_a_chain_does_not_change_the_chain() -> None:
    chain = KeyChain(ROOT, 4, 4)
    chain.upto(TOKENS, 8)
    branch = chain.branch(1)
    other = (*TOKENS[:4], 9, 9, 9, 9)
    assert branch.upto(other, 8) == keys_of(other)
    assert chain.upto(TOKENS, 16) == keys_of(TOKENS)


def test_a_colliding_digest_is_a_miss_and_cannot_be_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_index, "granule_hashes", lambda *args, **kwargs: [b"same"])
    (mine,), (other,) = keys_of((1, 2, 3, 4)), keys_of((5, 6, 7, 8))
    index = PrefixIndex()
    assert index.insert(0, mine, ROOT) is not None
    assert index.find(ROOT, [other]) == []
    assert index.insert(1, other, ROOT) is None
    assert index.find(ROOT, [mine]) == [0]
    assert index.find(root_hash("m", salt="s"), [mine]) == []


def test_the_same_content_keeps_its_first_block() -> None:
    index = filled(TOKENS)
    (first, *_) = keys_of(TOKENS)
    assert index.insert(9, first, ROOT) == index.serial(0)
    assert 9 not in index
    assert len(index) == 4


def test_what_follows_a_removed_block_is_not_found_after_another_took_its_name() -> None:
    index = filled(TOKENS)
    keys = keys_of(TOKENS)
    index.remove(0)
    assert index.find(ROOT, keys) == []
    index.insert(7, keys[0], ROOT)
    assert index.find(ROOT, keys) == [7]


def test_a_block_cannot_have_two_names() -> None:
    index = filled(TOKENS)
    with pytest.raises(InvariantBroken, match="block 0"):
        index.insert(0, keys_of((9, 9, 9, 9))[0], ROOT)
