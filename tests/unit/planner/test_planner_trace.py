"""Traces as workloads: kinds by length, rate, and what a cache of limited size finds again."""

import json
from pathlib import Path

import pytest

from ekiden.planner import trace
from ekiden.planner.trace import Line, from_trace, shared


def line(ids: tuple[int, ...], length: int = 0) -> Line:
    return Line(timestamp=0, input_length=length or 512 * len(ids), output_length=1, hash_ids=ids)


def test_only_a_prefix_is_found_again():
    assert shared([line((1, 2, 3)), line((1, 2, 4))]) == pytest.approx(2 / 6)
    assert shared([line((1, 2, 3)), line((9, 2, 3))]) == 0
    whole = shared([line((1, 2)), line((1, 2))])
    assert whole == pytest.approx(1023 / 2048), "the last token is computed all the same"


def test_what_was_used_least_recently_leaves_first(monkeypatch):
    asked = [line((1,)), line((2,)), line((1,)), line((3,)), line((1,)), line((2,))]
    monkeypatch.setattr(trace, "CACHED_BLOCKS", 2)
    assert shared(asked) == pytest.approx(2 * 511 / (6 * 512))
    monkeypatch.setattr(trace, "CACHED_BLOCKS", 3)
    assert shared(asked) == pytest.approx(3 * 511 / (6 * 512))


def test_kinds_are_equal_parts_by_length_and_keep_the_means(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 10 * (i + 1), "output_length": i + 1}
        for i in range(160)
    ]
    file.write_text("\n".join(map(json.dumps, reversed(lines))))
    work = from_trace(file)
    assert len(work.kinds) == 16
    assert {kind.share for kind in work.kinds} == {1 / 16}
    assert work.prompt == pytest.approx(sum(x["input_length"] for x in lines) / 160, rel=0.01)
    assert work.output == pytest.approx(sum(x["output_length"] for x in lines) / 160, rel=0.01)
    assert work.longest == 1600 + 160, "of the longest request, not of a mean"
    assert work.rate == pytest.approx(10)
    assert from_trace(file, rate=3).rate == 3
