"""What is found out of a server before it is loaded."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from scripted import DONE, Scripted, event, refusal, serving, text, with_length
from tiny_tokenizers import byte_level, write

from ekiden.bench import preflight
from ekiden.bench.asking import Dialect
from ekiden.bench.http import Address, Server
from ekiden.bench.preflight import Found
from ekiden.bench.workload import Piece
from ekiden.core.clock import MonotonicClock
from ekiden.core.errors import SetupError

Count = Callable[[str], int]


class Picky(Scripted):
    """Refuses ``unknown`` fields; counts prompts by ``count``."""

    def __init__(self, *, unknown: Sequence[str] = (), count: Count | None = None) -> None:
        super().__init__((), stays=True)
        self.unknown, self.count = unknown, count

    def answer(self, body: dict[str, Any]) -> Sequence[bytes]:
        for field in self.unknown:
            if field in body:
                return [refusal(400, f"{field} is unknown")]
        said = text("a", "length")
        if self.count and "stream_options" in body:
            prompt = body.get("prompt") or body["messages"][0]["content"]
            usage = {"prompt_tokens": self.count(prompt), "completion_tokens": 1}
            said += event({"choices": [], "usage": usage})
        return [with_length(said + DONE)]


async def look(url: str, *, endpoint: str = "completions", tokenizer: Path | None = None) -> Found:
    server = Server(Address(url), api_key="", clock=MonotonicClock())
    try:
        return await preflight.find(
            server, Dialect(endpoint=endpoint), model="m", timeout_s=30.0, tokenizer=tokenizer
        )
    finally:
        await server.close()


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_prompts_are_exact_where_words_are_tokens(endpoint: str):
    """With 7 tokens of a template, a prompt of 30 is 23 words."""
    async with serving(Picky(count=lambda t: words(t) + 7)) as server:
        found = await look(server.url, endpoint=endpoint)
    assert found.notes == []
    assert (found.wording.exact, found.wording.added) == (True, 7)
    assert words(found.wording.text([Piece("x", 30)])) == 23


async def test_digits_are_taken_where_words_are_more_than_a_token():
    async with serving(Picky(count=len)) as server:
        found = await look(server.url)
    assert (found.wording.exact, found.wording.units) == (True, "digits")
    assert len(found.wording.text([Piece("x", 30)])) == 30


async def test_where_nothing_is_a_token_prompts_come_near_and_it_is_told():
    async with serving(Picky(count=lambda t: len(t) // 3 + 1)) as server:
        found = await look(server.url)
    assert not found.wording.exact
    assert "about right" in found.wording.how
    assert len(found.wording.text([Piece("x", 3000)])) // 3 == pytest.approx(3000, rel=0.1)


async def test_a_field_that_is_refused_is_given_up_and_told():
    async with serving(Picky(unknown=["ignore_eos"], count=words)) as server:
        found = await look(server.url)
    assert not found.dialect.ignore_eos
    assert found.notes == ["the server does not know ignore_eos: answers may end early"]
    assert found.wording.exact


async def test_a_server_without_usage_is_counted_by_words_or_by_a_tokenizer(tmp_path: Path):
    async with serving(Picky(unknown=["ignore_eos", "stream_options"])) as server:
        bare = await look(server.url)
        counted = await look(server.url, tokenizer=write(tmp_path, byte_level()))
    assert not bare.dialect.usage
    assert "does not tell" in bare.wording.how
    said = counted.wording.text([Piece("x", 3000)])
    assert len(byte_level().encode(said).ids) == pytest.approx(3000, rel=0.1)


async def test_a_chat_that_wants_another_name_for_its_limit_gets_it():
    picky = Picky(unknown=["ignore_eos", "max_tokens", "temperature"], count=words)
    async with serving(picky) as server:
        found = await look(server.url, endpoint="chat")
    assert found.dialect.limit_field == "max_completion_tokens"


async def test_a_server_that_refuses_everything_is_told_with_its_words():
    async with serving(Picky(unknown=["model"])) as server:
        with pytest.raises(SetupError, match=r"refuses .*400.*model is unknown"):
            await look(server.url)


async def test_a_server_that_does_not_stream_is_refused():
    async with serving(Scripted([with_length(b'{"choices": []}\n')], stays=True)) as server:
        with pytest.raises(SetupError, match="does not answer with a stream of events"):
            await look(server.url)


async def test_nobody_there_is_said_at_once():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SetupError, match="no server answers"):
        await look(url)
    with pytest.raises(SetupError, match="no server answers"):
        await preflight.first_model(Address(url), "")


class Tired(Picky):
    """Answers once."""

    def answer(self, body: dict[str, Any]) -> Sequence[bytes]:
        return super().answer(body) if len(self.bodies) == 1 else [refusal(500, "boom")]


async def test_a_server_that_refuses_the_second_question_is_told_and_not_a_crash():
    async with serving(Tired(count=words)) as server:
        with pytest.raises(SetupError, match=r"took one short prompt and no other: HTTP 500"):
            await look(server.url)
