"""Joined pieces equal the whole decoding, and no piece ends inside a character."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden.text.detokenize import IncrementalDetokenizer
from ekiden.text.tokenizer import Tokenizer


def pieces(tokenizer: Tokenizer, tokens: list[int], *, at_start: bool = True) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, at_start=at_start)
    return [*(stream.push(token) for token in tokens), stream.flush()]


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_bytes = {
        tokenizer.token_bytes(token): token
        for token in reversed(range(tokenizer.vocab_size))
        if not tokenizer.is_special(token)
    }
    return [by_bytes[bytes([byte])] for byte in data]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_joined_pieces_equal_the_library_on_any_tokens(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    # +2: ids just outside the vocabulary, which padded models can be made to name.
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30))
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=40), cut=st.integers(0, 40))
def test_an_output_continues_its_prompt(tokenizer: Tokenizer, text: str, cut: int) -> None:
    tokens = tokenizer.encode(text)
    prompt, output = tokens[:cut], tokens[cut:]
    whole, before = tokenizer.decode(tokens), tokenizer.decode(prompt)
    if prompt and not before.endswith("\ufffd") and whole.startswith(before):
        assert "".join(pieces(tokenizer, output, at_start=False)) == whole[len(before) :]


@pytest.mark.parametrize("text", ["ď", "汉", "👩‍👩‍👧", "a汉b"])
def test_a_character_in_single_bytes_comes_out_whole(tokenizer: Tokenizer, text: str) -> None:
    found = pieces(tokenizer, byte_tokens(tokenizer, text.encode()))
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


def test_a_character_is_sent_with_its_last_byte(bytes_tokenizer: Tokenizer) -> None:
    tokens = byte_tokens(bytes_tokenizer, "汉".encode())
    assert pieces(bytes_tokenizer, tokens) == ["", "", "汉", ""]


def test_a_byte_run_is_sent_when_it_ends(fallback_tokenizer: Tokenizer) -> None:
    tokens = [*byte_tokens(fallback_tokenizer, "é".encode()), *fallback_tokenizer.encode("a")]
    assert "".join(pieces(fallback_tokenizer, tokens)[:3]).startswith("é")


def test_500_random_bytes_decode_like_the_library(tokenizer: Tokenizer) -> None:
    data = random.Random(7).randbytes(500)
    tokens = byte_tokens(tokenizer, bytes(byte for byte in data if byte not in b"ab."))
    found = pieces(tokenizer, tokens)
    assert "".join(found) == tokenizer.decode(tokens)
    assert "\ufffd" in "".join(found)


def test_special_tokens_have_no_text_and_do_not_break_a_character(tokenizer: Tokenizer) -> None:
    first, second = byte_tokens(tokenizer, "é".encode())
    (end,) = tokenizer.eos_ids
    assert "".join(pieces(tokenizer, [first, end, second])) == "é"


def test_a_cut_after_any_token_shows_no_part_of_a_tag(tokenizer: Tokenizer) -> None:
    """F120: answers are cut by tokens, and a tag like <think> is one of them."""
    tokens = tokenizer.encode("ab<think>a.<think>", add_special_tokens=False)
    texts = ["".join(pieces(tokenizer, tokens[:cut])) for cut in range(len(tokens) + 1)]
    assert texts[-1] == "ab<think>a.<think>"
    assert not any("<" in text.replace("<think>", "") for text in texts)


def test_a_first_space_is_stripped_at_the_start_of_a_text_only(
    fallback_tokenizer: Tokenizer,
) -> None:
    token = next(t for t in range(300) if fallback_tokenizer.piece(t) == "▁hello")
    assert pieces(fallback_tokenizer, [token], at_start=True)[0] == "hello"
    assert pieces(fallback_tokenizer, [token], at_start=False)[0] == " hello"


def test_work_for_a_token_does_not_grow_with_the_output(tokenizer: Tokenizer) -> None:
    """Counted, not timed: every token is looked up once, however long the output already is."""

    class Counting:
        lookups = 0

        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def piece(self, token: int) -> str:
            self.lookups += 1
            return tokenizer.piece(token)

        def decode(self, *_: object, **__: object) -> str:
            raise AssertionError("decoded a whole window")

    counting = Counting()
    tokens = tokenizer.encode("a b ab " * 300)
    stream = IncrementalDetokenizer(counting)  # type: ignore[arg-type]
    for token in tokens:
        stream.push(token)
    assert counting.lookups == len(tokens)
