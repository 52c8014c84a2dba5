"""Replicas that slow one another down, told by a server that does so by known factors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scripted import DONE, HEAD, Scripted, event, refusal, serving, text

from ekiden.bench import beside
from ekiden.bench.config import BenchConfig
from ekiden.bench.workload import Drawn, Shape
from ekiden.cli.main import main
from ekiden.core.errors import SetupError

TTFT_S, ITL_S = 0.04, 0.01


class Shared(Scripted):
    """Prompts take 1.5 times as long while somebody decodes, a token twice while there are prompts
    to compute."""

    def __init__(self) -> None:
        super().__init__((), stays=True)
        self.reading = self.writing = 0
        self.refuses = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"POST") or self.refuses:
                writer.write(refusal(404))
                return
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await self._answer(json.loads(await reader.readexactly(length)), writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client, or the test, is done
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        tokens, words = body["max_tokens"], len(str(body.get("prompt") or body["messages"]).split())
        usage = {"prompt_tokens": words, "completion_tokens": tokens}
        writer.write(HEAD + b"Connection: close\r\n\r\n")
        self.reading += words > 100
        try:
            await asyncio.sleep(TTFT_S * (1.5 if self.writing else 1.0))
        finally:
            self.reading -= words > 100
        writer.write(text(" a"))
        self.writing += tokens > 1
        try:
            for _ in range(tokens - 1):
                await asyncio.sleep(ITL_S * (2.0 if self.reading else 1.0))
                writer.write(text(" a"))
                await writer.drain()
        finally:
            self.writing -= tokens > 1
        writer.write(text("", "length") + event({"choices": [], "usage": usage}) + DONE)
        await writer.drain()


def config(url: str) -> BenchConfig:
    return BenchConfig(
        url=url, workload=Drawn(shapes=(Shape(1, 1),)), workload_name="x", loads=(), timeout_s=20.0,
        model="m",
    )  # fmt: skip


async def test_known_factors_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beside, "WRITING", (Shape(16, 20), Shape(16, 31)))
    monkeypatch.setattr(beside, "ROUNDS", 1)
    async with serving(Shared()) as server:
        prompt, token = await beside.measure(config(server.url), lambda *_: None)
    assert prompt.times == pytest.approx(1.5, abs=0.2)
    assert token.times == pytest.approx(2.0, abs=0.3)


async def test_a_server_that_fails_ends_the_measurement():
    server = Shared()
    server.refuses = True
    async with serving(server), asyncio.timeout(30):
        with pytest.raises(SetupError):
            await beside.measure(config(server.url), lambda *_: None)


def test_two_pools_are_added_to_a_calibration_of_this_machine_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "here.json"
    assert main(["bench", "calibrate", "x", "--two-pools", "-o", str(out)]) != 0
    assert "--calibration here.json" in capsys.readouterr().err
    assert not out.exists()


def test_times_that_noise_makes_shorter_are_not_called_faster():
    points = [beside.Point(what="ttft", tokens=256, seconds=seconds) for seconds in (0.30, 0.29)]
    assert beside.Beside(alone=points[0], busy=points[1]).times == 1.0
    assert json.dumps(beside.Beside(alone=points[1], busy=points[0]).times)
