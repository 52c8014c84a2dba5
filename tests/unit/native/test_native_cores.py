"""Ranks of one host share its cores: who waits lends, who computes keeps its own share."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ekiden.layers.backends.native import cores
from ekiden.layers.backends.native.cores import SEATS, Seat, take_seat
from ekiden.layers.backends.native.library import Op, Pool
from ekiden.layers.backends.native.packed import linear_op, pack_dense
from tests.unit.native.native_rig import needs_native

pytestmark = needs_native

WIDTH = 64
FOUR_CORES = (ctypes.c_uint64 * 16)(0b1111)
OTHER_CORES = (ctypes.c_uint64 * 16)(0b110000)
A_MINUTE = 60_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "private"


@pytest.fixture
def pool(folder: Path) -> Iterator[Pool]:
    """A rank with a share of one of four cores."""
    seat = seat_of(folder, share=1)
    made = Pool(4, seat=seat)
    yield made
    made.close()
    seat.close()


def seat_of(folder: Path, share: int, where: ctypes.Array[ctypes.c_uint64] = FOUR_CORES) -> Seat:
    seat = take_seat(share, folder)
    assert seat is not None
    seat.row.cores = where
    return seat


class Shift:
    """A list of operations between two rows, each of which moves every number one place on."""

    def __init__(self, count: int) -> None:
        assert count % 2 == 0
        self.rows = [torch.zeros(1, WIDTH), torch.zeros(1, WIDTH)]
        self.matrix = pack_dense(torch.eye(WIDTH).roll(1, 0).contiguous())
        there, back = (linear_op(self.matrix, self.rows[i], self.rows[1 - i]) for i in (0, 1))
        self.ops = (Op * count)(*[there, back] * (count // 2))

    def run(self, pool: Pool) -> bool:
        """Whether every operation saw what the one before it wrote."""
        self.rows[0].copy_(torch.arange(WIDTH))
        pool.run(self.ops)
        return torch.equal(self.rows[0][0], torch.arange(WIDTH).roll(len(self.ops)).float())


def computing(seat: Seat, for_ns: int = A_MINUTE) -> None:
    seat.row.until = time.monotonic_ns() + for_ns


def team_after_a_list(pool: Pool) -> int:
    assert Shift(2).run(pool)
    return pool.team


def grows_to(pool: Pool, team: int) -> bool:
    """A thread that the system put aside is not waited for: the next lists have it again."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if team_after_a_list(pool) == team:
            return True
    return False


def test_a_rank_alone_takes_every_core(pool: Pool):
    assert team_after_a_list(pool) == 4


@pytest.mark.parametrize(("share", "team"), [(1, 3), (2, 2), (3, 1), (4, 1), (9, 1)])
def test_a_rank_leaves_the_others_their_shares_and_keeps_its_own(pool, folder, share, team):
    other = seat_of(folder, share)
    computing(other)
    assert team_after_a_list(pool) == team
    other.row.until = 0
    assert grows_to(pool, 4)


def test_every_rank_that_computes_is_counted(pool, folder):
    others = [seat_of(folder, 1), seat_of(folder, 1)]
    for other in others:
        computing(other)
    assert team_after_a_list(pool) == 2


def test_a_rank_on_other_cores_is_not_counted(pool, folder):
    computing(seat_of(folder, 3, OTHER_CORES))
    assert team_after_a_list(pool) == 4


def test_a_rank_that_went_away_is_not_counted(pool, folder):
    other = seat_of(folder, 3)
    computing(other)
    other.close()
    assert team_after_a_list(pool) == 4


def test_a_rank_is_seen_while_it_computes_and_shortly_after(pool, folder):
    """It stays for the next step of a rank that decodes, and a dead one does not stay for ever."""
    long = Shift(2_000)
    began = time.monotonic_ns()
    worker = threading.Thread(target=long.run, args=(pool,))
    worker.start()
    while pool.seat.row.until == 0:
        assert time.monotonic_ns() - began < A_MINUTE
    seen = pool.seat.row.until
    worker.join()
    assert began < seen < time.monotonic_ns() + 1_000_000_000
    assert pool.seat.row.until < time.monotonic_ns() + 5_000_000


def test_a_long_list_gives_threads_back_when_another_rank_starts(pool, folder):
    """In the middle of it, with the right result."""
    other, long, right = seat_of(folder, 3), Shift(40_000), []
    worker = threading.Thread(target=lambda: right.append(long.run(pool)))
    worker.start()
    while pool.team != 4 and worker.is_alive():
        pass
    computing(other)
    worker.join()
    assert right == [True]
    assert pool.team == 1


def test_results_are_right_however_often_the_team_changes(pool, folder):
    """Threads leave in mid-list and are asked again, hundreds of times, in short and long lists."""
    others = [seat_of(folder, share) for share in (1, 2, 3)]
    lists, stop, teams = [Shift(2), Shift(40), Shift(400)], threading.Event(), set()

    def toggle() -> None:
        chance = random.Random(1)
        while not stop.is_set():
            for other in others:
                other.row.until = time.monotonic_ns() + chance.choice((-1, 50_000, 400_000))
            time.sleep(0.0001)

    toggler = threading.Thread(target=toggle)
    toggler.start()
    try:
        for _ in range(2000):
            for shift in lists:
                assert shift.run(pool)
                teams.add(pool.team)
    finally:
        stop.set()
        toggler.join()
    assert len(teams) > 1


def test_the_seat_of_a_dead_process_is_taken_again(folder):
    first = seat_of(folder, 1)
    gone = subprocess.Popen(["true"])
    gone.wait(60)
    first.row.pid = gone.pid
    again = seat_of(folder, 1)
    assert again.number == first.number
    assert seat_of(folder, 1).number != again.number


def test_a_rank_without_a_seat_says_why(folder, caplog):
    seats = [take_seat(1, folder) for _ in range(SEATS)]
    assert None not in seats
    assert take_seat(1, folder) is None
    assert f"all {SEATS} seats are taken" in caplog.text


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_enter_is_refused(folder, caplog, mode):
    folder.mkdir()
    folder.chmod(mode)
    assert take_seat(1, folder) is None
    assert "is not a folder of this user alone" in caplog.text


def test_a_link_in_place_of_the_table_is_not_followed(folder, tmp_path, caplog):
    folder.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "cores").symlink_to(victim)
    assert take_seat(1, folder) is None
    assert victim.read_text() == "precious"


def test_no_memory_for_the_table_is_said_before_it_is_touched(folder, caplog, monkeypatch):
    """A store into a page that a full ``/dev/shm`` does not have would end the rank (SIGBUS)."""

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert take_seat(1, folder) is None
    assert "No space left on device" in caplog.text


def test_a_table_that_is_longer_is_not_cut_under_those_who_use_it(folder):
    folder.mkdir(mode=0o700)
    (folder / "cores").write_bytes(bytes(1 << 20))
    assert take_seat(1, folder) is not None
    assert (folder / "cores").stat().st_size == 1 << 20


def test_a_seat_says_where_its_process_may_run(folder):
    seat = take_seat(2, folder)
    assert seat is not None
    words = list(seat.row.cores)
    told = {64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    assert (told, seat.row.share, seat.row.pid) == (os.sched_getaffinity(0), 2, os.getpid())
    assert cores.SEAT_BYTES == 192
