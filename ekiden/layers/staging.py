"""A step's numbers on their way to the device: one copy, from pinned memory, without waiting.

A copy from ordinary memory waits for the device, and each costs some microseconds of launching. So
the arrays of a step are laid end to end in one pinned piece. torch gives that piece out again only
when the copy has ended, so nothing here has to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.integer[Any]]

ALIGNMENT = 16
"""Bytes; what kernels like their pointers to be a multiple of."""


def to_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Each array as a tensor of its shape and dtype on ``device``.

    On the CPU they share the arrays' memory; elsewhere the copy may still be under way, in order
    with what the current stream does next.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    staged = pack(arrays, pin=device.type == "cuda")
    return unpack(staged.to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[Array], *, pin: bool) -> Tensor:
    """All arrays end to end as bytes, each at a multiple of ``ALIGNMENT``."""
    staged = torch.empty(sum(map(_room, arrays)), dtype=torch.uint8, pin_memory=pin)
    bytes_, at = staged.numpy(), 0
    for array in arrays:
        bytes_[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += _room(array)
    return staged


def unpack(staged: Tensor, like: Sequence[Array]) -> list[Tensor]:
    """The tensors that ``pack`` laid out, as views."""
    tensors, at = [], 0
    for array in like:
        dtype = torch.int32 if array.dtype == np.int32 else torch.int64
        flat = staged[at : at + array.nbytes].view(dtype)
        tensors.append(flat.view(array.shape))
        at += _room(array)
    return tensors


def _room(array: Array) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT
