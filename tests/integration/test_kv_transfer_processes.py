"""Hand-offs between real processes over every wire: equality to the bit, and what goes wrong."""

from __future__ import annotations

import base64
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

RIG = Path(__file__).parents[1] / "unit" / "kv_transfer"
sys.path.insert(0, str(RIG))

from kv_child import Replica, pack, unpack  # noqa: E402
from kv_rig import layout, read, truth  # noqa: E402

from ekiden.cache.layout import KvLayout  # noqa: E402
from kv_transfer.description import ReplicaDescription  # noqa: E402
from kv_transfer.messages import TransferLimits  # noqa: E402
from kv_transfer.session import Arrived, Drained, Failed  # noqa: E402

DEADLINE_S = 30.0
LIMITS = TransferLimits(segment_tokens=32, first_bytes_s=20.0, stall_s=3.0, base_s=3.0, drain_s=5.0)


class Prefill:
    """A child process that is a prefill replica."""

    def __init__(self, kv: KvLayout, epoch: int, wire: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(RIG / "kv_child.py"), pack(kv), str(epoch), wire],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.me: ReplicaDescription = unpack(self.lines.get(timeout=DEADLINE_S), ReplicaDescription)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def tell(self, verb: str, **body: object) -> None:
        self.process.stdin.write(f"{verb} {json.dumps(body)}\n")

    def expect(self, verb: str) -> list[str]:
        """The next line, which must begin with ``verb``."""
        words = self.lines.get(timeout=DEADLINE_S).split()
        assert words[0] == verb, words
        return words[1:]

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        self.process.stdin.close()
        self.process.stdout.close()


