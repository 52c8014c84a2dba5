"""A whole deployment under measurement: `ekiden up`, and what to ask it."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

VOCABULARY = range(1000, 30000)
"""Ordinary tokens in every model that is measured."""


@contextmanager
def deployment(options: Sequence[str]) -> Iterator[str]:
    """The URL of an `ekiden up` that lasts as long as the block."""
    argv = [sys.executable, "-m", "ekiden.cli", "up", "--port", "0", *options]
    # A session of its own: Ctrl-C would reach it too, and with our signal be a second one.
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as up:
        try:
            yield _ready_url(up)
        finally:
            up.terminate()


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
