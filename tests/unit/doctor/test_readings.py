"""From what a registry and a gateway told, second by second, to one situation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ekiden.core.types import (
    Completion,
    KvWire,
    ReplicaStats,
    TimeSplit,
    TokenSources,
    TransferStats,
)
from ekiden.doctor.evidence import Wire
from ekiden.doctor.readings import Reading, situation
from ekiden.doctor.scrape import read_scrape
from ekiden.registry.record import DRAINING, READY, UNWELL, ReplicaRecord
from gateway.metrics import Metrics

CHAT = "/v1/chat/completions"


def record(name: str = "d-1", *, status: str = READY, epoch: int = 1, **stats: Any) -> Any:
    return ReplicaRecord(
        id=name, role="prefill" if name.startswith("p") else "decode", model="m",
        address="10.0.0.7:7000", epoch=epoch, version="0", block_size=16, granule=16, tp=2,
        max_num_seqs=32, max_model_len=100, status=status, stats=ReplicaStats(**stats),
    )  # fmt: skip


def looks(*records: tuple[ReplicaRecord, ...]) -> list[Reading]:
    return [Reading(records=look) for look in records]


class Gateway:
    """The gateway's own metrics."""

    def __init__(self, *records: ReplicaRecord) -> None:
        self.metrics = Metrics()
        self._fleet: Any = SimpleNamespace(stale_for_s=0.0, replicas=lambda: records)

    def answer(self, queue_s: float) -> None:
        self.metrics.answered(CHAT, 200)
        self.metrics.first_token("m", queue_s + 0.1)
        account = Completion(
            request_id="r",
            prompt_tokens=100,
            completion_tokens=5,
            sources=TokenSources(decode_cache=40, prefill_computed=60),
            times=TimeSplit(queue_s=queue_s, prefill_s=0.1, transfer_s=0.02, decode_s=0.2),
            transfer=TransferStats(bytes=1000, seconds=0.02, wire="shm"),
        )
        self.metrics.finished("m", account, choices=1, predicted_cached=50)

    def reading(self, at: float) -> Reading:
        text = self.metrics.render(self._fleet).decode()
        return Reading(scrape=read_scrape(text, at))


def test_load_is_a_mean_over_the_readings_and_speed_is_the_last_one() -> None:
    found = situation(
        looks(
            (record(running=2, receiving=1, kv_blocks_total=100, kv_blocks_held=50, step_s=0.1),),
            (record(running=4, waiting=3, kv_blocks_total=100, kv_blocks_held=95, step_s=0.2),),
        ),
        1.0,
    )
    (replica,) = found.replicas
    assert (replica.running, replica.waiting, replica.receiving) == (3.0, 1.5, 0.5)
    assert (replica.kv_share, replica.kv_peak) == (pytest.approx(0.725), 0.95)
    assert (replica.step_s, replica.readings, replica.tp, replica.max_num_seqs) == (0.2, 2, 2, 32)
    assert (replica.host, replica.kv_tokens) == ("10.0.0.7", 1600)
    assert found.answers is None


def test_wires_are_those_that_decode_tells() -> None:
    wire = KvWire(peer="p-1", wire="shm", bytes_per_s=5e9)
    (replica,) = situation(looks((record(wires=(wire,)),)), 1.0).replicas
    assert replica.wires == (Wire(peer="p-1", wire="shm", bytes_per_s=5e9),)


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        (record(), None, "gone"),
        (record(status=DRAINING), None, ""),
        (record(), record(epoch=2), "restarted"),
        (record(), record(status=UNWELL), "unwell"),
        (record(status=UNWELL), record(), ""),
        (record(), record(), ""),
    ],
)
def test_what_became_of_a_replica(before: Any, after: Any, lost: str) -> None:
    (replica,) = situation(looks((before,), (after,) if after else ()), 1.0).replicas
    assert replica.lost == lost


def test_answers_are_those_between_the_first_reading_and_the_last() -> None:
    gateway = Gateway()
    gateway.answer(9.0)
    first = gateway.reading(10.0)
    for _ in range(4):
        gateway.answer(0.5)
    gateway.metrics.in_flight.set(6)
    found = situation([first, gateway.reading(12.0)], 2.0)
    answers = found.answers
    assert answers is not None
    assert answers.count == answers.ttft.count == answers.tpot.count == 4
    assert answers.phases["queue"] == pytest.approx(0.5)
    assert answers.phases["transfer"] == pytest.approx(0.02)
    assert answers.ttft.mean == pytest.approx(0.6)
    assert answers.ttft.p50 <= answers.ttft.p95 <= 1.0
    assert (answers.prompt_tokens, answers.output_tokens) == (100.0, 5.0)
    assert answers.tokens_per_s == 10.0
    assert answers.cached_share == pytest.approx(0.4)
    assert answers.predicted_cached == 200
    assert answers.moved == {"shm": 4000.0}
    assert found.in_flight == 3.0


def test_what_the_client_did_wrong_is_no_failure_of_the_deployment() -> None:
    gateway = Gateway()
    first = gateway.reading(0.0)
    for status in (400, 401, 429, 503, 503):
        gateway.metrics.answered(CHAT, status)
    gateway.metrics.answered("/metrics", 500)
    answers = situation([first, gateway.reading(1.0)], 1.0).answers
    assert answers is not None
    assert answers.errors == {"429": 1, "503": 2}


def test_without_a_registry_the_gateway_tells_of_its_replicas() -> None:
    gateway = Gateway(
        record(
            running=3, waiting=1, receiving=2, kv_blocks_total=10, kv_blocks_held=4,
            collective_share=0.25, stage_idle=(0.1, 0.3),
        ),
        record("p-1"),
    )  # fmt: skip
    decode, prefill = situation([gateway.reading(0.0), gateway.reading(1.0)], 1.0).replicas
    assert (decode.id, decode.role, decode.tp) == ("d-1", "decode", 2)
    assert (decode.running, decode.waiting, decode.receiving) == (3.0, 1.0, 2.0)
    assert decode.stage_idle == (0.1, 0.3)
    assert (decode.kv_share, decode.collective_share) == (pytest.approx(0.4), 0.25)
    assert (prefill.role, prefill.model) == ("prefill", "m")


def test_a_reading_that_failed_in_between_is_left_out() -> None:
    gateway = Gateway()
    gateway.answer(0.1)
    first = gateway.reading(0.0)
    gateway.answer(0.1)
    found = situation([first, Reading(), gateway.reading(2.0)], 2.0)
    assert found.answers is not None
    assert found.answers.count == 1
    assert msgspec.json.encode(found)
