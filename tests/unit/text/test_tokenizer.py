"""Loading a tokenizer directory: what is read, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizers import byte_level, write
from tokenizers import decoders

from ekiden.core.errors import SetupError
from ekiden.text.tokenizer import Tokenizer


def test_ids_that_end_a_text_come_from_every_file(tmp_path: Path) -> None:
    directory = write(tmp_path, byte_level())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    inner_eos = byte_level().token_to_id("</s>")
    assert Tokenizer.load(directory).eos_ids == {5, 6, 7, inner_eos}


def test_bytes_of_all_tokens_are_the_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ďábel 汉 a", add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(token) for token in tokens)
    assert joined.decode().removeprefix(" ") == "ďábel 汉 a"


def test_special_texts_are_read_from_strings_and_objects(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_texts() == {"bos_token": "<s>", "eos_token": "</s>"}


def test_fingerprint_ignores_white_space_and_sees_the_vocabulary(tmp_path: Path) -> None:
    plain = Tokenizer.load(write(tmp_path / "a", byte_level()))
    spaced = write(tmp_path / "b", byte_level()) / "tokenizer.json"
    spaced.write_text(json.dumps(json.loads(spaced.read_text()), indent=7))
    assert Tokenizer.load(spaced.parent).fingerprint == plain.fingerprint
    other = byte_level()
    other.add_tokens(["more"])
    assert Tokenizer.load(write(tmp_path / "c", other)).fingerprint != plain.fingerprint


def test_a_truncating_tokenizer_is_told_not_to(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(3)
    assert len(Tokenizer.load(write(tmp_path, inner)).encode("0123456789" * 3)) > 3


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "no tokenizer.json"), ("{", "cannot be read"), ("[]", "cannot be read")],
)
def test_a_directory_without_a_usable_tokenizer_is_refused(
    tmp_path: Path, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SetupError, match=says):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_cannot_stream_is_refused_by_name(tmp_path: Path) -> None:
    inner = byte_level()
    inner.decoder = decoders.CTC()
    with pytest.raises(SetupError, match="CTC"):
        Tokenizer.load(write(tmp_path, inner))
