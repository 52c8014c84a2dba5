"""q and k normed over their whole width: as plain torch, alone, over ranks and recorded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from ekiden.layers.backends.native.ops import NativeOps, _copy_into
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.ops import WidthNorm
from ekiden.parallel.local import local_meshes
from ekiden.parallel.mesh import Mesh
from tests.shared_mesh import shm_meshes
from tests.unit.native.native_rig import needs_native

pytestmark = needs_native

Q, W, EPS = 24, 16, 1e-5
"""Widths of q and of k, all ranks together."""


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


Q_WEIGHT, K_WEIGHT = normal(Q, seed=1), normal(W, seed=2)


def share(rank: int, ranks: int) -> WidthNorm:
    """Heads dealt evenly; with three ranks the last two hold the same half of k."""
    q = Q // ranks
    k = (0, W // 2) if rank == 0 else (W // 2, W)
    return WidthNorm(
        q_weight_Q=Q_WEIGHT[rank * q : (rank + 1) * q].contiguous(),
        k_weight_W=K_WEIGHT[k[0] : k[1]].contiguous(),
        widths=(Q, W),
        counts_k=rank < 2,
        eps=EPS,
    )


def part(qkv_TE: Tensor, rank: int, ranks: int) -> Tensor:
    """The rank's columns of q, k and v."""
    q, half = Q // ranks, W // 2
    k = Q + half * min(rank, 1)
    return torch.cat(
        (
            qkv_TE[:, rank * q : (rank + 1) * q],
            qkv_TE[:, k : k + half],
            qkv_TE[:, k + W : k + W + half],
        ),
        dim=1,
    )


WHOLE = WidthNorm(q_weight_Q=Q_WEIGHT, k_weight_W=K_WEIGHT, widths=(Q, W), counts_k=True, eps=EPS)


def by_hand(qkv_TE: Tensor) -> Tensor:
    q, k, v = qkv_TE.float().split([Q, W, W], dim=1)
    q = q / (q.square().mean(1, keepdim=True) + EPS).sqrt() * Q_WEIGHT
    k = k / (k.square().mean(1, keepdim=True) + EPS).sqrt() * K_WEIGHT
    return torch.cat((q, k, v), dim=1).to(qkv_TE.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
def test_one_rank_norms_as_plain_torch_and_by_hand(dtype: torch.dtype, rows: int) -> None:
    qkv_TE, tp = normal(rows, Q + 2 * W, seed=3).to(dtype), local_meshes(1, 1)[0].tp
    expected = by_hand(qkv_TE)
    tolerance = {"rtol": 2.0**-7 if dtype == torch.bfloat16 else 2e-6, "atol": 1e-6}
    for ops in (TorchOps(), NativeOps(dtype, 2)):
        out = ops.width_norm(qkv_TE.clone(), WHOLE, tp)
        torch.testing.assert_close(out, expected, **tolerance)
        assert torch.equal(out[:, Q + W :], qkv_TE[:, Q + W :])


class Rank:
    """One rank's norm of what ``x`` holds, run anew or replayed."""

    def __init__(self, mesh: Mesh, *, recorded: bool) -> None:
        self.mesh, ranks = mesh, mesh.tp.size
        self.x = torch.zeros(4, Q // ranks + W)
        self.ops, self.norm = NativeOps(torch.float32, 1), share(mesh.tp_rank, ranks)
        self.run = self.ops.record(self.step) if recorded else self.step

    def step(self) -> tuple[Tensor, ...]:
        copied = self.ops.empty(self.x.shape, torch.float32)  # the norm overwrites it
        self.ops.call(lambda: _copy_into(copied, self.x))
        return (self.ops.width_norm(copied, self.norm, self.mesh.tp),)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("recorded", [False, True])
def test_ranks_norm_by_the_whole_width_and_count_a_shared_head_once(
    ranks: int, recorded: bool
) -> None:
    with shm_meshes(ranks, 1, 20.0) as shared:
        for meshes in (shared, local_meshes(ranks, 1, timeout_s=20.0)):
            parts = [Rank(mesh, recorded=recorded) for mesh in meshes]
            for seed in (5, 6):
                qkv_TE = normal(4, Q + 2 * W, seed=seed)
                for rank, one in enumerate(parts):
                    one.x.copy_(part(qkv_TE, rank, ranks))
                with ThreadPoolExecutor(ranks) as pool:
                    results = list(pool.map(lambda one: one.run()[0].clone(), parts))
                for rank, result in enumerate(results):
                    torch.testing.assert_close(result, part(by_hand(qkv_TE), rank, ranks))


def test_a_sum_is_that_of_torch_and_recorded_again_each_time() -> None:
    ops = NativeOps(torch.bfloat16, 1)
    into, x = (normal(3, 8, seed=seed).bfloat16() for seed in (7, 8))
    before = into.clone()
    assert torch.equal(ops.add(into, x), before + x)
    total = into.clone()
    replay = ops.record(lambda: (ops.add(into, x),))
    for _ in range(2):
        total = total + x
        assert torch.equal(replay()[0], total)
