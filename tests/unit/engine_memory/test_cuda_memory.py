"""Cards are asked in a process of their own, and what cannot be asked is said in one sentence."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ekiden.core.errors import SetupError
from ekiden.engine import cuda_memory
from ekiden.engine.cuda_memory import CardMemory, probe


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    probe.cache_clear()
    yield
    probe.cache_clear()


def answer(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    def run(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        if isinstance(outcome, Exception):
            raise outcome
        return subprocess.CompletedProcess([], 0, stdout=outcome)

    monkeypatch.setattr(cuda_memory.subprocess, "run", run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_a_machine_without_cards_is_told_so_by_the_child_itself() -> None:
    with pytest.raises(SetupError, match="finds no card: choose --device cpu"):
        probe()


def test_what_a_library_prints_before_the_answer_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer(monkeypatch, b'a warning\n[{"free": 5, "total": 8}, {"free": 6, "total": 9}]\n')
    assert probe() == (CardMemory(free=5, total=8), CardMemory(free=6, total=9))


def test_the_last_words_of_a_child_that_failed_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CalledProcessError(1, "x", stderr=b"Traceback\nRuntimeError: no driver\n")
    answer(monkeypatch, failed)
    with pytest.raises(SetupError, match="asked for its memory: RuntimeError: no driver"):
        probe()


def test_a_card_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, subprocess.TimeoutExpired("x", 1))
    with pytest.raises(SetupError, match="within 120 s"):
        probe()
