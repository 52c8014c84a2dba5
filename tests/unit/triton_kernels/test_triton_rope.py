"""One pass rotates q, rotates and stores k, stores v: as norm, rotate and write done one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.cache.layout import SCALE_BYTES
from ekiden.cache.scaled import LARGEST, pack_rows
from ekiden.layers.backends.triton import kv
from ekiden.layers.backends.triton.rope import rotate_and_store
from ekiden.layers.rope import Rope, Rotation, rotate

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
    device: str, dim: int, rotated: int, dtype: torch.dtype, normed: bool, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """q and the layer's view of a cache whose rows were all 3."""
    qkv, q_weight, k_weight, cos, sin = (x.to(device) for x in inputs(dim, rotated, dtype))
    width = dim + SCALE_BYTES if kind in LARGEST else dim
    cache = torch.full((5, KEYS, 3, 2, BLOCK, width), 3.0, device=device).to(kind)
    q = torch.empty(len(SLOTS), HEADS, dim, dtype=dtype, device=device)
    options = {"q_weight_D": q_weight, "k_weight_D": k_weight, "eps": EPS} if normed else {}
    view, slots = kv.layer_view(cache, 1), torch.tensor(SLOTS, device=device)
    rotate_and_store(qkv, cos, sin, slots, view, q, **options)
    assert (cache[:, :, 0].float() == 3).all(), "a row of the layer before was written"
    assert (cache[:, :, 2].float() == 3).all(), "a row of the layer behind was written"
    return q.cpu(), view.cpu()


def reference(
    dim: int, rotated: int, dtype: torch.dtype, normed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    qkv, q_weight, k_weight, cos, sin = inputs(dim, rotated, dtype)
    q, k, v = qkv.view(len(SLOTS), -1, dim).split([HEADS, KEYS, KEYS], dim=1)
    if normed:
        q = F.rms_norm(q.float(), (dim,), q_weight, EPS).to(dtype)
        k = F.rms_norm(k.float(), (dim,), k_weight, EPS).to(dtype)
    rotation = Rotation(cos, sin)
    return rotate(q, rotation), rotate(k, rotation), v


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "rotated"), [(16, 16), (24, 24), (32, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_pass_equals_norm_rotate_and_write(
    device: str, dtype: torch.dtype, dim: int, rotated: int, normed: bool
) -> None:
    q, view = run(device, dim, rotated, dtype, normed, dtype)
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


@pytest.mark.parametrize("kind", list(LARGEST))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_quantised_rows_are_the_reference_bytes(
    device: str, dtype: torch.dtype, kind: torch.dtype
) -> None:
    dim = 16
    _, plain = run(device, dim, dim, dtype, False, dtype)
    _, view = run(device, dim, dim, dtype, False, kind)
    for slot in SLOTS:
        if slot >= 0:
            block, offset = divmod(slot, BLOCK)
            expected = pack_rows(plain[block, :, :, offset], kind)
            assert torch.equal(view[block, :, :, offset].view(torch.uint8), expected)


def hard_to_round(kind: torch.dtype) -> Tensor:
    """[rows, 32]: every byte's value, and what lies half way between two; the scale is 1."""
    if kind == torch.int8:
        exact = torch.arange(-127, 128).float()
    else:
        exact = torch.arange(256).byte().view(torch.float8_e4m3fn).float()
        exact = exact[exact.isfinite()].sort().values
    values = torch.cat((exact, (exact[1:] + exact[:-1]) / 2, torch.tensor([-0.0])))
    rows = values[: len(values) // 31 * 31].view(-1, 31)
    return torch.cat((torch.full((len(rows), 1), LARGEST[kind]), rows), dim=1)


@pytest.mark.parametrize("kind", list(LARGEST))
def test_bytes_are_rounded_as_the_reference_rounds(device: str, kind: torch.dtype) -> None:
    """Halves to even, subnormal e4m3 too: values go through as v, which is not rotated."""
    v = hard_to_round(kind)
    tokens, dim = v.shape
    qkv = torch.cat((torch.ones(tokens, 2 * dim), v), dim=1).to(device)
    cache = torch.zeros(2, 1, 1, 2, 16, dim + SCALE_BYTES, device=device).to(kind)
    angles, slots = torch.zeros(tokens, dim, device=device), torch.arange(tokens, device=device)
    q = torch.empty(tokens, 1, dim, device=device)
    rotate_and_store(qkv, angles, angles, slots, kv.layer_view(cache, 0), q)
    stored = cache[:, 0, 0, 1].reshape(32, -1)[:tokens].view(torch.uint8).cpu()
    assert torch.equal(stored, pack_rows(v, kind))


def test_a_cache_of_other_rows_is_refused(device: str) -> None:
    cache = torch.zeros(1, 1, 1, 2, 4, 16, device=device)
    with pytest.raises(ValueError, match="head_dim 8"):
        kv.rows_of(kv.layer_view(cache, 0), 8)
    with pytest.raises(ValueError, match="head_dim 16"):
        kv.rows_of(kv.layer_view(cache.to(torch.int8), 0), 16)