class Bench:
    """A decode replica in this process, and prefill replicas in children."""

    def __init__(self, decode: KvLayout, wire: str, blocks: int = 64) -> None:
        self.wire = wire
        self.decode = Replica(decode, "decode", wire, epoch=22, blocks=blocks, limits=LIMITS)
        self.children: list[Prefill] = []

    def prefill(self, kv: KvLayout) -> Prefill:
        self.children.append(Prefill(kv, 100 + len(self.children), self.wire))
        return self.children[-1]

    def begin(
        self,
        prefill: Prefill,
        tokens: int,
        blocks: list[int],
        computed: int,
        seed: int,
        start: int = 0,
    ) -> int:
        """Open a hand-off whose first ``computed`` positions prefill has."""
        sessions = self.decode.sessions
        session, offer = sessions.open("r", prefill.me, start, tokens, blocks, self.wire)
        prefill.tell(
            "open",
            offer=base64.b64encode(offer).decode(),
            peer=pack(self.decode.me),
            blocks=blocks[::-1] if tokens <= len(blocks) * 16 else list(range(64)),
            tokens=tokens,
            computed=computed,
            seed=seed,
        )
        return session

    def until(self, kind: type, session: int, within_s: float = DEADLINE_S) -> object:
        """The next event of ``kind`` for ``session``; every other event is kept."""
        limit = time.monotonic() + within_s
        while True:
            for event in self.decode.events:
                if isinstance(event, kind) and event.session == session:
                    self.decode.events.remove(event)
                    return event
            assert time.monotonic() < limit, f"no {kind.__name__}, only {self.decode.events}"
            self.decode.events += self.decode.turn(0.05)

    def moving(self, session: int, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < limit
            self.decode.events += self.decode.turn(0.01)

    def finish(self, prefill: Prefill, session: int) -> Arrived:
        prefill.expect("opened")
        _, seal = prefill.expect("sealed")
        prefill.expect("drained")
        self.decode.sessions.sealed(session, base64.b64decode(seal))
        arrived = self.until(Arrived, session)
        self.until(Drained, session)
        return arrived

    def equal(self, blocks: list[int], tokens: int, seed: int, start: int = 0) -> bool:
        kv = self.decode.kv
        return all(
            torch.equal(
                read(cache, kv, blocks, tokens)[start:], truth(kv, rank, tokens, seed)[start:]
            )
            for rank, cache in enumerate(self.decode.caches)
        )

    def close(self) -> None:
        self.decode.close()
        for child in self.children:
            child.close()


WIRES = {"ucx": "ucx/tcp", "tcp": "tcp", "shm": "shm", "nixl": "nixl"}
"""By name: what is really used."""


SLOW = [pytest.param(wire, marks=pytest.mark.slow) for wire in ("tcp", "nixl")]


@pytest.fixture(params=["ucx", "shm", *SLOW])
def bench(request: pytest.FixtureRequest) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(decode: KvLayout) -> Bench:
        made.append(Bench(decode, request.param))
        return made[-1]

    yield make
    for item in made:
        item.close()


def big(**shape: int) -> KvLayout:
    """Layouts whose messages go by rendezvous: 24 KiB a token over the whole model."""
    return layout(**{"kv_heads": 3, "layers": 4, "head_dim": 256, **shape})


CASES = {
    "TP2 to TP1": (big(tp=2), big()),
    "TP1 to TP2": (big(), big(tp=2)),
    "TP3 to TP2": (big(tp=3), big(tp=2)),
    "PP2 to TP1": (big(pp=2), big()),
    "TP2xPP2 to PP2": (big(tp=2, pp=2), big(pp=2)),
    "block 16 to 32": (big(tp=2), big(block_size=32)),
    "block 32 to 16": (big(block_size=32), big(tp=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_arrives_is_what_was_sent_to_the_bit(bench: Callable[..., Bench], case: str) -> None:
    source, target = CASES[case]
    pair = bench(target)
    prefill = pair.prefill(source)
    for seed, tokens, start in [(1, 500, 0), (2, 1, 0), (3, 200, 64)]:
        blocks = [(i * 5 + 3) % 64 for i in range(64)]
        session = pair.begin(prefill, tokens, blocks, tokens, seed, start)
        arrived = pair.finish(prefill, session)
        assert arrived.wire == WIRES[pair.wire]
        assert arrived.bytes == (tokens - start) * target.token_bytes()
        assert pair.equal(blocks, tokens, seed, start)
    assert pair.decode.sessions.open_count == 0


def test_a_killed_peer_is_named_long_before_any_deadline(bench: Callable[..., Bench]) -> None:
    pair = bench(big())
    prefill = pair.prefill(big(tp=2))
    session = pair.begin(prefill, 1000, list(range(63)), computed=500, seed=1)
    pair.moving(session, lambda: pair.decode.sessions._open[session].moved_bytes > 0)
    prefill.signal(signal.SIGKILL)
    failed = pair.until(Failed, session)
    assert failed.peer == prefill.me.replica_id
    # A deadline would say that nothing came; the wire says that the connection is gone.
    assert re.search(r"receiving from rank \d of prefill-1: ", failed.reason)
    pair.until(Drained, session)
    _works_after(pair)


def test_a_stopped_peer_runs_into_the_deadline_of_its_state(bench: Callable[..., Bench]) -> None:
    pair = bench(big())
    prefill = pair.prefill(big())
    session = pair.begin(prefill, 1000, list(range(63)), computed=500, seed=1)
    pair.moving(session, lambda: pair.decode.sessions._open[session].moved_bytes > 0)
    prefill.signal(signal.SIGSTOP)
    failed = pair.until(Failed, session, within_s=LIMITS.stall_s + 10)
    assert failed.state.startswith("receiving")
    assert "prefill-1" in failed.reason
    pair.until(Drained, session)
    _works_after(pair)


def test_a_lost_seal_and_a_missing_segment_name_their_states(bench: Callable[..., Bench]) -> None:
    pair = bench(big())
    prefill = pair.prefill(big())
    session = pair.begin(prefill, 100, list(range(7)), computed=100, seed=1)
    failed = pair.until(Failed, session, within_s=LIMITS.base_s + 10)
    assert failed.state == "waiting for the seal"
    for verb in ("opened", "sealed", "drained"):
        prefill.expect(verb)
    session = pair.begin(prefill, 100, list(range(7)), computed=64, seed=1)
    failed = pair.until(Failed, session, within_s=LIMITS.stall_s + 10)
    assert failed.state.startswith("receiving")


def test_blocks_of_an_aborted_hand_off_serve_the_next_one(bench: Callable[..., Bench]) -> None:
    pair = bench(big())
    slow, other = pair.prefill(big(tp=2)), pair.prefill(big())
    blocks = list(range(63))
    session = pair.begin(slow, 1000, blocks, computed=1000, seed=1)
    pair.moving(session, lambda: pair.decode.sessions._open[session].moved_bytes > 0)
    slow.signal(signal.SIGSTOP)
    pair.decode.sessions.fail(session, "the client left")
    pair.until(Drained, session)
    again = pair.begin(other, 1000, blocks, computed=1000, seed=2)
    pair.finish(other, again)
    assert pair.equal(blocks, 1000, seed=2)
    # The first one wakes up and goes on with what it had begun to send.
    slow.signal(signal.SIGCONT)
    slow.expect("opened")
    third = pair.begin(slow, 1000, blocks, computed=1000, seed=3)
    slow.tell("fail", session=2)
    slow.expect("opened")
    words = {slow.expect("failed")[0], slow.expect("drained")[0]}
    assert words == {"2"}
    _, seal = slow.expect("sealed")
    pair.decode.sessions.sealed(third, base64.b64decode(seal))
    pair.until(Arrived, third)
    assert pair.equal(blocks, 1000, seed=3)


def _works_after(pair: Bench) -> None:
    """A new peer is served, into the blocks of the one that failed; no slot is missing."""
    fresh = pair.prefill(big(tp=2))
    blocks = list(range(63))
    session = pair.begin(fresh, 1000, blocks, computed=1000, seed=9)
    pair.finish(fresh, session)
    assert pair.equal(blocks, 1000, seed=9)
