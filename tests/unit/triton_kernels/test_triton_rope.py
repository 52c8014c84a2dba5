"""One pass rotates q, rotates and stores k, stores v: as norm, rotate and write done one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.layers.backends.triton import kv
from ekiden.layers.backends.triton.rope import rotate_and_store
from ekiden.layers.rope import Rope, rotate

HEADS, KEYS, BLOCK, EPS = 6, 2, 4, 1e-6
SLOTS = [9, 4, -1, 18, 5]


def inputs(dim: int, rotated: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(len(SLOTS), (HEADS + 2 * KEYS) * dim, generator=generator).to(dtype)
    weights = 1 + torch.randn(2, dim, generator=generator)
    frequencies = 100.0 ** -(torch.arange(rotated // 2) / (rotated // 2))
    rotation = Rope(frequencies).rotation(torch.tensor([0, 5, 2, 1000, 17]))
    return qkv, *weights, *rotation


def run(
    device: str, dim: int, rotated: int, dtype: torch.dtype, normed: bool, kind: int
) -> tuple[Tensor, Tensor]:
    """q and the layer's view of a cache whose rows were all 3."""
    qkv, q_weight, k_weight, cos, sin = (x.to(device) for x in inputs(dim, rotated, dtype))
    width = kv.row_width(dim, kind)
    cache = torch.full((5, KEYS, 3, 2, BLOCK, width), 3, device=device)
    cache = cache.to(dtype if kind == kv.PLAIN else torch.int8)
    q = torch.empty(len(SLOTS), HEADS, dim, dtype=dtype, device=device)
    options = {"q_weight_D": q_weight, "k_weight_D": k_weight, "eps": EPS} if normed else {}
    view, slots = kv.layer_view(cache, 1), torch.tensor(SLOTS, device=device)
    rotate_and_store(qkv, cos, sin, slots, view, q, kind=kind, **options)
    assert (cache[:, :, 0] == 3).all(), "a row of the layer before was written"
    assert (cache[:, :, 2] == 3).all(), "a row of the layer behind was written"
    return q.cpu(), view.cpu()


def reference(
    dim: int, rotated: int, dtype: torch.dtype, normed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    qkv, q_weight, k_weight, cos, sin = inputs(dim, rotated, dtype)
    q, k, v = qkv.view(len(SLOTS), -1, dim).split([HEADS, KEYS, KEYS], dim=1)
    if normed:
        q = F.rms_norm(q.float(), (dim,), q_weight, EPS).to(dtype)
        k = F.rms_norm(k.float(), (dim,), k_weight, EPS).to(dtype)
    turn = torch.stack((cos, sin))
    return _rotate(q, turn), _rotate(k, turn), v


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    from ekiden.layers.rope import Rotation

    return rotate(x, Rotation(*turn))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "rotated"), [(16, 16), (24, 24), (32, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_pass_equals_norm_rotate_and_write(
    device: str, dtype: torch.dtype, dim: int, rotated: int, normed: bool
) -> None:
    q, view = run(device, dim, rotated, dtype, normed, kv.PLAIN)
    q_expected, k_expected, v_expected = reference(dim, rotated, dtype, normed)
    step = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(q, q_expected, rtol=step, atol=step)
    written = torch.zeros(view.shape[:1] + view.shape[3:4], dtype=torch.bool)
    for token, slot in enumerate(SLOTS):
        if slot < 0:
            continue
        block, offset = divmod(slot, BLOCK)
        written[block, offset] = True
        torch.testing.assert_close(
            view[block, :, 0, offset], k_expected[token], rtol=step, atol=step
        )
        assert torch.equal(view[block, :, 1, offset], v_expected[token])
    left = view.permute(0, 3, 1, 2, 4)[~written]
    assert (left == 3).all(), "a row without a token, or the padded one's, was written"


@pytest.mark.parametrize("kind", [kv.INT8, kv.FP8])
def test_quantised_rows_hold_the_values_within_half_a_step(device: str, kind: int) -> None:
    dim = 16
    _, plain = run(device, dim, dim, torch.float32, False, kv.PLAIN)
    _, view = run(device, dim, dim, torch.float32, False, kind)
    for slot in SLOTS:
        if slot < 0:
            continue
        block, offset = divmod(slot, BLOCK)
        rows, wanted = view[block, :, :, offset], plain[block, :, :, offset]
        scales = rows[..., dim:].contiguous().view(torch.float32)
        codes = rows[..., :dim].contiguous()
        peak = 127.0 if kind == kv.INT8 else 448.0
        torch.testing.assert_close(scales, wanted.abs().amax(-1, keepdim=True) / peak)
        scaled = wanted / scales
        if kind == kv.INT8:
            assert torch.equal(codes, scaled.round().to(torch.int8))
        else:
            exact = scaled.to(torch.float8_e4m3fn).view(torch.int8)
            same = (codes == exact).float().mean()
            assert same == 1.0, f"{same} of the e4m3 bytes are torch's"


def test_a_cache_of_other_rows_is_refused(device: str) -> None:
    cache = torch.zeros(1, 1, 1, 2, 4, 16, device=device)
    with pytest.raises(ValueError, match="head_dim 8"):
        kv.check_view(kv.layer_view(cache, 0), 8, kv.PLAIN)
    with pytest.raises(ValueError, match="int8"):
        kv.check_view(kv.layer_view(cache, 0), 12, kv.INT8)
