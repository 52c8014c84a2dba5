"""A server that fails: what came is written all the same, and the exit code tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from on_a_thread import on_a_thread
from scripted import GOOD, Scripted, refusal, serving, with_length

from ekiden.bench import result as results
from ekiden.cli.main import main

ANSWERED = 12


class Failing(Scripted):
    """Answers those of the measured requests that ``answered`` has, and refuses the rest."""

    def __init__(self, answered: range = range(ANSWERED)) -> None:
        super().__init__([with_length(GOOD)], stays=True)
        self.answered, self.measured = answered, 0

    def answer(self, body: dict[str, Any]) -> Sequence[bytes]:
        if body["max_tokens"] == 1:
            return self.pieces
        self.measured += 1
        return self.pieces if self.measured - 1 in self.answered else [refusal(503)]


class Mortal(Failing):
    """Instead of refusing it dies: who is connected is cut off, and nobody gets in any more."""

    listener: asyncio.Server

    def answer(self, body: dict[str, Any]) -> Sequence[bytes]:
        pieces = super().answer(body)
        if pieces is not self.pieces:
            self.listener.close()
            raise ConnectionResetError
        return pieces


@asynccontextmanager
async def mortal() -> AsyncIterator[str]:
    server = Mortal()
    server.listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.listener.sockets[0].getsockname()[1]}"
    server.listener.close()
    for task in server.tasks:
        if task is not None:
            task.cancel()
    await asyncio.sleep(0)


def bench(url: str, *more: str) -> int:
    argv = ["bench", "--base-url", url, "--model", "m", "--output-tokens", "2"]
    return main([*argv, "--num-prompts", "30", "--num-warmups", "0", *more])


def test_a_run_in_which_some_requests_failed_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "r.json"
    with on_a_thread(lambda: serving(Failing())) as server:
        assert bench(server.url, "--concurrency", "2", "--json", str(path)) == 1
    (level,) = results.read(path).levels
    assert (level.succeeded, level.errors) == (ANSWERED, {"http_503": 30 - ANSWERED})
    assert "http_503" in capsys.readouterr().out


def test_an_open_loop_whose_server_dies_midway_writes_every_level(tmp_path: Path):
    path = tmp_path / "r.json"
    with on_a_thread(mortal) as url:
        assert bench(url, "--rate", "60,200", "--json", str(path)) == 1
    before, after = results.read(path).levels
    assert (before.requests, before.succeeded) == (30, ANSWERED)
    assert set(before.errors) <= {"connect", "disconnected"}
    assert before.ttft_ms.count == ANSWERED
    assert (after.requests, after.succeeded) == (30, 0)


def test_a_sweep_ends_with_1_where_only_its_first_level_failed(tmp_path: Path):
    path = tmp_path / "r.json"
    with on_a_thread(lambda: serving(Failing(range(10, 60)))) as server:
        assert bench(server.url, "--concurrency", "2,3", "--json", str(path)) == 1
    assert [bool(level.errors) for level in results.read(path).levels] == [True, False]
