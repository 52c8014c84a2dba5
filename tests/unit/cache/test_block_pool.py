"""The books of blocks always balance, and nothing that somebody owns is ever given away."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ekiden.cache.block_pool import BlockPool
from ekiden.cache.prefix_index import KeyChain
from ekiden.core.errors import InvariantBroken
from ekiden.core.hashes import root_hash

TOTAL = 8
ROOT = root_hash("m")


def keys_of(tokens: tuple[int, ...], root: bytes = ROOT) -> list[Any]:
    return KeyChain(root, 4, 4).upto(tokens, len(tokens))


class PoolMachine(RuleBasedStateMachine):
    """Tables of blocks come, are shared, published, found again and go; a dict is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.tables: list[tuple[list[int], tuple[int, ...]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(groups=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4))
    def admit(self, groups: list[int]) -> None:
        """Like the scheduler: take what is cached, allocate the rest, publish it."""
        tokens = tuple(token for group in groups for token in [group] * 4)
        keys = keys_of(tokens)
        hits = self.pool.find(ROOT, keys)
        for index, block in enumerate(hits):
            assert self.content[block] == tokens[: (index + 1) * 4], "a hit has other content"
        fresh = len(groups) - len(hits)
        room = self.pool.available - self.pool.count_cached(hits)
        if room < fresh:
            assert self.pool.allocate(room + self.pool.count_cached(hits) + 1) is None
            return
        self.pool.retain(hits)
        blocks = self.pool.allocate(fresh)
        assert blocks is not None
        owned = {block for table, _ in self.tables for block in table}
        assert not owned & set(blocks), "an owned block was given away"
        table = hits + blocks
        parent: Any = self.pool.serial(hits[-1]) if hits else ROOT
        for index in range(len(hits), len(table)):
            self.content[table[index]] = tokens[: (index + 1) * 4]
            parent = self.pool.publish(table[index], keys[index], parent)
            if parent is None:
                break
        self.tables.append((table, tokens))

    @rule(count=st.integers(1, 3))
    def take_unnamed(self, count: int) -> None:
        before = self.pool.available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > before)
        if blocks is not None:
            for block in blocks:
                self.content[block] = ()
            self.tables.append((blocks, ()))

    @rule(number=st.integers(0, 9))
    def share(self, number: int) -> None:
        if self.tables:
            table, tokens = self.tables[number % len(self.tables)]
            self.pool.retain(table)
            self.tables.append((list(table), tokens))

    @rule(number=st.integers(0, 9))
    def let_go(self, number: int) -> None:
        if self.tables:
            table, _ = self.tables.pop(number % len(self.tables))
            self.pool.release(table)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        owners: dict[int, int] = {}
        for table, _ in self.tables:
            for block in table:
                owners[block] = owners.get(block, 0) + 1
        assert owners == self.pool.owners
        assert self.pool.free + self.pool.cached + len(owners) == TOTAL


def test_books_balance_and_hits_hold_their_content_in_any_order() -> None:
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=80, stateful_step_count=30, deadline=None)
    )


def test_a_block_with_two_owners_is_free_only_when_both_let_go() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.retain(blocks[:1])
    pool.release(blocks)
    assert (pool.free, pool.held) == (1, 1)
    assert pool.allocate(2) is None
    pool.release(blocks[:1])
    assert pool.free == 2


def test_the_end_of_the_longest_unused_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    tokens = (1,) * 4 + (2,) * 4
    keys = keys_of(tokens)
    table = pool.allocate(2)
    assert table is not None
    parent = pool.publish(table[0], keys[0], ROOT)
    assert parent is not None
    pool.publish(table[1], keys[1], parent)
    other = pool.allocate(1)
    assert other is not None
    (other_key,) = keys_of((3,) * 4)
    pool.publish(other[0], other_key, ROOT)
    pool.release(table)
    pool.release(other)
    assert pool.allocate(1) is not None, "one block is free: nothing need be evicted"
    assert pool.find(ROOT, keys) == table
    assert pool.allocate(1) == [table[1]]
    assert pool.find(ROOT, keys) == table[:1]
    assert pool.find(ROOT, [other_key]) == other
    assert pool.allocate(1) == [table[0]]
    assert pool.find(ROOT, [other_key]) == other


def test_a_cached_block_that_is_found_again_cannot_be_evicted() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    (key,) = keys_of((1,) * 4)
    assert blocks is not None
    pool.publish(blocks[0], key, ROOT)
    pool.release(blocks)
    pool.retain(pool.find(ROOT, [key]))
    assert pool.allocate(1) is None


def test_without_caching_nothing_is_found_and_all_becomes_free() -> None:
    pool = BlockPool(1, caching=False)
    blocks = pool.allocate(1)
    (key,) = keys_of((1,) * 4)
    assert blocks is not None
    assert pool.publish(blocks[0], key, ROOT) is None
    pool.release(blocks)
    assert pool.find(ROOT, [key]) == []
    assert pool.free == 1


@pytest.mark.parametrize("wrong", ["release", "retain", "publish"])
def test_using_a_block_that_nobody_owns_is_caught(wrong: str) -> None:
    pool = BlockPool(1)
    (key,) = keys_of((1,) * 4)
    with pytest.raises(InvariantBroken, match="block 0"):
        {
            "release": lambda: pool.release([0]),
            "retain": lambda: pool.retain([0]),
            "publish": lambda: pool.publish(0, key, ROOT),
        }[wrong]()


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool._owners.clear()
    with pytest.raises(InvariantBroken, match="free 2 \\+ cached 0 \\+ held 0 is not total 3"):
        pool.check()
