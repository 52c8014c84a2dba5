"""``make soak`` with a thousand requests, TP2 x PP2 to TP3: nothing decays and nothing grows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "soak.py"


def test_a_thousand_requests_leave_answers_books_and_memory_as_they_were(tmp_path: Path) -> None:
    found = tmp_path / "soak.json"
    argv = [sys.executable, str(SCRIPT), "--requests", "1000", "--json", str(found)]
    run = subprocess.run(
        [*argv, "--chart", str(tmp_path / "soak.svg")], capture_output=True, text=True
    )
    print(run.stdout, run.stderr)
    said = msgspec.json.decode(found.read_bytes())
    assert said["breaches"] == []
    assert (run.returncode, said["requests"], said["replayed"]) == (0, 1000, 50)
    assert said["left"] > 0
