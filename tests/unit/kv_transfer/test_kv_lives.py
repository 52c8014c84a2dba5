"""Random lives of hand-offs over a wire with every fault: each ends once, arrived means equal, and
blocks that were given back are not touched again."""

from __future__ import annotations

import random
from collections import defaultdict

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import FAKES, Pair, empty_cache, layout, read, truth, write

from ekiden.core.clock import ManualClock
from kv_transfer.messages import TransferLimits
from kv_transfer.options import PortOptions
from kv_transfer.session import Arrived, Drained, Failed, SealedOut
from kv_transfer.transports.memory import Faults, Hub

BLOCKS = 16
LIMITS = TransferLimits(
    segment_tokens=32,
    first_bytes_s=20.0,
    stall_s=10.0,
    base_s=5.0,
    min_bytes_per_s=1e6,
    drain_s=5.0,
)
SPLITS = [((2, 1), (1, 1)), ((1, 2), (2, 1)), ((3, 1), (2, 2)), ((1, 1), (1, 1))]
chance = st.sampled_from([0.0, 0.0, 0.05, 0.3])
faults = st.builds(
    Faults,
    seed=st.integers(0, 2**32),
    loss=chance,
    duplicate=chance,
    corrupt=chance,
    half=chance,
    hang=chance,
    late_s=st.sampled_from([0.0, 1.0, 8.0]),
    delay_s=st.sampled_from([0.0, 0.5]),
)
COMMON = ["open", "compute", "step", "step"]
RARE = ["fail_send", "fail_receive", "wait", "tell", "seal_lost", "restart_wire"]
actions = st.lists(st.sampled_from([*COMMON, *COMMON, *RARE]), max_size=40)


