"""The stop matcher against a naive reference, and its independence of how text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ekiden.text.output import OutputText
from ekiden.text.stop import StopMatch, StopMatcher
from ekiden.text.tokenizer import Tokenizer

letters = st.text(alphabet="abc", max_size=24)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def feed(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        if match := matcher.push(piece):
            return shown + match.keep, match.stop
        shown += matcher.take()
    matcher.release()
    return shown + matcher.take(), None


def cut(text: str, places: list[int]) -> list[str]:
    marks = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(marks)]


@given(text=letters, stops=stops, places=st.lists(st.integers(0, 24), max_size=8))
@example(text="abcabd", stops=["abd"], places=[1, 2, 3, 4, 5])
@example(text="xabc", stops=["bc", "abc"], places=[])
def test_any_cut_gives_what_the_reference_gives(
    text: str, stops: list[str], places: list[int]
) -> None:
    assert feed(cut(text, places), stops) == reference(text, stops)


@given(text=letters, stops=stops)
def test_nothing_shown_is_ever_taken_back_and_nothing_is_held_in_vain(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for index, char in enumerate(text):
        if matcher.push(char):
            break
        shown += matcher.take()
        held = text[len(shown) : index + 1]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_text_that_may_begin_a_stop_is_held_until_it_cannot() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("some EN") is None
    assert matcher.take() == "some "
    assert matcher.push("T") is None
    assert matcher.take() == "ENT"
    assert matcher.push("xEND tail") == StopMatch("END", "x")


def test_text_not_taken_is_part_of_keep() -> None:
    matcher = StopMatcher(["!"])
    matcher.push("one ")
    assert matcher.push("two! three") == StopMatch("!", "one two")


def test_unarmed_a_stop_does_not_count_but_one_that_ends_later_does() -> None:
    matcher = StopMatcher(["ab", "abcd"])
    assert matcher.push("xabc", armed=False) is None
    assert matcher.push("d") == StopMatch("abcd", "x")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])


def test_output_cuts_a_stop_that_spans_tokens(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, ["b a"])
    tokens = tokenizer.encode("ab a b")
    found = [output.push(token) for token in tokens]
    match = next(match for match in found if match)
    assert match.stop == "b a"
    assert "b a" not in match.keep


def test_output_ignores_stops_up_to_min_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(".", add_special_tokens=False) * 4
    output = OutputText(tokenizer, ["."], min_tokens=2 * len(tokens) // 4)
    hits = [output.push(token) is not None for token in tokens]
    assert hits.index(True) == 2 * len(tokens) // 4


def test_bytes_held_at_the_end_may_complete_a_stop(bytes_tokenizer: Tokenizer) -> None:
    half = next(
        t for t in range(bytes_tokenizer.vocab_size) if bytes_tokenizer.token_bytes(t) == b"\xe6"
    )
    output = OutputText(bytes_tokenizer, ["\ufffd"])
    assert output.push(half) is None
    assert output.finish() == StopMatch("\ufffd", "")


@example(text="  ")
@given(text=st.text(max_size=30))
def test_output_without_a_match_shows_every_character(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    output = OutputText(tokenizer, ["\x00never\x00"])
    shown = ""
    for token in tokens:
        assert output.push(token) is None
        shown += output.take()
    assert output.finish() is None
    shown += output.take()
    whole = tokenizer.decode(tokens)
    assert shown in (whole, " " + whole), "some decoders drop one space before a whole text"
