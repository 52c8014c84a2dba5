"""The page of faults names tests that are there, or what a row waits for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
ROWS = dict(re.findall(r"^\| (F\d+) \| (.+) \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_tests_that_are_there_or_what_it_waits_for(row: str) -> None:
    named = re.findall(r"(tests/\S+?\.py)::(\w+)", ROWS[row])
    assert named or "waits for" in ROWS[row] or "`make " in ROWS[row]
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_no_row_is_there_twice() -> None:
    assert len(ROWS) == len(re.findall(r"^\| F\d", PAGE, re.MULTILINE)) >= 50
