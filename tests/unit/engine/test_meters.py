"""What stages and collectives took of the time, from the ranks' figures to the scrape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ekiden.cache.block_pool import BlockPool
from ekiden.core.types import ReplicaStats
from ekiden.engine.meters import KEPT, Meters, replica_stats
from ekiden.engine.plan import StepResult
from ekiden.engine.scheduling.queues import Queues
from gateway.metrics import Metrics

DECODE: dict[str, Any] = {"role": "decode", "model": "m", "tp": 1, "pp": 1}


def ended(meters: Meters, at: float, now: float, *stages: float, collective: float = 0.0) -> None:
    result = StepResult(
        1, (), compute_s=max(stages), collective_s=collective, stage_s=tuple(stages)
    )
    meters.step_ended([], result, at, now)


def test_a_stage_idles_while_steps_are_in_flight_and_it_computes_none() -> None:
    meters = Meters()
    assert replica_stats(Queues(), BlockPool(1), meters).stage_idle == ()
    ended(meters, 0.0, 4.0, 3.0, 1.0, collective=1.5)
    # Submitted while the first one ran: it counts from that one's end. Nothing counts in between.
    ended(meters, 2.0, 5.0, 1.0, 0.5)
    ended(meters, 100.0, 101.0, 0.0, 1.0)
    stats = replica_stats(Queues(), BlockPool(1), meters)
    busy = 4 * KEPT**2 + KEPT + 1
    assert stats.stage_idle == pytest.approx(
        (1 - (3 * KEPT**2 + KEPT) / busy, 1 - (KEPT**2 + KEPT / 2 + 1) / busy)
    )
    assert stats.collective_share == pytest.approx(1.5 * KEPT**2 / (3 * KEPT**2 + KEPT + 1))


def test_the_gateway_shows_them_by_replica_and_stage_and_forgets_who_left() -> None:
    meters = Meters()
    ended(meters, 0.0, 4.0, 3.0, 1.0, collective=1.5)
    record = SimpleNamespace(
        **DECODE, id="d-1", stats=replica_stats(Queues(), BlockPool(1), meters)
    )
    fleet: Any = SimpleNamespace(stale_for_s=0.0, replicas=lambda: [record])
    metrics = Metrics()
    text = metrics.render(fleet).decode()
    assert 'ekiden_stage_idle_ratio{replica="d-1",stage="1"} 0.75' in text
    assert 'ekiden_collective_ratio{replica="d-1"} 0.5' in text
    fleet.replicas = list
    assert "d-1" not in metrics.render(fleet).decode()


def test_the_gateway_shows_a_replicas_requests_and_the_share_of_its_blocks_that_are_held() -> None:
    stats = ReplicaStats(
        running=3, waiting=2, receiving=4, kv_blocks_total=40, kv_blocks_held=10, kv_blocks_cached=5
    )
    bare = SimpleNamespace(**DECODE, id="d-2", stats=ReplicaStats())
    record = SimpleNamespace(**DECODE, id="d-1", stats=stats)
    fleet: Any = SimpleNamespace(stale_for_s=0.0, replicas=lambda: [record, bare])
    metrics = Metrics()
    text = metrics.render(fleet).decode()
    assert 'ekiden_running_requests{replica="d-1"} 3.0' in text
    assert 'ekiden_waiting_requests{replica="d-1"} 2.0' in text
    assert 'ekiden_receiving_requests{replica="d-1"} 4.0' in text
    assert 'ekiden_kv_used_ratio{replica="d-1"} 0.25' in text
    assert 'ekiden_kv_used_ratio{replica="d-2"}' not in text
    fleet.replicas = list
    assert "d-1" not in metrics.render(fleet).decode()


def test_a_long_prefill_step_says_more_of_the_speed_than_many_short_ones() -> None:
    meters = Meters()
    for _ in range(5):
        meters.measured(0, 16, 0.01)
        meters.measured(0, 2048, 0.06)
    speed = replica_stats(Queues(), BlockPool(4), meters).prefill_tokens_per_s
    assert 0.95 < speed / (5 * 2064 / 0.35) < 1.05


def test_the_rows_that_are_told_are_those_of_the_steps_that_were_measured() -> None:
    """So that the router can tell a slow machine from a full one."""
    meters = Meters()
    for rows in (8, 8, 2, 2):
        meters.measured(rows, 0, 0.001 * rows)
    meters.measured(3, 500, 9.0)
    found = replica_stats(Queues(), BlockPool(4), meters)
    assert 4.8 < found.step_rows < 5.2
    assert abs(found.step_s / found.step_rows - 0.001) < 1e-9
