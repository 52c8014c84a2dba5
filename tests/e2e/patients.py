"""Deployments that are asked for something while doctor watches them."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
from ports import free_port
from stack import MODEL
from tiny_tokenizers import byte_level, write

from ekiden.cli.doctor_page import page
from ekiden.cli.main import main
from ekiden.doctor.evidence import Evidence, Objectives
from ekiden.doctor.finding import Cause, Diagnosis
from ekiden.doctor.results import read
from ekiden.doctor.symptoms import diagnose
from ekiden.doctor.watch import Watch

_seeds = itertools.count()


class Asker:
    """Clients of a gateway. Prompts are random letters, a token each: no cache helps."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url, self._http = url, http

    async def ask(self, prompt: int, answer: int) -> int:
        """One answer; the HTTP status."""
        letters = random.Random(next(_seeds)).choices("abcdefghijklmnopqrstuvwxyz", k=prompt)
        body = {
            "model": MODEL, "prompt": "".join(letters), "max_tokens": answer,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        response = await self._http.post(f"{self.url}/v1/completions", json=body)
        return response.status_code

    @asynccontextmanager
    async def asking(self, at_once: int, prompt: int, answer: int) -> AsyncIterator[None]:
        """So many clients, each asking one thing after the other while the block lasts."""

        async def client() -> None:
            while True:
                await self.ask(prompt, answer)

        tasks = [asyncio.ensure_future(client()) for _ in range(at_once)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def asker(url: str) -> AsyncIterator[Asker]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120.0, trust_env=False, limits=limits) as http:
        yield Asker(url, http)


async def watched(
    redis_url: str, url: str, seconds: float = 6.0, objectives: Objectives | None = None
) -> Diagnosis:
    """What doctor says of a deployment, printed for whoever reads a test's output."""
    evidence = await Watch(redis_url, url).run(seconds, lambda _passed: None)
    if objectives is not None:
        evidence = msgspec.structs.replace(evidence, objectives=objectives)
    return _told(evidence)


async def bench(
    url: str, file: Path, *, concurrency: int = 0, rate: int = 0, requests: int = 0
) -> Path:
    """A closed loop, or an open one, of short prompts and answers; the file with its result."""
    load = ("--rate", str(rate)) if rate else ("--concurrency", str(concurrency))
    argv = [
        *("bench", "--base-url", url, *load),
        *("--num-prompts", str(requests or 40 * concurrency), "--json", str(file)),
        *("--prompt-tokens", "64", "--output-tokens", "64"),
    ]
    assert await asyncio.to_thread(main, argv) == 0
    return file


@asynccontextmanager
async def mock_server() -> AsyncIterator[str]:
    """A server whose answers take no time; its URL."""
    port = free_port()
    argv = ("-m", "ekiden.cli", "bench", "mock", "--ttft", "0", "--itl", "0", "--port", str(port))
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=PIPE)
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


class Said(NamedTuple):
    """What the command printed, and how it ended."""

    code: int
    text: str


async def doctor(*argv: str) -> Said:
    """``ekiden doctor`` as a process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ekiden.cli", "doctor", *argv, stdout=PIPE, stderr=STDOUT
    )
    out, _ = await process.communicate()
    print(out.decode())
    return Said(process.returncode or 0, out.decode())


def judged(*files: Path) -> Diagnosis:
    """What doctor says of results of a bench."""
    return _told(Evidence(situations=tuple(one for file in files for one in read(file))))


def _told(evidence: Evidence) -> Diagnosis:
    found = diagnose(evidence)
    print(page(found))
    return found


def found_in(diagnosis: Diagnosis) -> dict[str, str]:
    """The likeliest cause of each symptom that was found."""
    return {one.requirement: one.causes[0].what for one in diagnosis.findings}


def causes_of(diagnosis: Diagnosis, requirement: str) -> tuple[Cause, ...]:
    return next(one.causes for one in diagnosis.findings if one.requirement == requirement)


def save_layers(path: Path, layers: int, spread: float = 0.02) -> None:
    """A model whose layers take most of its time, so that their number tells. ``spread``: of its
    weights; the larger, the more its tokens differ."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=8192, eos_token_id=1, bos_token_id=0, tie_word_embeddings=True,
        initializer_range=spread,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(path)
    write(path, tokenizer)
