"""``ekiden doctor`` from its arguments to its page, its JSON and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ekiden.cli.main import main

LEVEL: dict[str, Any] = {
    "name": "concurrency 8", "load": "concurrency", "value": 8.0, "requests": 40, "succeeded": 40,
    "errors": {}, "error_details": {}, "error_rate": 0.0, "duration_s": 10.0,
    "requests_per_s": 4.0, "output_tokens_per_s": 400.0, "total_tokens_per_s": 800.0,
    "goodput": None, "short_answers": 0, "counted_by_server": True, "client_cpu_share": 0.2,
    "service": None, "notes": [], "itl_histogram": [],
    "samples": {
        name: [] for name in (
            "index", "scheduled_s", "sent_s", "ttft_ms", "tpot_ms", "itl_std_ms", "e2e_ms",
            "prompt_tokens", "output_tokens", "error",
        )
    },
    **{
        f"{name}_ms": {"count": 40, "mean": 50.0, "p50": 50.0, "p95": 60.0, "p99": 70.0}
        for name in ("ttft", "ttft_from_send", "tpot", "itl", "itl_jitter", "e2e", "e2e_from_send")
    },
    "schedule_lag_ms": {"count": 40, "p99": 0.5},
    "prompt_tokens": {"count": 40, "mean": 64.0}, "output_tokens": {"count": 40, "mean": 64.0},
}  # fmt: skip


def bench(path: Path, **level: Any) -> str:
    result = {
        "schema": "ekiden.bench/1", "version": "0", "started": "2026-01-01T00:00:00Z",
        "url": "http://s", "model": "m", "endpoint": "completions", "workload": "short-short",
        "arrival": "poisson", "seed": 0, "processes": 1, "prompts": "exact", "slo": {},
        "notes": [], "levels": [LEVEL | level],
    }  # fmt: skip
    path.write_text(json.dumps(result))
    return str(path)


def test_a_result_of_a_bench_without_trouble_ends_with_0(tmp_path: Path, capsys: Any) -> None:
    assert main(["doctor", "--bench", bench(tmp_path / "run.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ekiden doctor   nothing found   (run.json, concurrency 8: 40 answers)")
    assert "clean     R44" in out
    assert "R43     fits one device" in out


def test_requests_that_fail_are_told_first_and_end_with_1(tmp_path: Path, capsys: Any) -> None:
    died = bench(tmp_path / "died.json", succeeded=40, errors={"disconnected": 150, "connect": 10})
    assert main(["doctor", "--bench", died]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "requests fail, else nothing found" in out
    assert "160 of 200 requests failed (disconnected 150, connect 10)" in out
    one = bench(tmp_path / "one.json", succeeded=999, errors={"timeout": 1})
    assert main(["doctor", "--bench", one]) == 0
    assert "999 answers, 1 failed" in capsys.readouterr().out


def test_an_objective_that_is_missed_ends_with_1_and_says_what_to_do(
    tmp_path: Path, capsys: Any
) -> None:
    argv = ["doctor", "--bench", bench(tmp_path / "run.json"), "--tpot-p95", "20ms"]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "R44  TPOT is high or jitters   confidence" in out
    assert "P95 60.0 ms over the objective of 20.0 ms" in out
    assert "\n  do      -q int8" in out


def test_json_has_the_schema_the_findings_and_the_evidence(tmp_path: Path, capsys: Any) -> None:
    file = bench(tmp_path / "run.json", client_cpu_share=0.99)
    assert main(["doctor", "--json", "--bench", file]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "ekiden.doctor/1"
    (finding,) = found["findings"]
    assert finding["requirement"] == "R51"
    assert set(finding["causes"][0]) == {"what", "seen", "remedy", "confidence"}
    assert found["evidence"]["situations"][0]["client"]["cpu_share"] == 0.99


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--bench", "none.json"], "none.json cannot be read"),
        (["--url", "http://127.0.0.1:1", "--watch", "0"], "nothing to look at: http://127.0.0.1:1"),
        (["--redis", "redis://127.0.0.1:1/0"], "cannot reach Redis at redis://127.0.0.1:1/0"),
        (["some-model"], "MODEL some-model is for --preflight"),
        (["--reference-url", "http://127.0.0.1:8000"], "is the gateway itself"),
        (["--ttft-p95", "fast"], "'fast' is not a time: try 500ms"),
        (["--preflight", "-tp", "0"], "0 is too small"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    argv: list[str], words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    try:
        code = main(["doctor", *argv])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_preflight_prints_a_line_for_each_thing(
    redis_url: str, capsys: Any, tiny_model: Any
) -> None:
    argv = ["doctor", "--preflight", str(tiny_model.directory), "--redis", redis_url]
    assert main(argv) == 0
    names = {line[9:22].strip() for line in capsys.readouterr().out.splitlines()} - {""}
    assert names >= {
        *("devices", "packages", "cores", "/dev/shm", "memory", "port", "address", "Redis"),
        *("clocks", "replicas", "versions", "hashes"),
    }


def test_preflight_ends_with_1_where_something_will_not_work(capsys: Any) -> None:
    argv = ["doctor", "--preflight", "--redis", "redis://127.0.0.1:1/0", "--json"]
    assert main(argv) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "ekiden.preflight/1"
    assert [one["name"] for one in found["checks"] if one["verdict"] == "failure"] == ["Redis"]


def test_the_room_imports_no_torch_and_no_service() -> None:
    code = (
        "import sys, ekiden.doctor.symptoms, ekiden.doctor.watch, ekiden.doctor.same_prompts, "
        "ekiden.doctor.preflight.host, ekiden.doctor.preflight.network, "
        "ekiden.doctor.preflight.registry, ekiden.doctor.preflight.replicas, "
        "ekiden.doctor.preflight.devices, ekiden.cli.doctor, ekiden.cli.doctor_preflight; "
        "print([m for m in ('torch', 'gateway', 'decode_svc', 'prefill_svc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"