class Lives:
    """Runs a program of actions; remembers who owns which blocks, and checks as it goes."""

    def __init__(
        self, split: int, sizes: tuple[int, int], faults: Faults, wire: str = "memory"
    ) -> None:
        (stp, spp), (ttp, tpp) = SPLITS[split]
        self.source = layout(tp=stp, pp=spp, kv_heads=3, layers=2, block_size=sizes[0])
        self.target = layout(tp=ttp, pp=tpp, kv_heads=3, layers=2, block_size=sizes[1])
        self.clock = ManualClock()
        hub = Hub()
        self.pair = Pair(
            self.source,
            self.target,
            lambda rank: FAKES[wire](hub, clock=self.clock, faults=faults),
            clock=self.clock,
            blocks=BLOCKS,
            wire=wire,
            limits=LIMITS,
            options=PortOptions(slots=3, window=2, drain_s=3.0, limbo_s=5.0),
        )
        self.free_source, self.free_target = list(range(BLOCKS)), list(range(BLOCKS))
        self.tokens: dict[int, int] = {}
        self.start: dict[int, int] = {}
        self.partner: dict[int, int] = {}
        self.source_blocks: dict[int, list[int]] = {}
        self.target_blocks: dict[int, list[int]] = {}
        self.history: defaultdict[int, list[object]] = defaultdict(list)
        self.given_back: dict[tuple[int, int], torch.Tensor] = {}
        self.lose_next_seal = False

    def run(self, program: list[str], seed: int) -> None:
        chooser = random.Random(seed)
        for action in program:
            getattr(self, action)(chooser)
        for _ in range(400):
            if not self.pair.sending.open_count and not self.pair.receiving.open_count:
                break
            self.step(chooser)
            self.clock.advance(0.5)
        self.settle(chooser)

    def open(self, chooser: random.Random) -> None:
        start = chooser.choice([0, self.target.block_size])
        tokens = start + chooser.randrange(0, 80)
        need_source = -(-tokens // self.source.block_size)
        need_target = -(-tokens // self.target.block_size)
        if need_source > len(self.free_source) or need_target > len(self.free_target):
            return
        mine = [self.free_source.pop() for _ in range(need_source)]
        theirs = [self.free_target.pop() for _ in range(need_target)]
        for block in theirs:
            for rank in range(len(self.target.ranks)):
                self.given_back.pop((rank, block), None)
        pair = self.pair
        receive, offer = pair.receiving.open("r", pair.prefill.me, start, tokens, theirs, pair.wire)
        send = pair.sending.open(offer, pair.decode.me)
        self.tokens[receive] = self.tokens[send] = tokens
        self.start[receive] = start
        self.partner[receive], self.partner[send] = send, receive
        self.source_blocks[send], self.target_blocks[receive] = mine, theirs
        for rank, cache in enumerate(pair.prefill.caches):
            write(cache, self.source, rank, mine, tokens, seed=send)

    def compute(self, chooser: random.Random) -> None:
        for send, blocks in self.source_blocks.items():
            if not self.history[send]:
                end = chooser.choice([self.tokens[send], self.tokens[send] // 2])
                self.pair.computed(send, end, blocks)

    def step(self, chooser: random.Random) -> None:
        self.pair.round(busy=chooser.random() < 0.4)
        self._hear()

    def wait(self, chooser: random.Random) -> None:
        self.clock.advance(chooser.choice([0.3, 2.0, 6.0]))

    def fail_send(self, chooser: random.Random) -> None:
        if self.source_blocks:
            self.pair.sending.fail(chooser.choice(list(self.source_blocks)), "cancelled")

    def fail_receive(self, chooser: random.Random) -> None:
        if self.target_blocks:
            self.pair.receiving.fail(chooser.choice(list(self.target_blocks)), "cancelled")

    def tell(self, _: random.Random) -> None:
        """What gRPC does: the other side hears of a failure."""
        for session, events in list(self.history.items()):
            if any(isinstance(e, Failed) for e in events):
                other = self.partner[session]
                sessions = self.pair.receiving if other % 2 else self.pair.sending
                sessions.fail(other, "the other side failed")

    def seal_lost(self, _: random.Random) -> None:
        self.lose_next_seal = True

    def restart_wire(self, chooser: random.Random) -> None:
        """A connection breaks for a reason of its own."""
        transport = chooser.choice(self.pair.prefill.transports)
        for peer in list(transport._peers):
            transport.disconnect(peer)

    def settle(self, chooser: random.Random) -> None:
        """Let what still flies land, then look at everything."""
        for _ in range(40):
            self.step(chooser)
            self.clock.advance(1.0)
        for session in (*self.source_blocks, *self.target_blocks):
            self._check_end(session)
        for (rank, block), remembered in self.given_back.items():
            assert torch.equal(self.pair.decode.caches[rank][block], remembered), (
                "a block was written after it was given back"
            )
        for port in (*self.pair.prefill.ports, *self.pair.decode.ports):
            assert port.quarantined == 0
            assert all(wire.slots.free == 3 for wire in port._wires.values())
        self.pair.close()

    def _hear(self) -> None:
        for event in self.pair.sent_events:
            self.history[event.session].append(event)
            if isinstance(event, SealedOut):
                if not self.lose_next_seal:
                    self.pair.receiving.sealed(self.partner[event.session], event.seal)
                self.lose_next_seal = False
            elif isinstance(event, Drained):
                blocks = self.source_blocks[event.session]
                for rank, cache in enumerate(self.pair.prefill.caches):
                    cache[blocks] = empty_cache(self.source, rank, 1)
                self.free_source += blocks
        for event in self.pair.received_events:
            self.history[event.session].append(event)
            if isinstance(event, Arrived):
                self._check_equal(event.session)
            elif isinstance(event, Drained):
                blocks = self.target_blocks[event.session]
                for rank, cache in enumerate(self.pair.decode.caches):
                    for block in blocks:
                        self.given_back[rank, block] = cache[block].clone()
                self.free_target += blocks
        self.pair.sent_events, self.pair.received_events = [], []

    def _check_equal(self, receive: int) -> None:
        tokens, start = self.tokens[receive], self.start[receive]
        for rank, cache in enumerate(self.pair.decode.caches):
            got = read(cache, self.target, self.target_blocks[receive], tokens)
            want = truth(self.target, rank, tokens, seed=self.partner[receive])
            assert torch.equal(got[start:], want[start:])

    def _check_end(self, session: int) -> None:
        events = self.history[session]
        assert [isinstance(e, Drained) for e in events] == [False, True], events


@settings(max_examples=120, deadline=None)
@given(
    split=st.integers(0, len(SPLITS) - 1),
    sizes=st.sampled_from([(16, 16), (16, 32), (32, 16)]),
    faults=faults,
    program=actions,
    seed=st.integers(0, 2**16),
    wire=st.sampled_from(list(FAKES)),
)
def test_every_hand_off_ends_once_and_never_with_wrong_bytes(
    split: int, sizes: tuple[int, int], faults: Faults, program: list[str], seed: int, wire: str
) -> None:
    Lives(split, sizes, faults, wire).run(program, seed)


@settings(max_examples=60, deadline=None)
@given(split=st.integers(0, len(SPLITS) - 1), program=actions, seed=st.integers(0, 2**16))
def test_what_comes_straight_into_blocks_stops_when_they_are_given_back(
    split: int, program: list[str], seed: int
) -> None:
    """Half of many messages is there when their session is given up; the rest comes later."""
    slow = Faults(seed=seed, hang=0.5, late_s=2.0)
    lives = Lives(split, (16, 16), slow, "in_place_memory")
    first = ["open", "compute", "step", "step"]
    lives.run([*first, "fail_receive", *first, "fail_send", *program], seed)
    ends = [event for events in lives.history.values() for event in events]
    reasons = [event.reason for event in ends if isinstance(event, Failed)]
    assert not [reason for reason in reasons if "checksum" in reason]
