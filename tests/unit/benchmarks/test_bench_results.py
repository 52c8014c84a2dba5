"""What a bench says at its end: ratios, goals, and what was not measured."""

import json
from pathlib import Path

import pytest
from benchmarks import results
from benchmarks.results import COLUMNS, figure, publish, row, table


def test_a_goal_is_met_at_its_ratio_and_not_below():
    assert row("a", 13.0, "x", peer=10.0, peer_name="p", goal=1.3)["met"] is True
    below = row("a", 12.9, "x", peer=10.0, peer_name="p", goal=1.3)
    assert below["met"] is False
    assert below["ratio"] == pytest.approx(1.29)


@pytest.mark.parametrize(("ours", "peer"), [(None, 10.0), (10.0, None), (None, None)])
def test_what_was_not_measured_neither_meets_nor_misses_its_goal(ours, peer):
    found = row("a", ours, "x", peer=peer, peer_name="p", goal=1.0)
    assert (found["ratio"], found["met"]) == (None, None)
    assert "not measured" in table([found])


def test_a_figure_without_a_peer_is_not_said_to_lack_one():
    assert "not measured" not in table([row("alone", 5.0, "GB/s")])


def test_the_file_holds_every_row_with_exactly_the_agreed_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "bench")
    rows = [row("a", 2.0, "s", peer=1.0, peer_name="p", goal=1.0), row("b", 3.0, "s")]
    written = json.loads(publish("some", rows).read_text())
    assert written == {"rows": rows}
    assert [tuple(r) for r in written["rows"]] == [COLUMNS, COLUMNS]
    shown = capsys.readouterr().out
    assert "| a | 2.00 | 1.00 | p | s | 2.00 | 1.00 | yes |" in shown


def test_a_missed_goal_stands_out():
    assert "**no**" in table([row("a", 1.0, "s", peer=2.0, peer_name="p", goal=1.0)])


@pytest.mark.parametrize(
    ("value", "shown"), [(0.1234, "0.123"), (1.25, "1.25"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_figures_keep_three_digits(value: float, shown: str):
    assert figure(value) == shown
