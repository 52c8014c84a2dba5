"""Copies slices of a checkpoint out of mapped files into memory of the rank's own.

Files are mapped, so that ranks of one host share the kernel's cache and each byte comes off the
disk once. A slice is copied once, from the mapping to where it stays, through a window that moves
over the file: a mapping of all of it would stand beside the weights in resident memory.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from typing import BinaryIO

import torch
from torch import Tensor

from ekiden.core.errors import SetupError
from ekiden.layers.weights import Range
from ekiden.models.checkpoint import TensorInfo

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Of elements, by their name in a safetensors header."""

WINDOW = 16 << 20
"""Bytes of a file that are mapped at a time, and so resident beside the weights."""


def read_slice(
    info: TensorInfo,
    *,
    rows: Range | None = None,
    columns: Range | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """``info``'s tensor [rows, columns], contiguous and owned; None takes all of an axis.

    ``info.dtype`` is a key of ``DTYPES``, which is also the dtype where none is given;
    ``columns`` are a matrix's. No row outside ``rows`` is read, and on ``meta`` none at all.

    Raises:
        SetupError: the file cannot be opened or mapped.
    """
    first, last = rows or (0, info.shape[0] if info.shape else 1)
    tail = list(info.shape[1:])
    taken = [columns[1] - columns[0]] if columns else tail
    out = torch.empty([last - first, *taken], dtype=dtype or DTYPES[info.dtype], device=device)
    for start, flat in () if out.is_meta else _windows(info, first, last):
        part = flat.view(-1, *tail)
        stop = start + len(part)
        out[start - first : stop - first] = part[:, slice(*columns)] if columns else part
    return out if info.shape else out[0]


def _windows(info: TensorInfo, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
    """(row, elements from it on, in the mapping itself), as much as a window holds at a time."""
    dtype = DTYPES[info.dtype]
    size = math.prod(info.shape[1:]) * dtype.itemsize
    if not size * (last - first):
        return
    step = max(1, WINDOW // size)
    try:
        with info.file.open("rb") as file:
            _read_ahead(file, info.start + first * size, (last - first) * size)
            for row in range(first, last, step):
                count = min(step, last - row)
                yield row, _map(file, info.start + row * size, count * size, dtype)
    except (OSError, ValueError) as error:
        raise SetupError(f"{info.file} cannot be mapped: {error}") from None


def _map(file: BinaryIO, start: int, size: int, dtype: torch.dtype) -> Tensor:
    """Bytes [start, start + size) of a file as elements; unmapped when the tensor is gone."""
    skipped = start % mmap.ALLOCATIONGRANULARITY
    # A private mapping, so that torch may have it writable; nobody writes.
    mapped = mmap.mmap(
        file.fileno(), skipped + size, access=mmap.ACCESS_COPY, offset=start - skipped
    )
    if skipped % dtype.itemsize == 0:
        return torch.frombuffer(mapped, dtype=dtype, offset=skipped)
    # A header of odd length moved the data off its alignment, where kernels may not read it.
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=skipped).clone().view(dtype)


def _read_ahead(file: BinaryIO, start: int, size: int) -> None:
    """Have the disk begin with all of the slice: faults ask for a little at a time."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
