"""A whole deployment under measurement: `ekiden up`, and clients that stream from it."""

from __future__ import annotations

import itertools
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from ekiden.cli.chat import server_events

VOCABULARY = range(1000, 30000)
"""Ordinary tokens in every model that is measured."""
REQUEST_TIMEOUT_S = 600.0


class Sample(NamedTuple):
    """One request. Seconds; ``usage`` is the gateway's."""

    ttft: float
    total: float
    tokens: int
    usage: dict[str, Any]
    gaps: list[float]
    """Between one event with tokens and the next: the inter-token latencies."""

    @property
    def tpot(self) -> float:
        return (self.total - self.ttft) / max(1, self.tokens - 1)

    @property
    def added_by_gateway(self) -> float:
        return self.total - float(sum(self.account["times"].values()))

    @property
    def account(self) -> dict[str, Any]:
        account: dict[str, Any] = self.usage["ekiden"]
        return account


@contextmanager
def deployment(options: Sequence[str]) -> Iterator[str]:
    """The URL of an `ekiden up` that lasts as long as the block."""
    argv = [sys.executable, "-m", "ekiden.cli", "up", "--port", "0", *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as up:
        try:
            yield _ready_url(up)
        finally:
            up.terminate()


@contextmanager
def client(url: str) -> Iterator[tuple[httpx.Client, str]]:
    """A client of the gateway, and the model that it serves."""
    with httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S) as http:
        yield http, str(http.get("/v1/models").json()["data"][0]["id"])


def _ready_url(up: subprocess.Popen[str]) -> str:
    """`ekiden up` has a deadline of its own for getting ready, and closes its output after it."""
    assert up.stdout is not None
    for line in up.stdout:
        if match := re.match(r"ready: .* on (http\S+)", line):
            return match[1]
    sys.exit("bench: `ekiden up` did not get ready")


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def prompt_of(chance: random.Random, tokens: int) -> list[int]:
    """Token ids at random, so that nothing is found in a cache."""
    return chance.choices(VOCABULARY, k=tokens)


def ask(http: httpx.Client, model: str, prompt: list[int], tokens: int) -> Sample:
    """Stream ``tokens`` tokens, greedy. Exits the program on an HTTP error."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    times: list[float] = []
    usage: dict[str, Any] = {}
    with http.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            sys.exit(f"bench: HTTP {response.status_code}: {response.read().decode()}")
        for event in server_events(response.iter_lines()):
            if event["choices"]:
                times.append(time.monotonic())
            usage = event.get("usage") or usage
    gaps = [after - before for before, after in itertools.pairwise(times)]
    ended = time.monotonic() - began
    return Sample(times[0] - began, ended, usage["completion_tokens"], usage, gaps)
