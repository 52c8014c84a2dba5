"""How many sequences are decoded at once: the distribution against closed cases and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import stepper

from ekiden.planner import crowd
from ekiden.planner.crowd import quantiles
from ekiden.planner.serving import aggregated
from ekiden.planner.workload import workload

CHAT = workload("chat", rate=None)
MOST = 400.0


@pytest.fixture
def same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes 20 ms however many are decoded."""
    sizes = np.array([1.0, MOST])
    monkeypatch.setattr(crowd, "_times", lambda *_: (sizes, 0.02 + 0 * sizes, 0 * sizes))


@pytest.mark.usefixtures("same_time")
def test_tokens_that_take_the_same_time_in_any_batch_make_poissons_crowd():
    mean = 60.0
    rate = mean / 0.02 / CHAT.output
    found = quantiles(stepper("Llama-3.1-8B", "A6000"), CHAT, rate, MOST, prompts=True)
    chance, below, expected = math.exp(-mean), 0.0, {}
    for n in range(200):
        below += chance
        for q in (50, 95, 99):
            if below >= q / 100:
                expected.setdefault(q, n)
        chance *= mean / (n + 1)
    assert found == pytest.approx(expected, abs=1.0)


def test_the_chain_is_that_of_its_balance_equations():
    one, rate, most = stepper("Llama-3.1-8B", "A6000"), 15.6, 500
    found = quantiles(one, CHAT, rate, most, prompts=False)
    share = [1.0]
    for n in range(1, most + 1):
        leave = n / (CHAT.output * one.decode(n, CHAT.context).total)
        share.append(share[-1] * rate / leave)
    below = np.cumsum(share) / np.sum(share)
    for q, sequences in found.items():
        exact = int(np.searchsorted(below, q / 100))
        assert sequences == pytest.approx(exact, rel=0.03, abs=1.0)


@given(rate=st.floats(0.1, 15.0))
def test_crowds_are_wider_than_poissons_the_more_so_near_the_most(rate: float):
    found = quantiles(stepper("Llama-3.1-8B", "A6000"), CHAT, rate, MOST, prompts=True)
    assert found[50] <= found[95] <= found[99] <= MOST + 0.5
    spread = (found[95] - found[50]) / 1.645
    assert spread >= 0.9 * math.sqrt(max(found[50], 1.0)) - 1


def test_near_the_most_that_is_served_tpot_at_p95_is_far_from_its_median():
    one = stepper("Llama-3.1-8B", "A6000", length=1024)
    calm, crowded = (aggregated(one, CHAT, rate, 1) for rate in (10.0, 15.6))
    assert calm.tpot_p95 < 1.15 * calm.tpot_p50
    assert crowded.tpot_p95 > 1.2 * crowded.tpot_p50


def test_nobody_there_is_no_crowd():
    found = quantiles(stepper("Llama-3.1-8B", "A6000"), CHAT, 1e-6, MOST, prompts=True)
    assert found[99] < 1.0
