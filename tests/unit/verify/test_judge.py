"""The verdict on an answer: what passes, what is a tie, and what is out of bounds."""

import pytest

from ekiden.verify.compare import Bound, Reference, Top
from ekiden.verify.judge import Verdict
from ekiden.verify.outcome import CellFailed, Outcome
from ekiden.verify.reference import Record

TOKENS = (5, 6, 7, 8)


def top(token: int, off: float = 0.0) -> Top:
    return ((token, -0.5 + off), (99, -1.5), (98, -2.0 + off))


REFERENCE = Reference(
    prompt=(1,), tokens=TOKENS, gaps=(1.0, 1.0, 5e-5, 1.0), tops=tuple(map(top, TOKENS))
)


def record(tokens: list[int], off: float = 0.0) -> Record:
    found = Record((1,))
    found.tokens = tokens
    found.tops = [top(token, off) for token in tokens]
    return found


def verdict(outcome: Outcome, *, logprob: float = 1e-4, same_kv: bool = True) -> Verdict:
    return Verdict("p", REFERENCE, Bound(logprob=logprob), outcome, same_kv=same_kv)


def test_an_equal_answer_needs_no_second_attempt_and_counts_its_tokens() -> None:
    outcome = Outcome()
    assert not verdict(outcome).take(record([5, 6, 7, 8]))
    assert (outcome.tokens, outcome.equal_tokens, outcome.ties) == (4, 4, 0)
    assert outcome.logprob == 0.0


def test_behind_a_tie_the_next_attempt_goes_on_with_the_truth() -> None:
    outcome = Outcome()
    judged = verdict(outcome, logprob=1.0)
    assert judged.take(record([5, 6, 99, 0]))
    assert judged.start == 3
    assert not judged.take(record([8]))
    assert (outcome.tokens, outcome.equal_tokens, outcome.ties) == (4, 3, 1)


def test_between_two_kv_dtypes_a_tie_ends_the_comparison_and_the_rest_is_not_counted() -> None:
    outcome = Outcome()
    assert not verdict(outcome, logprob=1.0, same_kv=False).take(record([5, 6, 99, 0]))
    assert (outcome.tokens, outcome.equal_tokens, outcome.ties) == (3, 2, 1)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([5, 9, 7, 8], "output position 1: 9 instead of 6"),
        ([5, 6, 7], "output position 3: None instead of 8"),
        ([5, 6, 7, 8, 9], "output position 4: 9 instead of None"),
    ],
)
def test_a_token_that_is_no_tie_fails_and_names_its_position(tokens: list[int], said: str) -> None:
    with pytest.raises(CellFailed, match=said) as failure:
        verdict(Outcome(), logprob=10.0).take(record(tokens))
    assert failure.value.status == "differs"


def test_logprobs_are_bounded_on_average_over_the_whole_answer() -> None:
    """Two of the three logprobs at each position are off."""
    outcome = Outcome()
    assert not verdict(outcome, logprob=0.1).take(record([5, 6, 7, 8], off=0.12))
    assert outcome.logprob == pytest.approx(0.08)
    assert outcome.bound == 0.1
    with pytest.raises(CellFailed, match=r"0\.1\d? from the truth on average, more than 0\.1"):
        verdict(Outcome(), logprob=0.1).take(record([5, 6, 7, 8], off=0.17))


def test_distances_add_up_over_attempts() -> None:
    """Each attempt alone would pass."""
    judged = verdict(Outcome(), logprob=0.1)
    first = record([5, 6, 99], off=0.0)
    first.tops[:2] = [top(5, 0.24), top(6, 0.24)]
    assert judged.take(first)
    with pytest.raises(CellFailed, match="on average"):
        judged.take(record([8], off=0.24))


def test_what_comes_after_the_first_different_token_is_not_measured() -> None:
    outcome = Outcome()
    answer = record([5, 6, 99, 0])
    answer.tops[3] = top(8, 50.0)
    assert verdict(outcome, logprob=1.0).take(answer)
    assert outcome.logprob < 1.0
