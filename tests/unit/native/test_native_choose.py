"""Which kernels a CPU gets, and what is said where it does not get the native ones."""

from __future__ import annotations

import logging

import pytest
import torch

from ekiden.core.errors import SetupError
from ekiden.layers.backends.choose import Threads, choose_ops
from ekiden.layers.backends.native import build
from ekiden.layers.backends.native.ops import NativeOps
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.batch import ForwardBatch, Span
from ekiden.layers.ops import AttentionKind
from tests.unit.native.native_rig import broken_cache, native, needs_native

CPU = torch.device("cpu")


@needs_native
@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_a_cpu_that_can_run_them_gets_native_kernels_on_its_threads(kernels: str) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        ops = choose_ops(kernels, CPU, torch.bfloat16, Threads(share=3, most=3))
        assert isinstance(ops, NativeOps)
        assert ops.dtype == torch.bfloat16
        assert (ops.pool.threads, ops.pool.seat) == (3, None)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@needs_native
def test_a_rank_that_may_borrow_has_a_seat_and_threads_for_every_core(monkeypatch, tmp_path):
    monkeypatch.setattr("ekiden.layers.backends.native.cores.SHARED_MEMORY", tmp_path)
    ops = choose_ops("native", CPU, torch.float32, Threads(share=1, most=3))
    assert ops.pool.threads == 3
    assert ops.pool.seat.row.share == 1


@needs_native
def test_a_rank_that_gets_no_seat_keeps_to_its_share(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("ekiden.layers.backends.native.cores.SHARED_MEMORY", tmp_path / "none")
    ops = choose_ops("native", CPU, torch.float32, Threads(share=1, most=3))
    assert (ops.pool.threads, ops.pool.seat) == (1, None)
    assert "cores are not shared with other ranks of this host" in caplog.text


def test_plain_torch_can_be_asked_for() -> None:
    assert isinstance(choose_ops("torch", CPU, torch.float32), TorchOps)


def test_float16_is_left_to_torch_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_ops("auto", CPU, torch.float16), TorchOps)
    assert "not native" in caplog.messages[0]
    with pytest.raises(SetupError, match="--kernels native cannot run"):
        choose_ops("native", CPU, torch.float16)


def test_a_machine_without_a_compiler_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise build.NativeUnavailable("g++ cannot be run: no such file")

    monkeypatch.setattr("ekiden.layers.backends.native.ops.Pool", refuse)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_ops("auto", CPU, torch.float32), TorchOps)
    assert "g++ cannot be run" in caplog.messages[0]


def test_a_model_that_is_only_weighed_needs_no_kernels() -> None:
    assert isinstance(choose_ops("auto", torch.device("meta"), torch.float32), TorchOps)


@needs_native
def test_tensors_that_a_kernel_would_misread_are_refused() -> None:
    ops = native(torch.float32)
    x, half = torch.ones(2, 8), torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="weight must be float32"):
        ops.norm(x, half, 1e-5)
    with pytest.raises(ValueError, match="do not lie in rows"):
        ops.norm(x.T, torch.ones(2), 1e-5)
    cache = broken_cache(1, 1, 16, 8, torch.bfloat16)
    batch = ForwardBatch.build([Span([0, 0], 0, [0], 0)], 16)
    with pytest.raises(ValueError, match=r"cache of torch\.bfloat16"):
        ops.attend(x.view(2, 1, 8), cache, 0, batch, AttentionKind(1.0))
