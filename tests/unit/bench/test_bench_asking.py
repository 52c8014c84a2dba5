"""One request against a real socket: every way to end, and what each is called."""

import asyncio

import pytest
from asking_one import ASK, CLOCK, ask_once, asker
from ports import free_port
from scripted import DONE, GOOD, HEAD, Scripted, event, refusal, serving, text, with_length

from ekiden.bench import http
from ekiden.bench.http import Address
from ekiden.core.errors import SetupError

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def test_a_good_answer_is_recorded_with_what_the_server_counted():
    async with serving(Scripted([with_length(GOOD)], stays=True)) as server:
        found = await ask_once(server.url)
    assert (found.error, found.prompt_tokens, found.output_tokens) == ("", 3, 2)
    assert found.counted
    assert found.first_s is not None
    assert 0 <= found.scheduled_s <= found.sent_s <= found.first_s <= found.ended_s


async def test_the_body_asks_for_what_is_measured():
    async with serving(Scripted([with_length(GOOD)], stays=True)) as server:
        await ask_once(server.url)
    (body,) = server.bodies
    assert len(body.pop("prompt").split()) == 3
    assert body == {
        "model": "m",
        "max_tokens": 2,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("pieces", "kind", "detail"),
    [
        ([refusal(503, "no replica")], "http_503", "no replica"),
        ([refusal(429)], "http_429", "429"),
        ([with_length(text("a") + event({"error": {"message": "died"}}))], "stream_error", "died"),
        ([with_length(b"data: {nonsense\n\n")], "malformed", "no chunk"),
        ([b"SSH-2.0-OpenSSH\r\n"], "malformed", "no HTTP"),
        ([with_length(DONE)], "empty", "no text"),
        ([with_length(text("a"))], "disconnected", "without a reason to finish"),
        ([CHUNKED + chunk(text("a"))], "disconnected", "closed by the server"),
        ([], "disconnected", "closed by the server"),
        ([CHUNKED + b"zz\r\n"], "malformed", "no HTTP"),
    ],
)
async def test_each_failure_has_its_kind_and_says_more(pieces: list[bytes], kind: str, detail: str):
    async with serving(Scripted(pieces, stays=False)) as server:
        found = await ask_once(server.url)
    assert (found.error, detail in found.detail) == (kind, True), found.detail
    assert found.itl_mean_s == 0


async def test_nobody_there_is_no_connection():
    found = await ask_once(f"http://127.0.0.1:{free_port()}")
    assert found.error == "connect"


@pytest.mark.parametrize("pieces", [[], [HEAD], [CHUNKED + chunk(text("a"))]])
async def test_a_server_that_falls_silent_is_given_up_at_the_deadline(pieces: list[bytes]):
    async with serving(Scripted(pieces, stays=True)) as server:
        found = await ask_once(server.url, timeout_s=0.2)
        assert (found.error, found.detail) == ("timeout", "not ended within 0.2 s")
        async with asyncio.timeout(10):
            await server.gone.wait()  # the connection is closed, so the server can stop its work


async def test_one_connection_serves_one_request_after_another():
    async with serving(Scripted([with_length(GOOD)], stays=True)) as server, asker(server.url) as a:
        for _ in range(3):
            assert (await a.ask(a.due(ASK, CLOCK.now()))).ok
        assert server.connections == 1
        assert a.gaps.count == 3


async def test_a_connection_that_closed_while_idle_costs_no_request():
    async with (
        serving(Scripted([with_length(GOOD)], stays=False)) as server,
        asker(server.url) as a,
    ):
        for _ in range(3):
            assert (await a.ask(a.due(ASK, CLOCK.now()))).ok
        assert server.connections == 3


async def test_a_server_that_died_over_a_request_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
):
    """Only a connection that was closed before it could be used costs nothing."""
    monkeypatch.setattr(http, "LINGER_S", 0.0)
    async with serving(Scripted([with_length(GOOD)], stays=True)) as server, asker(server.url) as a:
        assert (await a.ask(a.due(ASK, CLOCK.now()))).ok
        server.pieces, server.stays = [], False
        assert (await a.ask(a.due(ASK, CLOCK.now()))).error == "disconnected"
        assert len(server.bodies) == 2


async def test_an_answer_that_ends_with_its_connection_is_whole():
    head = HEAD + b"Connection: close\r\n\r\n"
    async with serving(Scripted([head + GOOD], stays=False)) as server:
        assert (await ask_once(server.url)).ok


async def test_after_the_last_event_the_end_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http, "LINGER_S", 0.01)
    async with serving(Scripted([CHUNKED + chunk(GOOD)], stays=True)) as server:
        found = await ask_once(server.url)
        async with asyncio.timeout(10):
            await server.gone.wait()
    assert found.ok


async def test_of_a_long_refusal_only_the_beginning_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "MAX_REFUSAL", 100)
    async with serving(Scripted([refusal(500, "x" * 10_000)], stays=False)) as server:
        found = await ask_once(server.url)
    assert found.error == "http_500"
    assert len(found.detail) < 200


@pytest.mark.parametrize(
    "url", ["h:1", "ftp://h", "http://", "http://h:0", "http://h:99999", "http://h:x"]
)
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(SetupError, match="--base-url"):
        Address(url)


@pytest.mark.parametrize(
    ("url", "root", "port"),
    [
        ("http://h:81", "http://h:81", 81),
        ("http://h:81/v1/", "http://h:81", 81),
        ("https://h/api/v1", "https://h/api", 443),
        ("http://u:p@h", "http://h", 80),
    ],
)
def test_an_address_is_taken_with_and_without_its_version(url: str, root: str, port: int):
    assert (Address(url).root, Address(url).port) == (root, port)
