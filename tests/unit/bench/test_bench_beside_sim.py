"""What `ekiden bench --json` and `ekiden sim --json` both have: one name, one meaning, one unit."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from bench_records import level_of, record, result_of

from ekiden.bench import result as results
from ekiden.bench.result import Level
from ekiden.cli.main import main
from ekiden.measures.goodput import Slo
from ekiden.measures.run import Run
from ekiden.sim.asked import Asked
from ekiden.sim.figures import Figures, figures
from ekiden.sim.record import Record
from ekiden.sim.run import Outcome

COMMON = (
    "name", "requests", "succeeded", "errors", "error_rate", "duration_s", "requests_per_s",
    "output_tokens_per_s", "total_tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms", "goodput",
    "prompt_tokens", "output_tokens", "samples",
)  # fmt: skip
SAMPLES = (
    "index", "scheduled_s", "ttft_ms", "tpot_ms", "e2e_ms", "prompt_tokens", "output_tokens",
    "error",
)  # fmt: skip
SPREAD = ("count", "mean", "std", "min", "p50", "p90", "p95", "p99", "max")
MOMENTS = ((0.0, 0.5, 2.5), (1.0, 1.2, 1.9), (1.5, 1.75, 9.0), (3.0, None, 4.0))
"""Due, first token, ended."""
SLO = Slo(ttft_ms=300, tpot_ms=500)


def measured() -> Level:
    return level_of([
        record(
            i, scheduled_s=due, sent_s=due, first_s=first, ended_s=ended,
            prompt_tokens=100 + i if first else 0, output_tokens=11 if first else 0,
            error="" if first else "timeout",
        )
        for i, (due, first, ended) in enumerate(MOMENTS)
    ], slo=SLO)  # fmt: skip


def simulated() -> Figures:
    rows = [
        Record(
            asked=Asked(number=i, due_s=due, prompt=100 + i, output=11),
            first_s=first,
            ended_s=ended,
            error="" if first else "timeout",
        )
        for i, (due, first, ended) in enumerate(MOMENTS)
    ]
    return figures("rate 1", Outcome(records=rows, spans=[], killed=0, seconds=9.0), SLO)


def test_the_fields_that_both_have_are_these_and_are_defined_once():
    both = set(Level.__struct_fields__) & set(Figures.__struct_fields__)
    assert both == set(COMMON) == set(Run.__struct_fields__)
    for name in both - {"samples"}:
        assert name not in Level.__annotations__
        assert name not in Figures.__annotations__


def test_the_written_forms_have_these_names():
    for found in (measured(), simulated()):
        data = msgspec.to_builtins(found)
        assert set(COMMON) <= set(data)
        assert set(SAMPLES) <= set(data["samples"])
        for name in ("ttft_ms", "tpot_ms", "e2e_ms", "prompt_tokens", "output_tokens"):
            assert tuple(data[name]) == SPREAD
        assert set(data["goodput"]) == {"requests_per_s", "share"}


def test_the_same_requests_have_the_same_figures_measured_or_simulated():
    ours, theirs = (
        msgspec.convert(msgspec.to_builtins(found), Run) for found in (measured(), simulated())
    )
    assert ours == theirs
    assert ours.ttft_ms.max == pytest.approx(500)
    assert ours.tpot_ms.min == pytest.approx(70)
    assert ours.duration_s == pytest.approx(9)
    assert ours.total_tokens_per_s == pytest.approx((303 + 33) / 9)
    assert ours.goodput is not None
    assert ours.goodput.share == 0.25


@pytest.fixture
def simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What `ekiden sim` of a seed writes, in a file."""

    def run(seed: int, *more: str) -> str:
        argv = ["sim", "Llama-3.1-8B", "--gpu", "H100", "--rate", "1", "--requests", "120"]
        assert main([*argv, "--seed", str(seed), "--json", *more]) == 0
        path = tmp_path / f"{seed}{''.join(more)}.json".replace("/", "")
        path.write_text(capsys.readouterr().out)
        return str(path)

    return run


def test_two_simulations_are_compared_as_two_results_are(simulation, capsys):
    before, other, slower = (
        simulation(1), simulation(2), simulation(1, "--prompt-tokens", "4000")
    )  # fmt: skip
    assert main(["bench", "compare", before, before]) == 0
    assert main(["bench", "compare", before, other]) == 0
    said = capsys.readouterr().out
    assert "note: seed differs: 1 against 2" in said
    assert "Llama-3.1-8B, simulated, chat (200/200)" in said
    assert main(["bench", "compare", before, slower]) == 1
    assert "ttft_ms p50 is worse" in capsys.readouterr().out


def test_a_measured_level_is_compared_with_a_simulated_one(simulation, capsys, tmp_path: Path):
    rows = [record(i, scheduled_s=float(i), sent_s=float(i), first_s=i + 1.0 + i % 7 / 100,
                   ended_s=i + 9.0) for i in range(120)]  # fmt: skip
    slow = tmp_path / "measured.json"
    results.write(slow, result_of(level_of(rows)))
    assert main(["bench", "compare", str(slow), simulation(1)]) == 0
    said = capsys.readouterr().out
    assert "the only levels have other names: rate 1 against 0:1" in said
    assert "ttft_ms p50 is better" in said


def test_several_simulated_levels_have_no_place_beside_a_measured_one(
    simulation, capsys, tmp_path: Path
):
    path = tmp_path / "measured.json"
    results.write(path, result_of(level_of([record(i) for i in range(60)])))
    both = simulation(1, "--policy", "router,round-robin")
    assert [run["name"] for run in json.loads(Path(both).read_text())["runs"]] == [
        "0:1 router", "0:1 round-robin",
    ]  # fmt: skip
    assert main(["bench", "compare", str(path), both]) == 2
    assert "no level is in both results" in capsys.readouterr().err
