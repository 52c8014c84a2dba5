"""What is called a change, and what is not."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from bench_records import level_of, record, result_of

from ekiden.bench import result as results
from ekiden.bench.compare import Comparison, compare, lines
from ekiden.bench.record import Record
from ekiden.bench.result import Result
from ekiden.cli.main import main
from ekiden.core.errors import SetupError


def run(seed: int, *, slower: float = 1.0, count: int = 200, fail: int = 0) -> Result:
    """Log-normal waits before the first token, nothing to do with one another."""
    chance = np.random.default_rng(seed)
    waits = slower * np.exp(chance.normal(0, 0.3, count))
    return result_of(level_of([_row(i, wait, fail) for i, wait in enumerate(waits.tolist())]))


def _row(index: int, wait: float, fail: int) -> Record:
    return record(
        index,
        scheduled_s=float(index),
        sent_s=float(index),
        first_s=index + wait,
        ended_s=index + wait + 1.0,
        error="timeout" if index % 5 == 0 and index < 5 * fail else "",
    )


def walk(seed: int, count: int, keeps: float) -> np.ndarray:
    """Values that follow one another closely, as waits in a queue do."""
    noise, values = np.random.default_rng(seed).normal(0, 0.3, count), [0.0]
    for step in noise:
        values.append(keeps * values[-1] + step)
    return np.array(values[1:])


def queued(seed: int) -> Result:
    return result_of(level_of(_rows(np.exp(walk(seed, 200, 0.97)))))


def _rows(waits: np.ndarray) -> list[Record]:
    return [_row(i, wait, 0) for i, wait in enumerate(waits.tolist())]


def verdicts(found: Comparison) -> dict[str, str]:
    return {change.figure: change.verdict for change in found.changes}


def test_a_run_beside_itself_shows_no_change():
    assert set(verdicts(compare(run(1), run(1))).values()) == {"same"}


def test_two_runs_of_the_same_are_seldom_told_apart():
    """At 95 % one comparison in twenty may be wrong: of twelve, more than two are too many."""
    wrong = [compare(run(i), run(1000 + i)) for i in range(12)]
    assert sum(v != "same" for found in wrong for v in set(verdicts(found).values())) <= 2


def test_slower_first_tokens_are_worse_and_quicker_ones_better():
    worse = compare(run(1), run(2, slower=1.3))
    assert worse.worse
    assert verdicts(worse)["ttft_ms p50"] == "worse"
    assert verdicts(worse)["tpot_ms p50"] == "same"
    better = compare(run(2, slower=1.3), run(1))
    assert not better.worse
    assert verdicts(better)["ttft_ms p50"] == "better"
    (change,) = [c for c in better.changes if c.figure == "ttft_ms p50"]
    assert change.low < change.ratio < change.high < 1


def test_more_failures_are_worse():
    found = compare(run(1), run(1, fail=40))
    assert verdicts(found)["answers that came"] == "worse"
    assert verdicts(compare(run(1, fail=40), run(1)))["answers that came"] == "better"


def test_one_outage_is_no_evidence_of_many_failures():
    rows = [_row(i, 1.0, 0) for i in range(200)]
    out = [record(i, scheduled_s=float(i), error="timeout") for i in range(40)]
    found = compare(result_of(level_of(rows)), result_of(level_of([*out, *rows[40:]])))
    assert verdicts(found)["answers that came"] == "unclear"


def test_requests_that_hang_together_are_no_evidence_of_as_many():
    unclear = [verdicts(compare(queued(i), queued(50 + i))) for i in range(4)]
    assert {found["ttft_ms p50"] for found in unclear} == {"unclear"}


def test_the_longer_requests_hang_together_the_wider_the_interval():
    """Of a series in which each value is 0.95 of the one before, 39 say as much as one."""
    hanging = [walk(seed, 4000, 0.95) for seed in (1, 2)]
    shuffled = [np.random.default_rng(3).permutation(values) for values in hanging]
    widths = []
    for pair in (hanging, shuffled):
        found = compare(*(result_of(level_of(_rows(np.exp(values)))) for values in pair))
        (change,) = [c for c in found.changes if c.figure == "ttft_ms p50"]
        widths.append(np.log(change.high / change.low))
    assert 4.7 < widths[0] / widths[1] < 9


def test_of_few_requests_nothing_is_said():
    found = compare(run(1, count=20), run(1, count=20, slower=9))
    assert found.changes == []
    assert "fewer than 50 requests" in found.notes[0]
    assert not found.worse


def test_of_few_answers_only_that_they_are_few():
    found = compare(run(1, count=60), run(1, count=60, fail=12, slower=9))
    assert verdicts(found) == {"answers that came": "worse"}
    assert "fewer than 50 answers" in found.notes[0]


@pytest.mark.parametrize("count", [20, 200])
def test_failures_where_there_were_none_are_worse_whatever_chance_may_do(count: int):
    rows = [_row(i, 1.0, 0) for i in range(count)]
    lost = [record(i, scheduled_s=float(i), error="connect") for i in range(count // 2)]
    good, bad = result_of(level_of(rows)), result_of(level_of([*lost, *rows[count // 2 :]]))
    found = compare(good, bad)
    assert found.worse
    assert found.failed == ["rate 1"]
    assert f"{count // 2} of {count} requests of B failed, and none of A" in found.notes[-1]
    for other in (compare(bad, good), compare(bad, bad)):
        assert not other.worse


def test_what_else_differs_is_told_first():
    other = result_of(*run(1).levels, workload="mixed")
    said = list(lines(compare(run(1), other)))
    assert said[2] == "note: workload differs: short-short (256/128) against mixed"


def test_no_level_in_common_is_refused_with_both_lists():
    level = level_of([record(i) for i in range(60)], name="rate 2")
    with pytest.raises(SetupError, match="A has rate 1; B has rate 2"):
        compare(run(1), result_of(level))


def test_the_same_question_has_the_same_answer():
    assert compare(run(1), run(2)) == compare(run(1), run(2))


def write(path: Path, *found: Result) -> list[str]:
    for number, one in enumerate(found):
        results.write(path / f"{number}.json", one)
    return [str(path / f"{number}.json") for number in range(len(found))]


@pytest.mark.parametrize(("slower", "code"), [(1.0, 0), (1.4, 1)])
def test_the_command_fails_when_something_became_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], slower: float, code: int
):
    files = write(tmp_path, run(1), run(1, slower=slower))
    out = tmp_path / "out.json"
    assert main(["bench", "compare", *files, "--json", str(out)]) == code
    assert ("ttft_ms p50 is worse" in capsys.readouterr().out) == bool(code)
    assert json.loads(out.read_text())["schema"] == "ekiden.bench.compare/1"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no result"),
        ("[]", "is no result"),
        ('{"schema": "ekiden.bench/9"}', "schema 'ekiden.bench/9'"),
        ('{"schema": "ekiden.bench/1"}', "is no result .*missing"),
    ],
)
def test_a_file_that_is_no_result_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["bench", "compare", str(path), str(path)]) == 2
    assert_matches(says, capsys.readouterr().err.splitlines())


def assert_matches(pattern: str, said: Sequence[str]) -> None:
    import re

    assert len(said) == 1
    assert re.search(pattern, said[0]), said


def test_a_result_reads_as_it_was_written(tmp_path: Path):
    (path,) = write(tmp_path, run(1, fail=3))
    assert results.read(Path(path)) == run(1, fail=3)
