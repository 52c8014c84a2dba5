"""What is moved: a cache in the shape of Llama-3.1-8B's, and which of its blocks at a time.

Legend of shapes: B blocks, N bytes.
"""

from __future__ import annotations

import mmap
import os
import random
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ekiden.cache.layout import KvLayout, RankLayout
from ekiden.parallel.split import head_split

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 32, 8, 128, 16
TOKENS = (128, 1000, 8000)
SEED = 20261130
TPS = (1, 2)
"""Of the sending side; the receiving side has one rank."""

Bytes = npt.NDArray[np.uint8]


class Work(NamedTuple):
    """One transfer: so many tokens, and which of the scattered blocks."""

    tokens: int
    turn: int

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK)

    def tables(self, pool_blocks: int) -> tuple[list[int], list[int]]:
        """The blocks of the sender and of the receiver, position by position. Every turn has
        others, as far as the pool reaches, so that no processor's cache holds them already."""
        first = self.turn * self.blocks
        return tuple(  # type: ignore[return-value]
            [order[(first + i) % pool_blocks] for i in range(self.blocks)]
            for order in _orders(pool_blocks)
        )


def _orders(pool_blocks: int) -> list[list[int]]:
    chance = random.Random(SEED)
    return [chance.sample(range(pool_blocks), pool_blocks) for _ in range(2)]


def layout(tp: int) -> KvLayout:
    """``tp`` ranks of bf16, 2 MiB a block over all of them."""
    shares = head_split(Q_HEADS, KV_HEADS, tp)
    ranks = tuple(
        RankLayout(
            tp_rank=rank, pp_rank=0, head_start=share.kv_start, head_stop=share.kv_stop,
            layer_start=0, layer_stop=LAYERS,
        )
        for rank, share in enumerate(shares)
    )  # fmt: skip
    return KvLayout(
        dtype="bfloat16", block_size=BLOCK, num_layers=LAYERS, num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, tp=tp, pp=1, ranks=ranks,
    )  # fmt: skip


class Sources:
    """The senders' pools, in memory that every process of the bench maps: the same pages for all.

    The ranks of each TP hold the same numbers, so that what arrives is the same as well.
    """

    def __init__(self, pool_blocks: int) -> None:
        block = layout(1).block_bytes(0)
        size = pool_blocks * block
        self._fds = {tp: [_memory_file(size // tp) for _ in range(tp)] for tp in TPS}
        pools = {
            tp: [_mapped(fd, block // tp, writable=True) for fd in fds]
            for tp, fds in self._fds.items()
        }
        chance = np.random.default_rng(SEED)
        for number in range(pool_blocks):
            numbers = np.frombuffer(chance.bytes(block), np.uint8)
            for tp, ranks in pools.items():
                for rank_BN, part in zip(ranks, np.split(numbers, tp), strict=True):
                    rank_BN[number] = part

    def paths(self) -> dict[int, list[str]]:
        """By TP: a file for each rank, for processes that start while this one lives."""
        return {tp: [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds] for tp, fds in self._fds.items()}

    def close(self) -> None:
        for fd in [fd for fds in self._fds.values() for fd in fds]:
            os.close(fd)


def map_source(path: str, block: int, *, writable: bool = False) -> tuple[Bytes, int]:
    """A rank's pool as [B, N] bytes, N being ``block``, and its descriptor."""
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    return _mapped(fd, block, writable=writable), fd


def target_pool(pool_blocks: int) -> Bytes:
    """A receiver's pool [B, N] as a decode replica has it: private, touched, on huge pages where
    there are some."""
    block = layout(1).block_bytes(0)
    mapped = mmap.mmap(-1, pool_blocks * block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages has small ones
        mapped.madvise(mmap.MADV_HUGEPAGE)
    pool_BN = np.frombuffer(mapped, np.uint8).reshape(pool_blocks, block)
    pool_BN[:] = 0
    return pool_BN


def _memory_file(size: int) -> int:
    """As a prefill replica's pool: peers may be given it."""
    fd = os.memfd_create("bench-transfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def _mapped(fd: int, block: int, *, writable: bool) -> Bytes:
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapped = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=access)
    return np.frombuffer(mapped, np.uint8).reshape(-1, block)


def check(work: Work, source_BN: Bytes, target_BN: Bytes) -> None:
    """Raises ValueError: the target does not hold what was to be moved."""
    there, here = work.tables(len(source_BN))
    left = work.tokens
    for number, (source, target) in enumerate(zip(there, here, strict=True)):
        tokens = min(left, BLOCK)
        left -= tokens
        same = _rows(source_BN[source])[:, :tokens] == _rows(target_BN[target])[:, :tokens]
        if not same.all():
            raise ValueError(f"block {number} of {work} did not arrive as it was sent")


def _rows(block_N: Bytes) -> npt.NDArray[np.uint64]:
    """[heads x layers x 2, tokens, row] of one block."""
    return block_N.view(np.uint64).reshape(-1, BLOCK, HEAD_DIM * 2 // 8)
