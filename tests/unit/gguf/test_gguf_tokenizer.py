"""The rebuilt tokenizer: exact text back, digits one by one, control tokens whole."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_files import vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ekiden.core.errors import SetupError
from ekiden.models.gguf_tokenizer import build_tokenizer, write_tokenizer

TOKENS, MERGES = vocabulary()


class Fields:
    """Metadata as the importer reads it, from a dict."""

    def __init__(self, **changes: Any) -> None:
        self._fields: dict[str, Any] = {
            "model": "gpt2",
            "pre": "smollm",
            "tokens": TOKENS,
            "merges": MERGES,
            "token_type": [3, 3] + [1] * (len(TOKENS) - 2),
            "bos_token_id": 0,
            **changes,
        }

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields.get(key.removeprefix("tokenizer.ggml."), default)

    def need(self, key: str) -> Any:
        return self._fields[key.removeprefix("tokenizer.ggml.")]


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text).tokens


PRETOKENIZERS = ["gpt-2", "smollm", "llama-bpe", "qwen2"]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.sampled_from(PRETOKENIZERS))
def test_any_text_comes_back(text: str, pre: str):
    tokenizer = build_tokenizer(Fields(pre=pre, add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_smollm_cuts_numbers_into_single_digits_and_gpt2_does_not():
    assert pieces(build_tokenizer(Fields()), "12") == ["1", "2"]
    assert pieces(build_tokenizer(Fields(pre="gpt-2")), "12") == ["12"]


def test_merges_apply_in_order():
    assert pieces(build_tokenizer(Fields()), "hello") == ["hel", "l", "o"]


def test_control_tokens_are_one_token_and_special():
    tokenizer = build_tokenizer(Fields())
    assert tokenizer.encode("a<|im_end|>").ids[-1] == 1
    assert tokenizer.decode([1, tokenizer.token_to_id("a")]) == "a"


def test_the_begin_token_is_put_first_only_where_the_file_says_so():
    assert build_tokenizer(Fields(add_bos_token=True)).encode("a").ids[0] == 0
    assert build_tokenizer(Fields(add_bos_token=False)).encode("a").ids[0] != 0
    assert build_tokenizer(Fields(pre="llama-bpe")).encode("a").ids[0] == 0
    assert build_tokenizer(Fields()).encode("a").ids[0] != 0


def test_a_vocabulary_with_an_entry_twice_is_refused(tmp_path: Path):
    twice = [*TOKENS, TOKENS[5]]
    fields = Fields(tokens=twice, token_type=[1] * len(twice))
    with pytest.raises(SetupError, match=f"{len(twice)} entries, {len(TOKENS)} of them distinct"):
        write_tokenizer(fields, tmp_path, len(twice))


def test_a_given_tokenizer_is_copied(tmp_path: Path):
    given_dir, out = tmp_path / "given", tmp_path / "out"
    given_dir.mkdir()
    out.mkdir()
    (given_dir / "tokenizer.json").write_text(json.dumps({"mine": 1}))
    write_tokenizer(Fields(model="llama"), out, 3, given_dir)
    assert json.loads((out / "tokenizer.json").read_text()) == {"mine": 1}
    with pytest.raises(SetupError, match=r"holds no tokenizer\.json"):
        write_tokenizer(Fields(), out, 3, tmp_path)
