"""Replicas that send to each other at the same time never wait for each other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from kv_rig import empty_cache, layout

from ekiden.core.clock import MonotonicClock
from ekiden.engine.port import ChunkDone, PortContext
from kv_transfer.messages import Finished, OpenReceive, OpenSend, decode_event, encode
from kv_transfer.options import PortOptions
from kv_transfer.port import Port
from kv_transfer.transports.base import Event
from kv_transfer.transports.tcp import TcpTransport

DEADLINE_S = 20.0
TOKENS, SEGMENT = 512, 32
KV = layout(head_dim=64)
BLOCKS = tuple(range(TOKENS // KV.block_size))


class Far(TcpTransport):
    """Nothing of the others arrives as long as it is ``away``, as over a long way."""

    away = True

    def poll(self) -> list[Event]:
        return [] if self.away else super().poll()


class End:
    def __init__(self) -> None:
        self.wire = Far()
        self.said: list[bytes] = []
        context = PortContext(rank=0, layout=KV, epoch=1, options=b"")
        cache = empty_cache(KV, 0, len(BLOCKS))
        options, clock = PortOptions(), MonotonicClock()
        self.port = Port(cache, context, self.said.append, options, {"tcp": self.wire}, clock)

    @property
    def finished(self) -> int:
        return sum(isinstance(decode_event(message), Finished) for message in self.said)


def hand_off(source: End, target: End, session: int) -> None:
    for end, order, peer in ((target, OpenReceive, source), (source, OpenSend, target)):
        common = {
            "session": session,
            "nonce": 1000 + session,
            "key": session,
            "wire": "tcp",
            "start": 0,
            "end": TOKENS,
            "segment_tokens": SEGMENT,
            "peer": "peer",
            "layout": KV,
            "endpoints": (peer.port.describe(),),
        }
        more = {"blocks": BLOCKS} if order is OpenReceive else {}
        end.port.command(encode(order(**common, **more)))
    source.port.chunks_finished([ChunkDone(session=session, end=TOKENS, blocks=BLOCKS)])


def run(ends: Sequence[End], each: int) -> None:
    until = time.monotonic() + DEADLINE_S
    while any(end.finished < each for end in ends):
        assert time.monotonic() < until, [end.port._wires["tcp"].slots.free for end in ends]
        for end in ends:
            end.port.step(0.0)


@pytest.mark.parametrize("count", [1, 4, 5], ids=["windows full", "slots full", "and wanting more"])
def test_ends_that_send_to_each_other_all_finish(count: int) -> None:
    some, others = [End() for _ in range(count)], [End() for _ in range(count)]
    pairs = [(one, other) for one in some for other in others]
    for number, (one, other) in enumerate(pairs):
        hand_off(one, other, 2 * number + 1)
        hand_off(other, one, 2 * number + 2)
    for end in (*some, *others):
        for _ in range(2 * PortOptions().slots):  # all that it may send is out
            end.port.step(0.0)
    for end in (*some, *others):
        end.wire.away = False
    run([*some, *others], 2 * count)
    assert all(end.port._wires["tcp"].slots.free == PortOptions().slots for end in some)
    for end in (*some, *others):
        end.port.close()
