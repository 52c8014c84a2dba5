"""The arithmetic of every figure, on records made by hand: no clock has a part in it."""

import math

import numpy as np
import pytest
from bench_records import level_of, record
from hypothesis import given
from hypothesis import strategies as st

from ekiden.bench.record import Account
from ekiden.bench.service import Gauges, service
from ekiden.measures.goodput import Slo
from ekiden.measures.spread import spread


def test_times_count_from_the_scheduled_moment_and_from_sending_too():
    level = level_of([record()])
    assert level.ttft_ms.p50 == pytest.approx(500)
    assert level.ttft_from_send_ms.p50 == pytest.approx(400)
    assert level.e2e_ms.p50 == pytest.approx(1500)
    assert level.e2e_from_send_ms.p50 == pytest.approx(1400)
    assert level.schedule_lag_ms.p50 == pytest.approx(100)


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it():
    assert level_of([record()]).tpot_ms.p50 == pytest.approx(100)
    assert level_of([record(output_tokens=1)]).tpot_ms.count == 0


def test_a_late_client_is_named():
    assert any("sent late (P99 100.0 ms)" in note for note in level_of([record()]).notes)
    assert level_of([record(sent_s=1.001)]).notes == []


def test_rates_are_over_the_time_from_the_first_sent_to_the_last_ended():
    level = level_of([record(0), record(1, sent_s=3.0, scheduled_s=3.0, first_s=3.1, ended_s=5.1)])
    assert level.duration_s == pytest.approx(4.0)
    assert level.requests_per_s == pytest.approx(0.5)
    assert level.output_tokens_per_s == pytest.approx(22 / 4)
    assert level.total_tokens_per_s == pytest.approx(32 / 4)


def test_failures_are_counted_by_kind_and_leave_no_time_behind():
    bad = [record(i, error="timeout", detail=f"d{i}", ended_s=99.0) for i in (1, 2)]
    level = level_of([record(0), *bad, record(3, error="http_503", detail="busy")])
    assert level.errors == {"timeout": 2, "http_503": 1}
    assert level.error_details == {"timeout": "d1", "http_503": "busy"}
    assert (level.succeeded, level.error_rate) == (1, 0.75)
    assert level.ttft_ms.count == 1
    assert level.output_tokens_per_s == pytest.approx(11 / (99 - 1.1))


@pytest.mark.parametrize(
    ("slo", "share"),
    [
        (Slo(ttft_ms=501), 1.0),
        (Slo(ttft_ms=499), 0.5),
        (Slo(ttft_ms=501, tpot_ms=99), 0.5),
        (Slo(e2e_ms=1499), 0.5),
    ],
)
def test_goodput_counts_who_met_every_part_of_the_slo(slo: Slo, share: float):
    quick = record(1, first_s=1.2, ended_s=1.9, scheduled_s=1.1)
    good = level_of([record(0), quick], slo=slo).goodput
    assert good is not None
    assert good.share == share
    assert good.requests_per_s == pytest.approx(2 * share / 1.4)


def test_a_failed_request_is_no_goodput():
    good = level_of([record(0), record(1, error="timeout")], slo=Slo(ttft_ms=1e9)).goodput
    assert good is not None
    assert good.share == 0.5


def test_short_answers_are_counted_and_events_are_not_passed_off_as_usage():
    level = level_of([record(0), record(1, output_tokens=3, counted=False)])
    assert level.short_answers == 1
    assert not level.counted_by_server


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=100))
def test_percentiles_are_linear_between_ranks(values: list[float]):
    found = spread(values)
    for percent in (50, 90, 95, 99):
        assert getattr(found, f"p{percent}") == pytest.approx(np.percentile(values, percent))
    assert found.mean == pytest.approx(math.fsum(values) / len(values))


def test_samples_stand_in_the_order_in_which_they_were_due():
    level = level_of([record(2, scheduled_s=1.4), record(1, scheduled_s=1.0)])
    assert level.samples.index == [1, 2]


def test_a_failed_request_leaves_no_time_per_token_in_the_samples():
    samples = level_of([record(0), record(1, error="disconnected")]).samples
    assert samples.tpot_ms == [pytest.approx(100), None]
    assert samples.itl_std_ms == [0.0, None]


def account(decode: str, cached: int, computed: int, **more: object) -> Account:
    return Account(
        sources={"decode_cache": cached, "prefill_computed": computed},
        times={"queue_s": 0.25},
        decode_replica=decode,
        **more,
    )


def test_our_services_tell_sources_balance_phases_and_wires():
    told = service(
        [
            record(0, account=account("d-0", 60, 40, wire="shm", moved_bytes=10)),
            record(1, account=account("d-0", 0, 100, wire="shm", moved_bytes=5)),
            record(2, account=account("d-1", 0, 0, fallbacks=("local_prefill",))),
            record(3, error="timeout", account=account("d-1", 0, 900)),
        ],
        {},
    )
    assert told is not None
    assert told.prompt_sources == {"decode_cache": 60, "prefill_computed": 140}
    assert told.cache_hit_share == pytest.approx(0.3)
    assert told.imbalance == {"decode": pytest.approx(22 / 16.5)}
    assert told.phases_ms["queue"].p50 == pytest.approx(250)
    assert (told.wires, told.fallbacks) == ({"shm": 15}, {"local_prefill": 1})


def test_of_another_server_there_is_nothing_to_tell():
    assert service([record()], {}) is None


def test_gauges_are_kept_by_name_and_replica_and_others_are_let_be():
    gauges = Gauges()
    for used in (0.25, 0.75):
        gauges.read(
            f'ekiden_kv_used_ratio{{replica="d-1"}} {used}\n'
            f'ekiden_stage_idle_ratio{{replica="d-1",stage="2"}} 0.5\n'
            "ekiden_gateway_in_flight 3\npython_gc_objects 9\n"
        )
    found = gauges.spreads()
    assert set(found) == {"KV in use", "stage idle", "requests in flight"}
    assert found["KV in use"]["d-1"].mean == 0.5
    assert found["stage idle"]["d-1 2"].max == 0.5
    assert found["requests in flight"][""].count == 2


def test_a_replica_is_told_with_its_split_where_the_gateway_knows_it():
    gauges = Gauges()
    gauges.read('ekiden_replica_ranks{replica="d-0",role="decode",model="m",tp="2",pp="3"} 6\n')
    assert gauges.spreads() == {}
    rows = [record(0, account=account("d-0", 0, 9)), record(1, account=account("d-1", 0, 9))]
    told = service(rows, {}, gauges.splits)
    assert told is not None
    assert [(one.replica, one.tp, one.pp) for one in told.replicas] == [
        ("d-0", 2, 3),
        ("d-1", 0, 0),
    ]
