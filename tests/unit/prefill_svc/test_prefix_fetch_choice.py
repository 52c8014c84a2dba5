"""When prefill fetches a prefix, and that a fetch which fails costs nothing but its time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ekiden.core.errors import Overloaded
from ekiden.core.types import Request, SamplingParams
from ekiden.engine.engine import Reservation
from ekiden.rpc import prefill_pb2 as pb
from kv_transfer.session import Arrived, Failed
from prefill_svc.fetch import PrefixFetch

PROMPT = tuple(range(100))
TOKEN_BYTES = 1000


class Core:
    """As much of a prefill replica as a fetch asks for: 16 of the prompt's tokens are cached."""

    def __init__(self, tokens_per_s: float = 1000.0, *, room: bool = True) -> None:
        kv = SimpleNamespace(block_size=16, token_bytes=lambda: TOKEN_BYTES)
        self.me = SimpleNamespace(kv=kv)
        stats = SimpleNamespace(prefill_tokens_per_s=tokens_per_s)
        self.replica = SimpleNamespace(stats=lambda: stats)
        self.bridge = self
        self.room = room
        self.refuses = False
        self.opened: list[tuple[int, int, str]] = []
        self.failed: list[str] = []
        self.freed: list[int] = []
        self.published: list[int] = []

    async def call(self, function: Any) -> Any:
        return function(self)

    def post(self, function: Any) -> None:
        function(self)

    def cached_prefix(self, request: Request) -> int:
        return 16

    def hold_prefix(self, tokens: tuple[int, ...], salt: str) -> Reservation | None:
        blocks = tuple(range(len(tokens) // 16))
        return Reservation(key=5, blocks=blocks, held_tokens=16) if self.room else None

    def writer_done(self, key: int) -> None:
        self.freed.append(key)

    def publish_prefix(self, tokens: tuple[int, ...], salt: str, blocks: tuple[int, ...]) -> None:
        self.published.append(len(tokens))

    def open_fetch(
        self, fetching: Any, peer: Any, start: int, end: int, blocks: Any, wire: str
    ) -> tuple[int, bytes]:
        if self.refuses:
            raise Overloaded("too many sessions")
        self.opened.append((start, end, wire))
        return 3, b"offer"

    def seal_fetch(self, session: int, seal: bytes) -> None:
        assert (session, seal) == (3, b"seal")

    def fail_session(self, session: int, reason: str) -> None:
        self.failed.append(reason)


def fetch_of(core: Core, *, held: int = 90, wire: str = "tcp", rate: float = 1e9) -> PrefixFetch:
    sampling = SamplingParams(seed=1, max_tokens=1)
    request = Request(request_id="r", model="m", prompt=PROMPT, sampling=sampling)
    reserved = pb.Reserved(held_tokens=held, lend_wire=wire, lend_bytes_per_s=rate)
    return PrefixFetch(core, request, reserved, SimpleNamespace())  # type: ignore[arg-type]


async def test_what_is_missing_of_whole_blocks_is_asked_for() -> None:
    core = Core()
    assert await fetch_of(core).begin() == b"offer"
    assert core.opened == [(16, 80, "tcp")]


@pytest.mark.parametrize(
    ("core", "case"),
    [
        (Core(), {"wire": ""}),  # decode lends nothing
        (Core(), {"held": 31}),  # no whole block more than is cached
        (Core(tokens_per_s=0.0), {}),  # nothing has been computed yet: nobody knows how fast
        (Core(tokens_per_s=1e6), {}),  # computing 64 tokens takes less than talking about it
        (Core(), {"rate": 1e6}),  # the wire takes as long as computing
        (Core(room=False), {}),
    ],
)
async def test_nothing_is_fetched_where_it_would_not_pay(core: Core, case: dict[str, Any]) -> None:
    fetch = fetch_of(core, **case)
    assert await fetch.begin() is None
    assert (core.opened, core.freed, fetch.failure) == ([], [], "")


async def test_what_has_arrived_is_published_and_counted() -> None:
    core = Core()
    fetch = fetch_of(core)
    await fetch.begin()
    fetch.on_arrived(Arrived(session=3, bytes=64_000, seconds=0.1, wire="tcp"))
    await fetch.finish(pb.Lent(seal=b"seal"))
    fetch.abandon()
    assert (fetch.tokens, fetch.bytes, fetch.failure) == (64, 64_000, "")
    assert (core.published, core.failed) == ([80], [])


async def test_a_refusal_is_told_and_the_session_given_up() -> None:
    core = Core()
    fetch = fetch_of(core)
    await fetch.begin()
    await fetch.finish(pb.Lent(refusal="the prefix is gone"))
    fetch.abandon()
    assert (fetch.tokens, fetch.failure) == (0, "the prefix is gone")
    assert core.failed == ["the fetch was given up"]
    assert core.published == []


async def test_a_transfer_that_fails_is_told() -> None:
    core = Core()
    fetch = fetch_of(core)
    await fetch.begin()
    fetch.on_failed(Failed(session=3, reason="the peer is gone", state="moving", peer="d-1"))
    await fetch.finish(pb.Lent(seal=b"seal"))
    fetch.abandon()
    assert (fetch.tokens, fetch.failure) == (0, "the peer is gone")
    assert core.failed == []


async def test_a_session_that_cannot_be_opened_gives_its_blocks_back() -> None:
    core = Core()
    core.refuses = True
    fetch = fetch_of(core)
    assert await fetch.begin() is None
    assert fetch.failure == "too many sessions"
    assert core.freed == [5]


async def test_blocks_that_come_when_the_call_has_ended_are_given_back() -> None:
    core = Core()
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    fetch = fetch_of(core)
    now = core.call

    async def call(function: Any) -> Any:
        result = await now(function)
        return await asyncio.shield(answer) if isinstance(result, Reservation) else result

    core.call = call  # type: ignore[method-assign]
    beginning = asyncio.ensure_future(fetch.begin())
    await asyncio.sleep(0.01)
    beginning.cancel()
    await asyncio.sleep(0.01)
    assert (beginning.cancelled(), core.freed) == (True, [])
    answer.set_result(Reservation(key=5, blocks=(0, 1), held_tokens=16))
    await asyncio.sleep(0.01)
    assert (core.freed, core.opened) == ([5], [])
