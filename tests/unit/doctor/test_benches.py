"""From a result of a bench, as the bench writes it, to one situation a level."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ekiden.bench.result import SCHEMA, Level, ReplicaShare, Result, Samples, Service, write
from ekiden.core.errors import SetupError
from ekiden.doctor.evidence import Answers, Client, Evidence, Load, Situation
from ekiden.doctor.results import KINDS, read
from ekiden.doctor.symptoms import diagnose
from ekiden.measures.goodput import Slo
from ekiden.measures.spread import Spread
from ekiden.sim import figures

MS = Spread(count=40, mean=50.0, p50=40.0, p95=60.0, p99=70.0)
GAUGES = {
    "requests in flight": {"": Spread(count=9, mean=7.5)},
    "requests running": {"d-1": Spread(count=9, mean=5.0), "p-1": Spread(count=9, mean=1.0)},
    "requests waiting": {"d-1": Spread(count=9, mean=2.0)},
    "requests receiving KV": {"d-1": Spread(count=9, mean=3.0)},
    "KV in use": {"d-1": Spread(count=9, mean=0.5, max=0.8)},
    "communication share": {"d-1": Spread(count=9, mean=0.2)},
    "stage idle": {"d-1 0": Spread(count=9, mean=0.1), "d-1 1": Spread(count=9, mean=0.3)},
}
SERVICE = Service(
    prompt_sources={"prefill_computed": 3000, "decode_cache": 1000},
    phases_ms={"queue": Spread(count=40, mean=12.0)},
    replicas=[
        ReplicaShare(role="decode", replica="d-1", requests=40, tokens=400, tp=2, pp=2),
        ReplicaShare(role="prefill", replica="p-1", requests=40, tokens=4000),
    ],
    fallbacks={"preempted": 2},
    wires={"shm": 9000},
    gauges=GAUGES,
)


def level(**more: Any) -> Level:
    times = ("ttft", "tpot", "itl", "itl_jitter", "e2e", "e2e_from_send")
    nothing = {field: [] for field in Samples.__struct_fields__}
    given: dict[str, Any] = {
        "name": "concurrency 8", "load": "concurrency", "value": 8.0, "requests": 42,
        "succeeded": 40, "errors": {"http_503": 2}, "error_details": {"http_503": "why"},
        "error_rate": 0.05, "duration_s": 9.0, "requests_per_s": 4.0,
        "output_tokens_per_s": 400.0, "total_tokens_per_s": 800.0, "goodput": None,
        "short_answers": 0, "counted_by_server": True, "client_cpu_share": 0.25,
        "service": SERVICE, "notes": [], "itl_histogram": [], "samples": Samples(**nothing),
        "schedule_lag_ms": Spread(count=42, p99=3.0), "prompt_tokens": Spread(mean=100.0),
        "output_tokens": Spread(mean=10.0),
        "ttft_from_send_ms": Spread(count=40, mean=30.0, p50=30.0, p95=35.0, p99=39.0),
        **{f"{name}_ms": MS for name in times},
    }  # fmt: skip
    return Level(**(given | more))


def told(path: Path, *levels: Level) -> list[Situation]:
    """What doctor makes of the file that the bench writes."""
    result = Result(
        version="0", started="-", url="http://s", model="m", endpoint="completions",
        workload="short-short", arrival="poisson", seed=0, processes=1, prompts="exact",
        slo=Slo(), notes=[], levels=list(levels),
    )  # fmt: skip
    write(path, result)
    return read(path)


def test_what_clients_saw_is_in_seconds_and_counts_from_sending(tmp_path: Path) -> None:
    (found,) = told(tmp_path / "run.json", level())
    answers = found.answers
    assert answers is not None
    assert (found.name, found.seconds) == ("run.json, concurrency 8", 9.0)
    assert found.load == Load(kind="concurrency", value=8.0)
    assert (answers.count, answers.errors, answers.failed) == (40, {"http_503": 2}, 2)
    assert (answers.ttft.p50, answers.ttft.p95, answers.ttft.mean) == (0.03, 0.035, 0.03)
    assert (answers.tpot.p50, answers.tpot.p99) == (0.04, 0.07)
    assert (answers.prompt_tokens, answers.output_tokens) == (100.0, 10.0)
    assert found.client is not None
    assert (found.client.cpu_share, found.client.lag_p99_s) == (0.25, 0.003)


def test_what_our_services_told_is_by_replica(tmp_path: Path) -> None:
    (found,) = told(tmp_path / "run.json", level())
    answers, (decode,), (prefill,) = found.answers, found.of("decode"), found.of("prefill")
    assert answers is not None
    assert answers.phases == {"queue": 0.012}
    assert answers.cached_share == 0.25
    assert (answers.fallbacks, answers.moved) == ({"preempted": 2}, {"shm": 9000.0})
    assert answers.shares == {"decode": {"d-1": 400}, "prefill": {"p-1": 4000}}
    assert (decode.tp, decode.pp, decode.readings) == (2, 2, 9)
    assert (decode.running, decode.waiting, decode.receiving) == (5.0, 2.0, 3.0)
    assert (decode.kv_share, decode.kv_peak, decode.collective_share) == (0.5, 0.8, 0.2)
    assert decode.stage_idle == (0.1, 0.3)
    assert (prefill.running, prefill.tp) == (1.0, 0)
    assert found.in_flight == 7.5


def test_a_server_of_somebody_else_is_judged_by_what_clients_saw(tmp_path: Path) -> None:
    (found,) = told(tmp_path / "run.json", level(service=None))
    assert found.replicas == ()
    assert found.in_flight is None
    assert found.answers is not None
    assert found.answers.tpot.p50 == pytest.approx(0.04)


def test_each_level_is_a_situation_and_a_rate_without_end_is_infinite(tmp_path: Path) -> None:
    first, second = told(tmp_path / "run.json", level(), level(name="inf", load="rate", value=None))
    assert first.load != second.load == Load(kind="rate", value=math.inf)


def test_schemas_are_those_of_the_rooms_that_write_the_files() -> None:
    assert set(KINDS) == {SCHEMA, figures.SCHEMA}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no result of `ekiden bench --json` or `ekiden sim --json`"),
        ('{"schema": "ekiden.bench/0"}', "reads 'ekiden.bench/1' and 'ekiden.sim/1'"),
        ('{"schema": "ekiden.sim/1"}', "missing required field `runs`"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SetupError, match=says):
        read(tmp_path / "x.json")


def test_where_every_request_failed_nothing_is_called_clean_that_times_would_show():
    failed = Situation(
        name="r.json, rate 2",
        seconds=5.0,
        answers=Answers(errors={"http_400": 10}),
        client=Client(cpu_share=0.0, lag_p99_s=0.011),
        load=Load(kind="rate", value=2.0),
    )
    found = diagnose(Evidence(situations=(failed,)))
    assert not found.findings
    assert not {"R44", "R51", "R53", "R55"} & set(found.clean)
    reasons = {one.requirement: one.reason for one in found.unseen}
    assert reasons["R53"] == "every request failed (http_400): nothing is known of times"
