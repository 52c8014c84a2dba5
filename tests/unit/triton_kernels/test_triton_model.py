"""Whole models on the Triton kernels compute what transformers computes, recorded steps too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ekiden.core.errors import SetupError
from ekiden.layers.backends.choose import choose_ops
from ekiden.layers.backends.triton import graphs
from ekiden.layers.backends.triton.ops import TritonOps
from tests.unit.models.tiny import Replica, make_checkpoint, worst_error

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
TOLERANCE = 1e-4


FAMILIES = ["smollm2", "gemma2", "qwen3", "phi4-mini", "qwen2-window", "olmo2"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_on_triton_equals_transformers(device: str, tmp_path: Path, family: str) -> None:
    reference = make_checkpoint(tmp_path, family)
    assert worst_error(Replica(tmp_path, kernels="triton"), reference) < TOLERANCE


def test_rows_are_padded_to_few_sizes() -> None:
    sizes = [graphs.bucket_of(rows) for rows in range(1, graphs.LARGEST + 1)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert all(size - rows < max(8, rows / 4) for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 31
    assert graphs.bucket_of(graphs.LARGEST + 1) == 0


def test_triton_is_chosen_by_name(device: str) -> None:
    assert choose_ops("triton", torch.device(device), torch.float32).name == "triton"


def test_triton_without_a_device_or_an_interpreter_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(SetupError, match="--kernels triton cannot run on cpu"):
        choose_ops("triton", torch.device("cpu"), torch.float32)


def test_an_old_card_falls_back_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_ops("auto", torch.device("cuda"), torch.float32).name == "torch"
    assert "7.5 is below 8.0" in caplog.text
    with pytest.raises(SetupError, match=r"7\.5 is below 8\.0"):
        choose_ops("triton", torch.device("cuda"), torch.float32)


def test_the_ops_fit_the_seam() -> None:
    from ekiden.layers.ops import Ops

    ops: Ops = TritonOps(torch.device("cpu"))
    assert ops.name == "triton"
