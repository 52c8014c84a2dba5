"""Ranks as processes: shared memory gives the bits that gloo gives, and a dead peer is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from ekiden.core.errors import SetupError
from ekiden.parallel.rendezvous import MeshSpec, host_mesh, open_mesh

SCRIPT = Path(__file__).parent / "rank_main.py"


@contextmanager
def ranks(count: int, *specs: MeshSpec) -> Iterator[list[subprocess.Popen[str]]]:
    arguments = [msgspec.json.encode(spec).decode() for spec in specs]
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=10)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_shared_memory_gives_gloos_bits_on_every_rank() -> None:
    gloo = host_mesh(3, 1, timeout_s=60.0, backend="gloo")
    shm = host_mesh(3, 1, timeout_s=30.0, backend="shm")
    with shm, gloo, ranks(3, shm.spec, gloo.spec) as processes:
        results = [msgspec.json.decode(answer(process)) for process in processes]
        for by_shm, by_gloo in results:
            assert by_shm == by_gloo
        *sums, rooted = zip(*(by_shm for by_shm, _ in results), strict=True)
        assert all(len(set(values)) == 1 for values in sums)
        assert rooted[0]
        assert rooted[1:] == ("", "")


def test_a_killed_rank_is_named_within_the_deadline() -> None:
    with host_mesh(2, 1, timeout_s=5.0, backend="shm") as host, ranks(2, host.spec) as processes:
        for process in processes:
            assert answer(process)
        processes[1].kill()
        processes[1].wait(timeout=10)
        go(processes[0])
        assert answer(processes[0]) == "TP rank 1 did not arrive within 5 s\n"


def test_the_pipeline_carries_the_same_bits_over_shared_memory_and_gloo() -> None:
    shm = host_mesh(1, 2, timeout_s=30.0, backend="shm", message_bytes=4096)
    gloo = host_mesh(1, 2, timeout_s=60.0, backend="gloo")
    with shm, gloo, ranks(2, shm.spec, gloo.spec) as processes:
        first, last = [msgspec.json.decode(answer(process)) for process in processes]
    assert first[0] == first[1]
    assert last[0] == last[1]
    assert len(last[0]) == len(first[0]) + 3


def test_memory_of_an_owner_that_is_gone_is_a_setup_error_not_a_hang() -> None:
    host = host_mesh(2, 1, timeout_s=5.0, backend="shm")
    host.close()
    with pytest.raises(SetupError, match="cannot be opened"):
        open_mesh(host.spec, 0)


def test_backends_that_cannot_work_here_are_refused_by_name() -> None:
    with pytest.raises(SetupError, match="'mpi' is unknown: choose auto, shm, gloo, nccl"):
        host_mesh(2, 1, timeout_s=1.0, backend="mpi")
    with pytest.raises(SetupError, match="nccl needs --device cuda"):
        host_mesh(2, 1, timeout_s=1.0, backend="nccl")
    with pytest.raises(SetupError, match="shm needs CPU ranks"):
        host_mesh(2, 1, timeout_s=1.0, backend="shm", device="cuda:0")
