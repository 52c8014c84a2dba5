"""What is said at the end: the exit code, every failing cell, every reason of a refusal once."""

import json
from pathlib import Path

import pytest

from ekiden.verify.layouts import FULL, Layout, Pair
from ekiden.verify.outcome import Outcome
from ekiden.verify.report import MAX_LINES, Part, Progress, print_report, write_json

EQUAL = Outcome(tokens=9, equal_tokens=8, ties=1, prompts=1, logprob=0.002, bound=0.02)


def refused(prefill: str, decode: str) -> Outcome:
    said = f"prefill p has KV dtype {prefill} and decode d has KV dtype {decode}: give both one"
    return Outcome(status="refused", detail=said)


def part(results: dict[Pair, Outcome]) -> Part:
    return Part(title="somehow", results=results, seconds=1.5)


def pair(prefill: str, decode: str) -> Pair:
    return Layout.parse(prefill), Layout.parse(decode)


def test_equal_and_refused_cells_make_0_and_any_other_makes_1() -> None:
    fine = {pair("TP1", "TP2"): EQUAL, pair("TP1", "TP2:int8"): refused("float32", "int8")}
    assert print_report([part(fine)]) == 0
    for status in ("differs", "hung", "failed"):
        bad = {**fine, pair("TP1", "TP3"): Outcome(status=status, detail="why")}
        assert print_report([part(fine), part(bad)]) == 1


def test_a_small_grid_is_a_table_with_a_line_for_every_failing_cell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layer = "prompt 3: the KV differs first at layer 1, head 2, position 17 (K, decode rank 0)"
    print_report([part({
        pair("TP1", "TP1"): EQUAL,
        pair("TP2", "TP1"): Outcome(status="differs", detail=layer),
    })])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:5] == [
        "prefill \\ decode  TP1",
        "TP1               equal (1 tie)",
        "TP2               DIFFERS",
        f"TP2 -> TP1: differs: {layer}",
    ]
    assert lines[5].startswith("2 cells: 1 equal, 0 refused, 1 differs, 0 hung, 0 failed; ")
    assert "8 of 9 tokens equal, 1 ties" in lines[5]


def test_a_large_grid_is_told_by_kv_dtypes_and_each_refusal_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = {
        (p, d): EQUAL if p.kv == d.kv else refused(p.kv, d.kv)
        for p in FULL.layouts()[::8]
        for d in FULL.layouts()
    }
    print_report([part(results)])
    lines = capsys.readouterr().out.splitlines()
    for kinds in ("float32        int8       72 refused  -", "float32        float32    72 equal"):
        assert sum(line.startswith(kinds) for line in lines) == 1
    reasons = [line for line in lines if line.startswith("refused: ")]
    assert len(reasons) == 12
    assert all("(and 71 more alike)" in line for line in reasons)


def test_failing_cells_beyond_the_limit_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = FULL.layouts()
    print_report([part({(p, layouts[0]): Outcome(status="hung", detail="late") for p in layouts})])
    said = capsys.readouterr().out
    assert said.count("hung: late") == MAX_LINES
    assert f"and {96 - MAX_LINES} more" in said


def test_the_file_has_every_cell(tmp_path: Path) -> None:
    file = tmp_path / "new" / "out.json"
    write_json(file, "m", [part({pair("TP1", "PP2/32:int8"): EQUAL})])
    body = json.loads(file.read_text())
    assert body["model"] == "m"
    assert body["parts"][0]["counts"]["equal"] == 1
    assert body["parts"][0]["cells"][0]["decode"] == "PP2/32:int8"
    assert body["parts"][0]["cells"][0]["ties"] == 1


def test_where_there_is_no_terminal_cells_are_told_twenty_times(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress()
    for done in range(1, 1001):
        progress("TP1 -> TP2", done, 1000)
    assert len(capsys.readouterr().err.splitlines()) == 21
