"""Bytes in pieces: their size, and copies of them."""

from __future__ import annotations

from kv_transfer.transports.base import Pieces


def size_of(pieces: Pieces) -> int:
    return sum(map(len, pieces))


def copy_pieces(source: Pieces, target: Pieces) -> None:
    """As many bytes of ``source`` as ``target`` has, in order; it has no more than ``source``."""
    rest = iter(source)
    piece = memoryview(b"")
    for room in target:
        while len(room):
            while not len(piece):
                piece = next(rest)
            count = min(len(piece), len(room))
            room[:count] = piece[:count]
            piece, room = piece[count:], room[count:]


def first(pieces: Pieces, size: int) -> Pieces:
    """The first ``size`` bytes of ``pieces``, where they are."""
    taken = []
    for piece in pieces:
        taken.append(piece[:size])
        size -= len(taken[-1])
    return taken
