"""Every rule that ends a choice, in the one function that all tokens pass."""

from __future__ import annotations

import pytest
from engine_fakes import LetterText

from ekiden.core.types import FinishReason, SamplingParams, TokenLogprobs
from ekiden.engine.advance import Advance, ChoiceState, advance

EOS = 7
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def state(*, max_output: int = 99, **sampling: object) -> ChoiceState:
    params = SamplingParams(seed=0, max_tokens=99, **sampling)
    return ChoiceState(
        params,
        eos_token_ids=frozenset({EOS}),
        max_output=max_output,
        text_factory=LetterText,
    )


def run(choice: ChoiceState, tokens: list[int]) -> Advance:
    for token in tokens[:-1]:
        assert advance(choice, token).finish is None
    return advance(choice, tokens[-1])


def test_an_ordinary_token_goes_on_and_keeps_its_logprobs() -> None:
    logprobs = TokenLogprobs(3, -0.5)
    choice = state()
    assert advance(choice, 3, logprobs) == Advance(token=3, logprobs=logprobs)
    assert choice.output == [3]


def test_eos_as_the_first_token_stops_without_a_reason() -> None:
    result = advance(state(), EOS)
    assert (result.finish, result.stop_reason) == (STOP, None)


def test_ignore_eos_ignores_eos_but_not_the_same_id_listed_as_a_stop() -> None:
    assert advance(state(ignore_eos=True), EOS).finish is None
    listed = advance(state(ignore_eos=True, stop_token_ids=(EOS,)), EOS)
    assert (listed.finish, listed.stop_reason) == (STOP, EOS)


def test_a_stop_id_stops_and_is_the_reason() -> None:
    result = run(state(stop_token_ids=(5,)), [1, 5])
    assert (result.finish, result.stop_reason) == (STOP, 5)


def test_a_stop_string_over_two_tokens_stops_and_is_the_reason() -> None:
    result = run(state(stop=("bc",)), [0, 1, 2])
    assert (result.finish, result.stop_reason) == (STOP, "bc")


def test_max_output_ends_with_length() -> None:
    result = run(state(max_output=3), [1, 1, 1])
    assert (result.finish, result.stop_reason) == (LENGTH, None)


@pytest.mark.parametrize(
    ("last", "sampling", "reason"),
    [(EOS, {}, None), (5, {"stop_token_ids": (5,)}, 5), (2, {"stop": ("bc",)}, "bc")],
)
def test_a_stop_beats_length_at_the_same_token(
    last: int, sampling: dict[str, object], reason: object
) -> None:
    result = run(state(max_output=2, **sampling), [1, last])
    assert (result.finish, result.stop_reason) == (STOP, reason)


def test_before_min_tokens_nothing_stops_and_the_ids_are_banned() -> None:
    choice = state(min_tokens=2, stop_token_ids=(5,), stop=("a",))
    for token in (0, 0):
        assert choice.banned() == (5, EOS)
        assert advance(choice, token).finish is None
    assert choice.banned() == ()
    assert advance(choice, 0).stop_reason == "a"


@pytest.mark.parametrize("token", [EOS, 5])
def test_an_id_that_comes_before_min_tokens_although_banned_does_not_stop(token: int) -> None:
    choice = state(min_tokens=1, stop_token_ids=(5,))
    assert advance(choice, token).finish is None
    assert advance(choice, token).finish is STOP


def test_ignore_eos_does_not_ban_eos_before_min_tokens() -> None:
    assert state(min_tokens=2, ignore_eos=True).banned() == ()


def test_length_ends_a_choice_even_before_min_tokens() -> None:
    assert run(state(min_tokens=5, max_output=2), [1, 1]).finish is LENGTH


def test_bytes_held_to_the_end_may_complete_a_stop_string() -> None:
    class Holding(LetterText):
        def push(self, token: int) -> None:
            self.text += "held"

        def finish(self) -> object:
            return type("Found", (), {"stop": "held"})

    choice = state(stop=("held",), max_output=1)
    choice.text = Holding(("held",), 0)
    result = advance(choice, 1)
    assert (result.finish, result.stop_reason) == (STOP, "held")


def test_a_choice_that_ended_takes_no_more_tokens() -> None:
    choice = state()
    advance(choice, EOS)
    with pytest.raises(ValueError, match="ended"):
        advance(choice, 1)
