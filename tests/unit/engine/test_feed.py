"""A step that goes on from tokens still being sampled waits for them, and for nothing else."""

from __future__ import annotations

import pytest
from tiny_llama import greedy

from ekiden.core.errors import InvariantBroken
from ekiden.engine import feed as feeds
from ekiden.engine.feed import Feed, tokens_of
from ekiden.engine.plan import UNKNOWN, Chunk, Sampled, StepPlan


def row(sequence: int, after: int, token: int = UNKNOWN) -> Chunk:
    return Chunk(sequence, (token,), 3, (0,), after=after)


def took(feed: Feed) -> list[object]:
    done: list[object] = []
    while feed.ready:
        work = feed.take()
        done.append(work.step if isinstance(work, StepPlan) else work)
    return done


def test_a_step_waits_for_its_tokens_and_holds_back_what_was_told_after_it() -> None:
    feed = Feed(needs_tokens=True)
    feed.put(StepPlan(1, (row(5, after=0, token=9),)))
    feed.put(StepPlan(2, (row(5, after=1), row(6, after=0, token=4))))
    feed.put(b"a message")
    feed.put(StepPlan(3, (row(6, after=0, token=8),)))
    assert took(feed) == [1]
    feed.tell(7, {5: 1})
    assert took(feed) == []
    feed.tell(1, {5: 33})
    assert feed.ready
    assert feed.take() == StepPlan(2, (row(5, after=1, token=33), row(6, after=0, token=4)))
    assert took(feed) == [b"a message", 3]


def test_a_rank_that_neither_embeds_nor_samples_waits_for_no_token() -> None:
    feed = Feed(needs_tokens=False)
    feed.put(StepPlan(2, (row(5, after=1),)))
    assert took(feed) == [2]


def test_a_token_that_nobody_sampled_is_never_guessed() -> None:
    feed = Feed(needs_tokens=True)
    feed.put(StepPlan(2, (row(5, after=1),)))
    feed.tell(1, {6: 3})
    with pytest.raises(InvariantBroken, match="sequence 5 goes on from step 1"):
        feed.take()


def test_only_the_tokens_of_the_last_steps_are_kept_and_only_so_much_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "MAX_WAITING", 2)
    feed = Feed(needs_tokens=True)
    for step in range(1, feeds.KEPT_STEPS + 2):
        feed.tell(step, {5: step})
    feed.put(StepPlan(100, (row(5, after=2),)))
    assert took(feed) == [100]
    feed.put(StepPlan(101, (row(5, after=1),)))
    assert took(feed) == []
    feed.put(b"x")
    with pytest.raises(InvariantBroken, match="2 things wait"):
        feed.put(b"y")


def test_the_tokens_of_a_result_go_by_sequence() -> None:
    assert tokens_of((Sampled(3, 0, 7), Sampled(4, 0, 8))) == {3: 7, 4: 8}


def test_penalties_count_the_token_that_was_filled_in() -> None:
    penalised = greedy(presence_penalty=0.5, output=(7, 8, 7))
    plain = greedy()
    feed = Feed(needs_tokens=True)
    for step, token in ((1, 8), (2, 9)):
        feed.tell(step, {5: token})
        chunk = Chunk(5, (UNKNOWN,), 3, (0,), (penalised, plain), after=step)
        (filled,) = feed.fill(StepPlan(step + 1, (chunk,))).chunks
        counted = greedy(presence_penalty=0.5, output=(7, 8, 7, token))
        assert filled.samples == (counted, plain)
