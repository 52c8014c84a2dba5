"""Ranks as threads: the same answers on every rank, and no wait without an end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from ekiden.core.errors import InvariantBroken, ReplicaFailed
from ekiden.parallel.local import local_meshes
from ekiden.parallel.mesh import Mesh

T = TypeVar("T")


def on_all(meshes: list[Mesh], work: Callable[[Mesh], T]) -> list[T]:
    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(work, meshes))


def test_ranks_are_numbered_stage_by_stage() -> None:
    meshes = local_meshes(tp=3, pp=2)
    assert [(m.rank, m.tp_rank, m.pp_rank) for m in meshes] == [
        (p * 3 + t, t, p) for p in range(2) for t in range(3)
    ]
    assert [m.is_sampler for m in meshes] == [False, False, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_gives_every_rank_the_same_bits_summed_in_rank_order(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(5, 7, generator=generator).to(dtype) for _ in range(4)]
    expected = (((parts[0].float() + parts[1]) + parts[2]) + parts[3]).to(dtype)
    results = on_all(local_meshes(4, 1), lambda m: m.tp.all_reduce(parts[m.tp_rank].clone()))
    assert all(torch.equal(result, expected) for result in results)


def test_gather_joins_uneven_parts_on_the_root_only() -> None:
    whole = torch.arange(2 * 7).view(2, 7)
    sizes = [3, 2, 2]
    parts = whole.split(sizes, dim=1)
    meshes = local_meshes(3, 1)
    full = on_all(meshes, lambda m: m.tp.all_gather(parts[m.tp_rank], sizes, dim=1))
    assert all(torch.equal(result, whole) for result in full)
    rooted = on_all(meshes, lambda m: m.tp.gather(parts[m.tp_rank], sizes, dim=1))
    assert torch.equal(rooted[0], whole)
    assert rooted[1:] == [None, None]


def test_a_collective_counts_its_calls_and_bytes_and_a_group_of_one_does_not() -> None:
    meshes = local_meshes(2, 1)
    on_all(meshes, lambda m: [m.tp.all_reduce(torch.ones(10)) for _ in range(3)])
    assert [(m.tp.counter.calls, m.tp.counter.bytes) for m in meshes] == [(3, 120), (3, 120)]
    x = torch.ones(4)
    alone = Mesh()
    assert alone.tp.all_reduce(x) is x
    assert alone.tp.counter.calls == 0


def test_an_absent_rank_is_named_when_the_deadline_passes() -> None:
    mesh = local_meshes(3, 1, timeout_s=0.05)[1]
    with pytest.raises(ReplicaFailed, match=r"TP ranks \[0, 2\] did not arrive within 0\.05 s"):
        mesh.tp.all_reduce(torch.ones(1))


def test_a_rank_that_gives_up_frees_the_others_at_once() -> None:
    meshes = local_meshes(2, 2, timeout_s=60.0)
    meshes[0].abort("boom")
    with pytest.raises(ReplicaFailed, match="TP rank 0 gave up: boom"):
        meshes[1].tp.all_reduce(torch.ones(1))
    with pytest.raises(ReplicaFailed, match="stage 0 gave up: boom"):
        meshes[2].pp.recv((1,), torch.float32)


def test_the_pipeline_holds_several_micro_batches_in_order_and_apart() -> None:
    first, last = local_meshes(1, 2)
    x = torch.zeros(2)
    for step in range(3):
        first.pp.send(x.fill_(step))  # the sender reuses its tensor
    got = [last.pp.recv((2,), torch.float32) for _ in range(3)]
    assert [int(tensor[0]) for tensor in got] == [0, 1, 2]
    assert (first.pp.sent.bytes, last.pp.received.bytes) == (24, 24)
    with pytest.raises(InvariantBroken, match="nobody to send to"):
        last.pp.send(x)


def test_a_tensor_of_another_shape_than_agreed_is_refused() -> None:
    first, last = local_meshes(1, 2)
    first.pp.send(torch.zeros(2))
    with pytest.raises(InvariantBroken, match=r"expected torch.float32 \[3\]"):
        last.pp.recv((3,), torch.float32)


def test_a_full_link_fails_the_sender_at_its_deadline() -> None:
    first, _ = local_meshes(1, 2, timeout_s=0.05)
    for _ in range(4):
        first.pp.send(torch.ones(1))
    with pytest.raises(ReplicaFailed, match=r"stage 1 took nothing within 0\.05 s"):
        first.pp.send(torch.ones(1))
