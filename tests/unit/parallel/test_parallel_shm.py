"""The shared-memory mesh inside one process: threads hold the ends that processes would."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden.core.clock import ManualClock
from ekiden.core.errors import InvariantBroken, ReplicaFailed
from ekiden.parallel import rendezvous
from ekiden.parallel.communicator import ordered_sum
from ekiden.parallel.waiting import Patience
from tests.shared_mesh import on_all, shm_meshes


@settings(max_examples=15, deadline=None)
@given(
    tp=st.integers(2, 4),
    numels=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_sums_of_any_size_have_the_same_bits_on_every_rank(
    tp: int, numels: list[int], dtype: torch.dtype
) -> None:
    parts = [[torch.randn(n).to(dtype) for n in numels] for _ in range(tp)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_SLOT_BYTES", 64)  # so that a few numbers are many pieces
        with shm_meshes(tp, 1) as meshes:
            results = on_all(
                meshes, lambda m: [m.tp.all_reduce(x.clone()) for x in parts[m.tp_rank]]
            )
    for i in range(len(numels)):
        expected = ordered_sum([part[i] for part in parts])
        assert all(torch.equal(result[i], expected) for result in results)


def test_a_rooted_gather_never_lets_a_rank_overwrite_what_the_root_has_yet_to_read() -> None:
    with shm_meshes(2, 1) as meshes, ThreadPoolExecutor(1) as pool:
        root, other = meshes
        parts = [torch.full((1, 4), float(i)) for i in range(5)]
        ahead = pool.submit(lambda: [other.tp.gather(x, [2, 1], dim=0) for x in parts])
        for x in parts:
            joined = root.tp.gather(-x.expand(2, 4), [2, 1], dim=0)
            assert joined is not None
            assert torch.equal(joined[2:], x)
        assert ahead.result(timeout=10) == [None] * 5


def test_gather_joins_uneven_parts_where_one_rank_has_nothing() -> None:
    whole = torch.arange(5.0).view(1, 5)
    parts = [whole[:, :3], whole[:, 3:], whole[:, 5:]]
    with shm_meshes(3, 1) as meshes:
        full = on_all(meshes, lambda m: m.tp.all_gather(parts[m.tp_rank], [3, 2, 0], dim=1))
    assert all(torch.equal(result, whole) for result in full)


def test_an_absent_rank_is_named_at_the_deadline() -> None:
    absent = r"TP rank 1 did not arrive within 0\.05 s"
    with shm_meshes(2, 1, timeout_s=0.05) as meshes, pytest.raises(ReplicaFailed, match=absent):
        meshes[0].tp.all_reduce(torch.ones(1))


def test_a_rank_that_gives_up_frees_every_waiting_rank_with_its_reason() -> None:
    with shm_meshes(2, 2, timeout_s=60.0) as meshes, ThreadPoolExecutor(2) as pool:
        same_stage = pool.submit(meshes[1].tp.all_reduce, torch.ones(1))
        next_stage = pool.submit(meshes[3].pp.recv, (1,), torch.float32)
        meshes[0].abort("cache is full of cats")
        for waiting in (same_stage, next_stage):
            with pytest.raises(ReplicaFailed, match="rank 0 gave up: cache is full of cats"):
                waiting.result(timeout=10)


def test_a_link_holds_two_messages_a_stage_and_then_the_sender_waits() -> None:
    with shm_meshes(1, 2, timeout_s=0.05, message_bytes=64) as (first, last):
        for i in range(4):
            first.pp.send(torch.full((3,), float(i)))
        with pytest.raises(ReplicaFailed, match=r"stage 1 took nothing within 0\.05 s"):
            first.pp.send(torch.ones(3))
        got = [last.pp.recv((3,), torch.float32)[0].item() for _ in range(4)]
        assert got == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(ReplicaFailed, match=r"stage 0 sent nothing within 0\.05 s"):
            last.pp.recv((3,), torch.float32)


def test_a_message_larger_than_the_whole_ring_arrives_whole() -> None:
    x = torch.randn(1000)
    with shm_meshes(1, 2, message_bytes=64) as (first, last), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(first.pp.send, x)
        assert torch.equal(last.pp.recv((1000,), torch.float32), x)
        sent.result(timeout=10)


def test_a_message_of_another_size_than_agreed_is_caught() -> None:
    with shm_meshes(1, 2) as (first, last):
        first.pp.send(torch.ones(2))
        with pytest.raises(InvariantBroken, match="was sent 8 bytes and expected 12"):
            last.pp.recv((3,), torch.float32)


def test_a_closed_mesh_leaves_no_mapping_and_no_descriptor() -> None:
    gc.collect()
    before = open_files(), mappings()
    with shm_meshes(2, 2):
        assert mappings() > before[1]
    gc.collect()
    assert (open_files(), mappings()) == before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:ekiden-mesh" in line for line in maps)


def test_patience_spins_then_naps_briefly_and_ends_at_its_deadline() -> None:
    clock = ManualClock()
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        clock.advance(max(seconds, 1e-5))

    checks: list[float] = []
    patience = Patience(0.01, clock, sleep)
    assert not patience.until(lambda: False, lambda: checks.append(clock.now()))
    assert clock.now() == pytest.approx(0.01, abs=0.0003)
    assert max(naps) == 200e-6
    assert checks, "a peer's failure is looked for while napping"
    assert patience.until(lambda: True, lambda: None)
