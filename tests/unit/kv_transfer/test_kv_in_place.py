"""Wires that move a message out of and into any memory, and let go of it when told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_ends import Ends, pattern, poll
from kv_rig import DTYPES, FAKES, layout, truth, write

from ekiden.core.errors import InvariantBroken
from kv_transfer import in_place
from kv_transfer.in_place import InPlace
from kv_transfer.reshard import runs
from kv_transfer.staging import Slice, gather
from kv_transfer.transports.base import Completed, Incoming, Pieces, Transport
from kv_transfer.transports.memory import Faults, Hub
from kv_transfer.transports.pieces import size_of
from kv_transfer.transports.tcp import TcpTransport

LARGE = 40_000_000
"""More than the system buffers for a connection: a part of it is under way, a part is not."""

SLOW = Faults(hang=1.0, late_s=0.5)
"""Half of each message is there at once."""


@pytest.fixture(params=["tcp", "in_place_memory"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    makers: dict[str, Callable[[], Transport]] = {
        "tcp": TcpTransport,
        "in_place_memory": partial(FAKES["in_place_memory"], Hub(), faults=SLOW),
    }
    ends = Ends(makers[request.param])
    yield ends
    ends.close(ends.a)
    ends.close(ends.b)


def cut(buffer: memoryview, seed: int) -> Pieces:
    """The same bytes in random pieces, some empty."""
    chooser = random.Random(seed)
    cuts = sorted(chooser.randrange(len(buffer) + 1) for _ in range(90))
    bounds = [0, *cuts, len(buffer)]
    return [buffer[a:b] for a, b in itertools.pairwise(bounds)]


def announced(ends: Ends, pieces: Pieces) -> tuple[int, int]:
    """(op, message): sent, and at the other end's door."""
    op = ends.a.send(ends.to_b, 7, pieces)
    (incoming,) = ends.wait(ends.b, Incoming)
    assert (incoming.tag, incoming.bytes) == (7, size_of(pieces))
    return op, incoming.message


@pytest.mark.parametrize("size", [1, 5000, 16_384, 16_385, 3_000_000])
def test_pieces_arrive_in_order_whatever_the_cuts_at_both_ends(ends: Ends, size: int) -> None:
    data, target = pattern(size, 3), memoryview(bytearray(size))
    sent, message = announced(ends, cut(data, 1))
    received = ends.b.receive(message, cut(target, 2))
    assert ends.wait(ends.b, Completed) == [Completed(received, "")]
    assert ends.wait(ends.a, Completed) == [Completed(sent, "")]
    assert target == data


@pytest.mark.parametrize("polls", [0, 1, 5])
def test_memory_that_a_receive_let_go_of_is_not_written_again(ends: Ends, polls: int) -> None:
    data, target = pattern(LARGE, 3), memoryview(bytearray(LARGE))
    sent, message = announced(ends, [data])
    received = ends.b.receive(message, cut(target, 2))
    for _ in range(polls):
        for end in ends.open:
            ends.events[end] += poll(end, 0.01)
    assert not ends.events[ends.b], "the message is through already: it shows nothing"
    ends.b.move(received, memoryview(bytearray(LARGE)))
    target[:] = pattern(LARGE, 9)
    assert ends.wait(ends.b, Completed) == [Completed(received, "")]
    assert ends.wait(ends.a, Completed) == [Completed(sent, "")]
    assert target == pattern(LARGE, 9)


@pytest.mark.parametrize("size", [5000, LARGE])
@pytest.mark.parametrize("polls", [0, 1, 5])
def test_what_a_send_let_go_of_arrives_as_it_was(ends: Ends, size: int, polls: int) -> None:
    source, target = pattern(size, 3), memoryview(bytearray(size))
    spare = memoryview(bytearray(size))
    sent, message = announced(ends, cut(source, 1))
    received = ends.b.receive(message, [target])
    for _ in range(polls):
        for end in ends.open:
            ends.events[end] += poll(end, 0.01)
    ends.a.move(sent, spare)
    source[:] = pattern(size, 9)
    assert ends.wait(ends.b, Completed) == [Completed(received, "")]
    assert ends.wait(ends.a, Completed) == [Completed(sent, "")]
    assert target == pattern(size, 3)


def test_letting_go_of_what_is_not_taken_yet_or_over_is_no_harm(ends: Ends) -> None:
    source, target = pattern(LARGE, 3), memoryview(bytearray(LARGE))
    sent, message = announced(ends, cut(source, 1))
    ends.a.move(sent, memoryview(bytearray(LARGE)))
    source[:] = pattern(LARGE, 9)
    received = ends.b.receive(message, [target])
    ends.wait(ends.b, Completed)
    ends.wait(ends.a, Completed)
    assert target == pattern(LARGE, 3)
    ends.a.move(sent, source)
    ends.b.move(received, source)
    assert source == pattern(LARGE, 9)


parts = st.tuples(
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 5),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)


@given(parts)
def test_pieces_are_the_bytes_that_would_be_gathered(drawn: tuple[object, ...]) -> None:
    dtype, tp, pp, first, count, chooser = drawn
    kv = layout(tp=tp, pp=pp, kv_heads=3, dtype=dtype, head_dim=4)
    rank = chooser.randrange(len(kv.ranks))
    shape = kv.block_shape(rank)
    cache = torch.empty((14, *shape), dtype=DTYPES[dtype])
    blocks = chooser.sample(range(14), 11)
    write(cache, kv, rank, blocks, 11 * kv.block_size)
    heads = sorted(chooser.sample(range(shape[0] + 1), 2))
    layers = sorted(chooser.sample(range(shape[1] + 1), 2))
    start, end = first * 16, (first + count) * 16
    part = Slice(
        heads=slice(*heads), layers=slice(*layers), runs=tuple(runs(start, end, 16)), blocks=blocks
    )
    pieces = InPlace(cache).pieces(part)
    assert pieces is not None
    wanted = truth(kv, rank, end)[start:, slice(*heads), slice(*layers)]
    staging = torch.empty(wanted.numel() * wanted.element_size(), dtype=torch.uint8)
    gather(cache, part, staging)
    assert b"".join(pieces) == staging.numpy().tobytes()


def part_of(start: int, end: int, unit: int, blocks: list[int]) -> Slice:
    whole = slice(0, 2), slice(0, 4)
    return Slice(heads=whole[0], layers=whole[1], runs=tuple(runs(start, end, unit)), blocks=blocks)


@pytest.mark.parametrize(("start", "end", "unit"), [(0, 33, 16), (8, 32, 16), (0, 32, 8)])
def test_parts_of_blocks_are_staged(start: int, end: int, unit: int) -> None:
    memory = InPlace(torch.zeros(4, *layout().block_shape(0)))
    assert memory.pieces(part_of(start, end, unit, [0, 1, 2])) is None
    assert memory.pieces(part_of(0, 32, 16, [0, 1, 2])) is not None


def test_short_pieces_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = InPlace(torch.zeros(4, *layout().block_shape(0)))
    size = layout().block_bytes(0)
    monkeypatch.setattr(in_place, "SHORTEST", size)
    assert memory.pieces(part_of(0, 32, 16, [0, 1])) is not None
    monkeypatch.setattr(in_place, "SHORTEST", size + 1)
    assert memory.pieces(part_of(0, 32, 16, [0, 1])) is None


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_that_is_not_in_the_cache_is_refused(block: int) -> None:
    memory = InPlace(torch.zeros(4, *layout().block_shape(0)))
    with pytest.raises(InvariantBroken, match=f"block {block} is not in a cache of 4"):
        memory.pieces(part_of(0, 32, 16, [0, block]))
