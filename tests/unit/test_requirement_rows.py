"""The page of requirements has every number once, and names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "requirements.md").read_text()
ROWS = dict(re.findall(r"^\| (R\d+) \| (.+) \|$", PAGE, re.MULTILINE))


def test_every_number_is_there_once() -> None:
    assert re.findall(r"^\| (R\d+) ", PAGE, re.MULTILINE) == [f"R{n}" for n in range(1, 56)]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_tests_that_are_there_or_what_it_waits_for(row: str) -> None:
    named = re.findall(r"(tests/\S+?\.py)::(\w+)", ROWS[row])
    assert named or "waits for" in ROWS[row] or "`pyproject.toml`" in ROWS[row]
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
