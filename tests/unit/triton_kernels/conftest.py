"""Triton's kernels run on the GPU where there is one, else in the interpreter."""

from __future__ import annotations

import pytest
import torch
from triton import knobs


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> str:
    if not knobs.runtime.interpret and not torch.cuda.is_available():
        pytest.fail("no GPU, and triton was imported without TRITON_INTERPRET=1 before it")
    return "cpu" if knobs.runtime.interpret else "cuda"
