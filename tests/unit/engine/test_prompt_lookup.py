"""What prompt lookup proposes, against the plainest search, and what a lookup costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.core.config import SpeculativeConfig
from ekiden.core.errors import SetupError
from ekiden.engine.speculation import MAX_PROBES, PromptLookup


def lookup(shortest: int = 2, longest: int = 4, max_tokens: int = 64) -> PromptLookup:
    config = SpeculativeConfig(
        num_speculative_tokens=8, prompt_lookup_min=shortest, prompt_lookup_max=longest
    )
    return PromptLookup(config, max_tokens)


def slow(tokens: list[int], shortest: int, longest: int, limit: int) -> tuple[int, ...]:
    """The latest of the longest earlier places of the end, token by token."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                known = list(tokens)
                for i in range(limit):
                    known.append(known[end + i])
                return tuple(known[len(tokens) :])
    return ()


@given(
    # No more places than are compared, so that the bound does not show.
    tokens=st.lists(st.integers(0, 2), max_size=MAX_PROBES),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    limit=st.integers(-1, 6),
)
def test_it_proposes_what_followed_the_latest_of_the_longest_matches(
    tokens: list[int], shortest: int, more: int, limit: int
) -> None:
    one = lookup(shortest, shortest + more)
    for end in range(1, len(tokens) + 1):
        expected = slow(tokens[:end], shortest, shortest + more, limit) if limit > 0 else ()
        assert one.propose(tokens[:end], limit) == expected


def test_tokens_may_come_several_at_a_time() -> None:
    tokens = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    at_once = lookup()
    assert at_once.propose(tokens, 3) == (7, 8, 5)
    step_by_step = lookup()
    for end in (1, 4, 5, 9):
        step_by_step.propose(tokens[:end], 0)
    assert step_by_step.propose(tokens, 3) == (7, 8, 5)


def test_a_loop_is_proposed_on_and_on() -> None:
    assert lookup().propose([1, 2, 3, 3, 3], 5) == (3, 3, 3, 3, 3)
    assert lookup().propose([9, 1, 2, 1, 2, 1], 5) == (2, 1, 2, 1, 2)


class CountedTokens(list[int]):
    """Counts how often a token is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        taken = super().__getitem__(index)
        self.looks += len(taken) if isinstance(index, slice) else 1
        return taken


@pytest.mark.parametrize("name", ["one token", "a short match everywhere"])
def test_a_lookup_costs_no_more_after_five_thousand_tokens(name: str) -> None:
    tokens = CountedTokens()
    one = lookup(max_tokens=5000)
    most = 0
    for i in range(5000):
        # Every second place ends in 1, 2; no two of them match any longer.
        tokens.append(7 if name == "one token" else (1, 2, 100 + i)[i % 3])
        tokens.looks = 0
        one.propose(tokens, 4)
        most = max(most, tokens.looks)
    assert most <= 2 * 4 * (MAX_PROBES + 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "eagle"}, "only ngram"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens is 65: use 0 to 64"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max is 0: use 1 to 64"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min is 5: use 0 to 4"),
    ],
)
def test_a_configuration_that_cannot_be_names_the_field_and_what_is_valid(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(SetupError, match=words):
        SpeculativeConfig(**fields).check()


def test_the_shortest_match_is_two_tokens_unless_told_otherwise() -> None:
    assert SpeculativeConfig().shortest_lookup == 2
    assert SpeculativeConfig(prompt_lookup_max=1).shortest_lookup == 1
    assert SpeculativeConfig(prompt_lookup_min=3).shortest_lookup == 3
