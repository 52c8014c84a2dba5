"""``make chaos ARGS=--quick`` from end to end: real processes, some of every kind of fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "chaos.py"


def test_nothing_is_wrong_lost_or_leaked(tmp_path: Path) -> None:
    found = tmp_path / "chaos.json"
    argv = [sys.executable, str(SCRIPT), "--quick", "--json", str(found)]
    run = subprocess.run(argv, capture_output=True, text=True)
    print(run.stdout, run.stderr)
    said = msgspec.json.decode(found.read_bytes())
    assert said["breaches"] == []
    assert run.returncode == 0
    assert len([row for row in said["rows"] if row["outcome"] != "not reached"]) >= 15
