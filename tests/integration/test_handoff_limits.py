"""A transfer may take longer than any fixed limit, over every wire, as long as its bytes move.

Both replicas are in this process, with real wires, limits of half a second and a slow pace.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

RIG = Path(__file__).parents[1] / "unit" / "kv_transfer"
sys.path.insert(0, str(RIG))

from kv_child import Replica  # noqa: E402
from kv_rig import layout, read, truth, write  # noqa: E402

from ekiden.cache.layout import KvLayout  # noqa: E402
from kv_transfer.messages import TransferLimits  # noqa: E402
from kv_transfer.session import Arrived, SealedOut, SessionEvent  # noqa: E402

LONGEST_S = 30.0
BASE_S = 0.6

Make = Callable[[KvLayout, TransferLimits, float], "Pair"]


class Pair:
    """A prefill and a decode replica whose ports have threads of their own."""

    def __init__(self, kv: KvLayout, wire: str, limits: TransferLimits, rate: float) -> None:
        self.kv, self.wire = kv, wire
        self.prefill, self.decode = (
            Replica(kv, role, wire, epoch=epoch, blocks=64, limits=limits, max_bytes_per_s=rate)
            for role, epoch in (("prefill", 11), ("decode", 22))
        )
        self.events: list[SessionEvent] = []

    def hand_over(self, tokens: int, seed: int) -> Arrived:
        """All of a computed prompt; AssertionError with what happened unless it arrives."""
        blocks = list(range(64))
        write(self.prefill.caches[0], self.kv, 0, blocks, tokens, seed)
        receiving, sending = self.decode.sessions, self.prefill.sessions
        session, offer = receiving.open("r", self.prefill.me, 0, tokens, blocks, self.wire)
        there = sending.open(offer, self.decode.me)
        self.prefill.computed(there, tokens, blocks)
        limit = time.monotonic() + LONGEST_S
        while time.monotonic() < limit:
            for event in (*self.prefill.turn(0.01), *self.decode.turn(0.01)):
                self.events.append(event)
                if isinstance(event, SealedOut):
                    receiving.sealed(session, event.seal)
                if isinstance(event, Arrived):
                    return event
        raise AssertionError(f"nothing arrived: {self.events}")

    def arrived_right(self, tokens: int, seed: int) -> bool:
        found = read(self.decode.caches[0], self.kv, list(range(64)), tokens)
        return torch.equal(found, truth(self.kv, 0, tokens, seed))

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@pytest.fixture(params=["shm", "ucx", "tcp"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Pair] = []

    def pair(kv: KvLayout, limits: TransferLimits, rate: float) -> Pair:
        made.append(Pair(kv, request.param, limits, rate))
        return made[-1]

    yield pair
    for item in made:
        item.close()


def test_no_deadline_fires_while_bytes_move_however_long_it_takes(make: Make) -> None:
    """Three kibibytes a token, two seconds at a megabyte a second: three times every limit."""
    kv = layout(layers=4, head_dim=48)
    limits = TransferLimits(
        segment_tokens=32, first_bytes_s=BASE_S, stall_s=BASE_S, base_s=BASE_S, min_bytes_per_s=1e12
    )
    pair = make(kv, limits, 1e6)
    arrived = pair.hand_over(650, seed=1)
    assert arrived.seconds > 3 * BASE_S
    assert arrived.bytes == 650 * kv.token_bytes()
    assert pair.arrived_right(650, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("make", ["shm"], indirect=True)
def test_a_large_piece_has_the_time_that_it_takes_at_the_least_speed(make: Make) -> None:
    """As a cache of a model of billions has them: 128 KiB a token, a piece of 32 MiB and a rest
    that has to wait until the piece is paid for.

    The speed is the least that is allowed, eight times the usual one so that it is quick, and the
    limit is that part of the usual one.
    """
    kv = layout(kv_heads=8, layers=16, head_dim=128)
    limits = TransferLimits(base_s=10 / 8, stall_s=60 / 8, min_bytes_per_s=8e6)
    pair = make(kv, limits, 8e6)
    arrived = pair.hand_over(270, seed=2)
    assert arrived.bytes == 270 * kv.token_bytes()
    assert arrived.seconds > 4.0
    assert pair.arrived_right(270, seed=2)
