"""Sums taken by kernels: the bits, the order, the counts and the errors of Python's own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.core.errors import ReplicaFailed
from ekiden.layers.backends.native.ops import NativeOps
from ekiden.parallel import rendezvous
from ekiden.parallel.communicator import ordered_sum
from ekiden.parallel.local import local_meshes
from ekiden.parallel.mesh import Mesh
from tests.shared_mesh import on_all, shm_meshes
from tests.unit.native.native_rig import needs_native

pytestmark = needs_native


@contextmanager
def shared_meshes(
    tp: int, *, slot_bytes: int = 1 << 20, timeout_s: float = 20.0, pp: int = 1
) -> Iterator[list[Mesh]]:
    """Ends of one shared mesh, each for a thread of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_SLOT_BYTES", slot_bytes)
        with shm_meshes(tp, pp, timeout_s) as meshes:
            yield meshes


@settings(max_examples=12, deadline=None)
@given(
    tp=st.integers(2, 4),
    threads=st.integers(1, 2),
    numels=st.lists(st.sampled_from([0, 1, 7, 100, 40_000]), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    by_python=st.lists(st.booleans(), min_size=4, max_size=4),
    slot_bytes=st.sampled_from([64, 1 << 20]),
)
def test_sums_have_the_same_bits_by_kernel_and_by_python_in_any_turn(
    tp: int,
    threads: int,
    numels: list[int],
    dtype: torch.dtype,
    by_python: list[bool],
    slot_bytes: int,
) -> None:
    """Slots of 64 bytes cut a sum into many pieces; 40,000 numbers are shared by a team."""
    numels = [min(n, 500) if slot_bytes == 64 else n for n in numels]
    parts = [[torch.randn(n).to(dtype) for n in numels] for _ in range(tp)]
    with shared_meshes(tp, slot_bytes=slot_bytes) as meshes:
        ops = [NativeOps(dtype, threads) for _ in meshes]

        def work(mesh: Mesh) -> list[Tensor]:
            mine = ops[mesh.tp_rank]
            return [
                mesh.tp.all_reduce(x.clone()) if python else mine.all_reduce(x.clone(), mesh.tp)
                for x, python in zip(parts[mesh.tp_rank], by_python, strict=False)
            ]

        results = on_all(meshes, work)
        for mesh in meshes:
            assert mesh.tp.counter.calls == len(numels)
            assert mesh.tp.counter.bytes == sum(numels) * dtype.itemsize
    for i in range(len(numels)):
        expected = ordered_sum([part[i] for part in parts])
        assert all(torch.equal(result[i], expected) for result in results)


def test_seconds_are_counted() -> None:
    with shared_meshes(2) as meshes:
        ops = [NativeOps(torch.float32, 1) for _ in meshes]
        on_all(meshes, lambda m: ops[m.tp_rank].all_reduce(torch.ones(1000), m.tp))
        assert all(0 < mesh.tp.counter.seconds < 20 for mesh in meshes)


def test_an_absent_rank_is_named_at_the_deadline() -> None:
    absent = r"TP rank 1 did not arrive within 0\.05 s"
    with shared_meshes(2, timeout_s=0.05) as meshes, pytest.raises(ReplicaFailed, match=absent):
        NativeOps(torch.float32, 1).all_reduce(torch.ones(1), meshes[0].tp)


def test_an_absent_rank_ends_a_sum_that_a_team_shares() -> None:
    absent = r"TP rank 1 did not arrive within 0\.05 s"
    with shared_meshes(2, timeout_s=0.05) as meshes, pytest.raises(ReplicaFailed, match=absent):
        NativeOps(torch.float32, 2).all_reduce(torch.ones(100_000), meshes[0].tp)


def test_a_rank_that_gives_up_frees_a_waiting_kernel_with_its_reason() -> None:
    with shared_meshes(2, timeout_s=60.0, pp=2) as meshes, ThreadPoolExecutor(1) as pool:
        ops = NativeOps(torch.float32, 1)
        waiting = pool.submit(ops.all_reduce, torch.ones(1), meshes[1].tp)
        meshes[2].abort("another stage is full of cats")
        with pytest.raises(ReplicaFailed, match="rank 2 gave up: another stage is full of cats"):
            waiting.result(timeout=20)


def test_a_recorded_step_sums_over_any_kind_of_group() -> None:
    """Shared memory: by the kernel; threads of one process: by a call of Python on the tape."""
    with shared_meshes(2) as shared:
        for meshes in (shared, local_meshes(2, 1)):
            inputs = [torch.zeros(5) for _ in meshes]
            replays = []
            for mesh, x in zip(meshes, inputs, strict=True):
                ops = NativeOps(torch.float32, 1)
                weight = torch.ones(5)

                def step(
                    ops: NativeOps = ops, x: Tensor = x, mesh: Mesh = mesh, weight: Tensor = weight
                ) -> tuple[Tensor, ...]:
                    total = ops.all_reduce(ops.norm(x[None], weight, 0.0), mesh.tp)
                    return (ops.norm(total, weight, 0.0),)

                replays.append(ops.record(step))
            calls = [mesh.tp.counter.calls for mesh in meshes]
            for turn in (1.0, 2.0):
                for rank, x in enumerate(inputs):
                    x.copy_(torch.arange(5.0) + turn * (rank + 1))
                results = on_all(meshes, lambda m: replays[m.tp_rank]()[0].clone())  # noqa: B023
                normed = [x / x.square().mean().sqrt() for x in inputs]
                total = normed[0] + normed[1]
                expected = total / total.square().mean().sqrt()
                torch.testing.assert_close(results[0][0], expected)
                assert torch.equal(results[0], results[1])
            assert [m.tp.counter.calls - c for m, c in zip(meshes, calls, strict=True)] == [2, 2]
