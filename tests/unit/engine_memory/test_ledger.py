"""Bookings: seen by others while their owner lives, and by nobody afterwards."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ekiden.core.errors import SetupError
from ekiden.engine import ledger as ledger_module
from ekiden.engine.ledger import Ledger, tree_resident_bytes

BOOK_AND_WAIT = """
import sys
from pathlib import Path
from ekiden.engine.ledger import Ledger
Ledger(Path(sys.argv[1])).book(1 << 40, "other", lambda promised: None)
print("booked", flush=True)
sys.stdin.read()
"""


def promised(ledger: Ledger) -> int:
    seen: list[int] = []
    ledger.book(0, "asker", seen.append).close()
    return seen[0]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "bookings", resident=lambda pid: 0)


def test_a_booking_is_seen_until_it_is_closed(ledger: Ledger) -> None:
    assert promised(ledger) == 0
    first = ledger.book(100, "a", lambda promised: None)
    with ledger.book(30, "b", lambda promised: None):
        assert promised(ledger) == 130
    assert promised(ledger) == 100
    first.close()
    first.close()
    assert promised(ledger) == 0


def test_what_its_owner_holds_already_is_not_counted_twice(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, resident={os.getpid(): 70}.__getitem__)
    with ledger.book(100, "a", lambda promised: None):
        assert promised(ledger) == 30
    with ledger.book(50, "a", lambda promised: None):
        assert promised(ledger) == 0


def test_who_is_refused_books_nothing(ledger: Ledger) -> None:
    def refuse(promised: int) -> None:
        raise SetupError("no")

    with pytest.raises(SetupError, match="no"):
        ledger.book(100, "a", refuse)
    assert promised(ledger) == 0


def test_another_process_counts_as_long_as_it_lives(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", BOOK_AND_WAIT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"booked\n"
        outstanding = promised(ledger)
        assert 0 < (1 << 40) - outstanding < 1 << 30, "the terabyte, less what it holds"
        other.kill()
        other.wait(timeout=30)
    assert promised(ledger) == 0
    assert not list(tmp_path.glob("*.booking"))


def test_a_lock_that_is_never_free_is_named(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised(ledger)
    monkeypatch.setattr(ledger_module, "LOCK_TIMEOUT_S", 0.0)
    with (tmp_path / "bookings" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SetupError, match=r"lock has been held for 0 s"):
            promised(ledger)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="file, where replicas of this host book memory"):
        promised(Ledger(tmp_path / "file"))


def test_the_memory_of_a_process_includes_its_children() -> None:
    alone = tree_resident_bytes(os.getpid())
    assert alone > 1 << 20
    child = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        theirs = tree_resident_bytes(running.pid)
        assert tree_resident_bytes(os.getpid()) >= alone + theirs // 2 > alone
        running.kill()
    assert tree_resident_bytes(running.pid) == 0
