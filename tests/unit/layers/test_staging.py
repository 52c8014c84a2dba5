"""What is packed into one piece comes out as it went in."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ekiden.layers.staging import ALIGNMENT, pack, to_device, unpack

SHAPES = st.lists(
    st.tuples(st.sampled_from([np.int32, np.int64]), st.integers(0, 5), st.integers(1, 4)),
    max_size=6,
)


@given(shapes=SHAPES)
def test_arrays_come_back_aligned_and_whole(shapes: list[tuple[type, int, int]]) -> None:
    arrays = [
        np.arange(rows * columns, dtype=dtype).reshape(rows, columns) + number
        for number, (dtype, rows, columns) in enumerate(shapes)
    ]
    staged = pack(arrays, pin=False)
    tensors = unpack(staged, arrays)
    assert len(tensors) == len(arrays)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)


def test_another_device_gets_shapes_and_dtypes() -> None:
    arrays = [np.zeros((3, 2), np.int32), np.zeros(5, np.int64)]
    on_meta = to_device(arrays, torch.device("meta"))
    assert [(t.shape, t.dtype) for t in on_meta] == [((3, 2), torch.int32), ((5,), torch.int64)]
    assert all(t.is_meta for t in on_meta)


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.zeros(4, np.int64)
    [tensor] = to_device([array], torch.device("cpu"))
    array[2] = 7
    assert tensor[2] == 7
