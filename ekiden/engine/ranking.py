"""The most likely tokens of every row, without sorting the row.

The row is laid out in columns. The k-th largest of the columns' maxima is a bound: k values at
least are not below it, so neither is any of the k largest. Only the columns that reach the bound
are looked into, and only the values that reach it are sorted.

Shape legend: S rows, V vocabulary, K tokens wanted, G values of a column, C columns, P columns that
are looked into.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

GROUP = 32
"""Values of a column: few columns are quickly bounded, short ones hold few values in vain."""

_LOW = np.uint64(0xFFFFFFFF)
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def ranked(values_SV: torch.Tensor, k: int) -> Ints:
    """Ids [S, min(k, V)] of the k largest of each row (float32, no NaN), on the host.

    Value descending, lower id first among equals.
    """
    k = min(k, values_SV.shape[1])
    if not k:
        return np.empty((len(values_SV), 0), np.int64)
    if values_SV.device.type != "cpu":
        return np.asarray(on_device(values_SV, k).cpu().numpy())
    columns = values_SV.shape[1] // GROUP
    if columns < 2 * k:
        return _sorted(values_SV.numpy(), k)
    return _from_columns(values_SV, k, columns)


def on_device(values_SV: torch.Tensor, k: int) -> torch.Tensor:
    """``ranked`` by one stable sort, which another device than a CPU does for all rows at once."""
    return torch.sort(values_SV, dim=-1, descending=True, stable=True).indices[:, :k]


def _sorted(values_SV: Floats, k: int) -> Ints:
    keys_SV = _keys(values_SV, np.arange(values_SV.shape[1]))
    keys_SV.sort(axis=1)
    return (keys_SV[:, :k] & _LOW).astype(np.int64)


def _keys(values: Floats, ids: Ints) -> NDArray[np.uint64]:
    """Numbers that ascend as values descend, then as ids ascend."""
    bits = (values + np.float32(0)).view(np.uint32)  # -0 becomes 0: they are equal
    # IEEE numbers of one sign are in order as integers; negative ones in the reverse order.
    falling = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF))
    return falling.astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)


def _from_columns(values_SV: torch.Tensor, k: int, columns: int) -> Ints:
    size = columns * GROUP
    values_SGC = values_SV[:, :size].view(-1, GROUP, columns)
    maxima_SC = values_SGC.amax(dim=1)
    bound_S = torch.topk(maxima_SC, k, dim=1, sorted=False).values.amin(dim=1).numpy()
    row_P, column_P = np.nonzero(maxima_SC.numpy() >= bound_S[:, None])
    values_PG = values_SGC.numpy()[row_P, :, column_P]
    place, g = np.nonzero(values_PG >= bound_S[row_P, None])
    rest = values_SV[:, size:].numpy()
    row, tail = np.nonzero(rest >= bound_S[:, None])
    return _best(
        np.concatenate((row_P[place], row)),
        np.concatenate((values_PG[place, g], rest[row, tail])),
        np.concatenate((g * columns + column_P[place], size + tail)),
        len(values_SV),
        k,
    )


def _best(rows: Ints, values: Floats, ids: Ints, count: int, k: int) -> Ints:
    """The k best of each of ``count`` rows among candidates, of which each row has k or more."""
    order = np.argsort(rows, kind="stable")
    sizes = np.bincount(rows, minlength=count)
    starts = np.cumsum(sizes) - sizes
    rows = rows[order]
    table = np.full((count, sizes.max()), ~np.uint64(0))
    table[rows, np.arange(len(rows)) - starts[rows]] = _keys(values, ids)[order]
    table.sort(axis=1)
    return (table[:, :k] & _LOW).astype(np.int64)
