"""Loading a tokenizer directory: what is read, what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest
from tiny_tokenizers import byte_level, write
from tokenizers import decoders

from ekiden.core.errors import BadRequest, SetupError
from ekiden.text.factory import text_factory
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


async def test_a_long_text_is_encoded_without_stopping_other_threads(
    bytes_tokenizer: Tokenizer,
) -> None:
    """Streams go on while a long prompt is tokenised: the event loop is never held for long."""
    text = "hello world, this is some text. " * 20_000
    encoding = asyncio.ensure_future(asyncio.to_thread(bytes_tokenizer.encode, text))
    ticks = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks > 20
    assert bytes_tokenizer.decode(await encoding) == text


def test_special_texts_are_read_from_strings_and_objects(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_texts() == {"bos_token": "<s>", "eos_token": "</s>"}


def test_fingerprint_is_the_file_s(tmp_path: Path) -> None:
    directory = write(tmp_path, byte_level())
    digest = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    assert Tokenizer.load(directory).fingerprint == digest


def test_the_engine_s_factory_makes_text_and_without_a_tokenizer_refuses_stops(
    tmp_path: Path,
) -> None:
    directory = write(tmp_path / "whole", byte_level())
    token = byte_level().token_to_id(".")
    text = text_factory(directory)(["."], 1)
    assert text.push(token) is None
    assert text.push(token) is not None
    with pytest.raises(BadRequest, match=r"no tokenizer\.json"):
        text_factory(tmp_path)(["."], 0)


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
