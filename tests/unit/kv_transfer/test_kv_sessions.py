"""One hand-off at a time: what each fault, order of events and deadline leads to."""

from __future__ import annotations

import msgspec
import pytest
from kv_rig import EMPTY, Pair, layout

from ekiden.core.clock import ManualClock
from ekiden.core.errors import InvariantBroken, Overloaded, ReplicaFailed
from kv_transfer.messages import (
    Aborted,
    Finished,
    PairTally,
    Progress,
    Seal,
    SessionOffer,
    TransferLimits,
    encode,
)
from kv_transfer.options import PortOptions
from kv_transfer.session import (
    Arrived,
    Drained,
    Failed,
    ReceiveSession,
    SealedOut,
    SendSession,
    State,
    Terms,
)
from kv_transfer.transports.memory import Faults, Hub, MemoryTransport

SOURCE, TARGET = [7, 3, 1, 5, 9, 11], [2, 4, 6, 8, 10, 0]
TOKENS = 90


def pair(
    faults: Faults | None = None,
    *,
    limits: TransferLimits | None = None,
    options: PortOptions | None = None,
    tp: tuple[int, int] = (2, 1),
) -> Pair:
    hub, clock = Hub(), ManualClock()
    return Pair(
        layout(tp=tp[0]),
        layout(tp=tp[1]),
        lambda rank: MemoryTransport(hub, clock=clock, faults=faults),
        clock=clock,
        limits=limits,
        options=options,
    )


def failure(events: list[object]) -> Failed:
    assert [type(e) for e in events] == [Failed, Drained], events
    return events[0]


def test_a_hand_off_arrives_whole_and_ends_on_both_sides() -> None:
    p = pair()
    receive, send = p.hand_off(TOKENS, SOURCE, TARGET)
    p.run()
    arrived, drained = p.received_events
    assert arrived == Arrived(
        session=receive, bytes=TOKENS * p.decode.kv.token_bytes(), seconds=0.0, wire="memory"
    )
    assert drained == Drained(session=receive)
    assert [type(e) for e in p.sent_events] == [SealedOut, Drained]
    assert p.equal(send, TARGET, TOKENS)
    assert p.sending.open_count == p.receiving.open_count == 0


def test_only_what_decode_lacks_is_sent() -> None:
    p = pair()
    _, send = p.hand_off(TOKENS, SOURCE, TARGET, start=48)
    p.run()
    assert p.received_events[0].bytes == (TOKENS - 48) * p.decode.kv.token_bytes()
    assert p.equal(send, TARGET, TOKENS, start=48)
    assert (p.decode.caches[0][TARGET[:3]] == EMPTY).all()


def test_segments_leave_as_soon_as_they_are_computed_and_not_before() -> None:
    p = pair()
    receive, offer = p.receiving.open("r", p.prefill.me, 0, TOKENS, TARGET, "memory")
    send = p.sending.open(offer, p.decode.me)
    per_token = p.decode.kv.token_bytes()
    for end, moved in [(31, 0), (32, 32), (70, 64), (TOKENS, TOKENS)]:
        p.computed(send, end, SOURCE)
        for _ in range(20):
            p.round()
            p.clock.advance(0.3)
        if moved < TOKENS:
            assert p.receiving._open[receive].moved_bytes == moved * per_token
    p.run()
    assert p.received_events[0].bytes == TOKENS * per_token


def test_nothing_to_move_still_ends_with_the_seal() -> None:
    p = pair()
    receive, offer = p.receiving.open("r", p.prefill.me, 48, 48, TARGET, "memory")
    send = p.sending.open(offer, p.decode.me)
    sealed, drained = p.sending.poll()
    assert drained == Drained(session=send)
    assert p.receiving.poll() == []
    p.receiving.sealed(receive, sealed.seal)
    assert p.receiving.poll() == [
        Arrived(session=receive, bytes=0, seconds=0.0, wire=""),
        Drained(session=receive),
    ]
    assert not p.prefill.pipe
    assert not p.decode.pipe


def test_a_changed_byte_is_found_before_it_reaches_the_pool() -> None:
    p = pair(Faults(corrupt=1.0))
    p.hand_off(TOKENS, SOURCE, TARGET)
    p.run()
    failed = failure(p.received_events)
    assert "prefill-1" in failed.reason
    assert "checksum" in failed.reason
    assert (p.decode.caches[0] == EMPTY).all()


def test_duplicates_do_no_harm() -> None:
    p = pair(Faults(duplicate=1.0, delay_s=0.5))
    _, send = p.hand_off(TOKENS, SOURCE, TARGET)
    p.run(advance_s=0.1)
    assert [type(e) for e in p.received_events] == [Arrived, Drained]
    assert p.equal(send, TARGET, TOKENS)
    assert p.decode.ports[0].inbound.discarded > 0


@pytest.mark.parametrize("sealed", [True, False])
def test_lost_messages_end_in_the_deadline_of_the_state(sealed: bool) -> None:
    p = pair(Faults(loss=1.0))
    p.hand_off(TOKENS, SOURCE, TARGET)
    p.run(600, seal=sealed, advance_s=1.0)
    failed = failure(p.received_events)
    expected = "waiting for the last bytes" if sealed else "waiting for the first bytes"
    assert failed.state == expected
    assert failed.peer == "prefill-1"
    assert expected in failed.reason
    assert "0 of" in failed.reason


def test_a_message_that_never_completes_gives_its_slot_back() -> None:
    options = PortOptions(slots=2, window=2, drain_s=3.0)
    p = pair(Faults(hang=1.0), options=options)
    receive, _ = p.hand_off(TOKENS, SOURCE, TARGET)
    for _ in range(5):
        p.round()
    p.receiving.fail(receive, "cancelled")
    p.round()
    assert failure(p.received_events).reason == "cancelled"
    assert p.decode.ports[0].quarantined > 0
    p.clock.advance(3.0)
    for _ in range(3):
        p.round()
    assert p.decode.ports[0].quarantined == 0
    assert p.decode.ports[0]._wires["memory"].slots.free == 2


def test_a_late_write_after_an_abort_never_reaches_the_next_owner_of_the_blocks() -> None:
    p = pair(Faults(hang=1.0, late_s=2.0))
    receive, _ = p.hand_off(TOKENS, SOURCE, TARGET)
    for _ in range(5):
        p.round()
    p.receiving.fail(receive, "cancelled")
    p.round()
    assert Drained(session=receive) in p.received_events
    p.decode.caches[0][TARGET] = 123.0
    p.clock.advance(2.0)
    for _ in range(5):
        p.round()
    assert (p.decode.caches[0][TARGET] == 123.0).all()


def test_a_seal_that_says_something_else_fails_the_session() -> None:
    p = pair()
    receive, _ = p.hand_off(TOKENS, SOURCE, TARGET)
    p.run(20, seal=False)
    sealed = next(e for e in p.sent_events if isinstance(e, SealedOut))
    seal = msgspec.msgpack.decode(sealed.seal, type=Seal)
    first = seal.pairs[0]
    other = PairTally(first.source, first.target, first.messages, first.bytes, first.digest ^ 1)
    changed = msgspec.structs.replace(seal, pairs=(other, *seal.pairs[1:]))
    p.receiving.sealed(receive, encode(changed))
    p.run()
    assert "sealed" in failure(p.received_events).reason


@pytest.mark.parametrize("field", ["nonce", "decode_epoch"])
def test_the_seal_of_another_session_or_life_fails_it(field: str) -> None:
    p = pair()
    receive, _ = p.hand_off(TOKENS, SOURCE, TARGET)
    p.run(20, seal=False)
    sealed = next(e for e in p.sent_events if isinstance(e, SealedOut))
    seal = msgspec.msgpack.decode(sealed.seal, type=Seal)
    p.receiving.sealed(receive, encode(msgspec.structs.replace(seal, **{field: 1})))
    p.run()
    assert "another session" in failure(p.received_events).reason


def test_an_unreadable_seal_fails_it() -> None:
    p = pair()
    receive, _ = p.hand_off(TOKENS, SOURCE, TARGET)
    p.receiving.sealed(receive, b"\xc1")
    p.run(seal=False)
    assert "broken Seal" in failure(p.received_events).reason


@pytest.mark.parametrize("field", ["prefill_epoch", "decode_epoch", "wire_version"])
def test_an_offer_of_another_life_is_refused_with_both_values(field: str) -> None:
    p = pair()
    _, offer = p.receiving.open("r", p.prefill.me, 0, TOKENS, TARGET, "memory")
    asked = msgspec.msgpack.decode(offer, type=SessionOffer)
    stale = encode(msgspec.structs.replace(asked, **{field: 999}))
    with pytest.raises(ReplicaFailed, match=f"{field.replace('_', ' ')} 999, but it is"):
        p.sending.open(stale, p.decode.me)
    assert p.sending.open_count == 0


def test_an_offer_out_of_bounds_is_refused() -> None:
    p = pair()
    _, offer = p.receiving.open("r", p.prefill.me, 0, TOKENS, TARGET, "memory")
    asked = msgspec.msgpack.decode(offer, type=SessionOffer)
    for change in ({"end": 10**6}, {"start": 91}, {"segment_tokens": 0}, {"nonce": 1 << 40}):
        with pytest.raises(ReplicaFailed, match="outside"):
            p.sending.open(encode(msgspec.structs.replace(asked, **change)), p.decode.me)


def test_messages_of_unknown_sessions_and_other_epochs_are_dropped_and_counted() -> None:
    p = pair()
    receive, _ = p.hand_off(TOKENS, SOURCE, TARGET)
    p.receiving.on_port(0, encode(Aborted(epoch=22, session=receive + 2)))
    p.receiving.on_port(0, encode(Aborted(epoch=21, session=receive)))
    assert p.receiving.dropped == 2
    p.run()
    assert [type(e) for e in p.received_events] == [Arrived, Drained]


def test_a_port_that_never_answers_leaves_the_session_listed_and_its_blocks_held() -> None:
    p = pair(tp=(1, 2))
    receive, _ = p.receiving.open("r", p.prefill.me, 0, TOKENS, TARGET, "memory")
    p.decode.deliver()
    p.decode.muted.add(1)
    p.receiving.fail(receive, "cancelled")
    p.run(30, advance_s=1.0)
    assert [type(e) for e in p.received_events] == [Failed]
    assert p.receiving.open_count == 1
    assert p.receiving.next_deadline() is None
    (sentence,) = p.receiving.stuck()
    assert "[1]" in sentence
    assert "prefill-1" in sentence
    p.receiving.on_port(1, encode(Aborted(epoch=22, session=receive)))
    assert p.receiving.poll() == [Drained(session=receive)]
    assert p.receiving.stuck() == []


OFFER = SessionOffer(
    wire_version=1,
    wire="memory",
    session=1,
    nonce=1,
    key=1,
    decode_epoch=1,
    prefill_epoch=1,
    start=0,
    end=90,
    segment_tokens=32,
)


@pytest.mark.parametrize(("expected", "allowed_s"), [(10**6, 11.0), (10**8, 18.0)])
def test_the_last_bytes_have_time_in_proportion_to_what_may_be_under_way(
    expected: int, allowed_s: float
) -> None:
    limits = TransferLimits(base_s=10.0, min_bytes_per_s=1e6, unseen_bytes=8 * 10**6)
    terms = Terms(session=1, peer="p", ranks=(0,), expected_bytes=expected, limits=limits)
    session = ReceiveSession(terms, 0.0)
    session.seal((), 1.0)
    session.tick(1.0 + allowed_s - 0.1)
    assert session.state is State.SEALED
    session.tick(1.0 + allowed_s)
    assert session.state is State.DRAINING


@pytest.mark.parametrize("sends", [False, True])
def test_while_bytes_move_no_deadline_fires_and_it_does_when_they_stop(sends: bool) -> None:
    """A megabyte every ten seconds: slower than anything the limits expect, and still alive."""
    limits = TransferLimits(base_s=10.0, min_bytes_per_s=1e6, unseen_bytes=10**6)
    terms = Terms(session=1, peer="p", ranks=(0,), expected_bytes=10**8, limits=limits)
    session = SendSession(terms, OFFER, 0.0) if sends else ReceiveSession(terms, 0.0)
    if isinstance(session, ReceiveSession):
        session.seal((), 0.0)
    for second in range(0, 900, 10):
        session.tick(float(second))
        moved = Progress(epoch=1, session=1, bytes=second * 10**5 + 1, computed=90)
        session.on_rank(0, moved, float(second))
    assert session.state is (State.SENDING if sends else State.SEALED)
    session.on_rank(0, moved, 895.0)  # nothing new has moved
    session.tick(900.9)
    assert not session.failed
    session.tick(901.0)
    assert session.state is State.DRAINING


def test_every_sign_of_life_extends_the_time_while_prefill_computes() -> None:
    limits = TransferLimits(first_bytes_s=20.0, stall_s=5.0)
    terms = Terms(session=1, peer="p", ranks=(0,), expected_bytes=100, limits=limits)
    session = ReceiveSession(terms, 0.0)
    for now in (19.0, 23.0, 27.0):
        session.tick(now)
        session.on_rank(0, Progress(epoch=1, session=1, bytes=1), now)
    assert session.state is State.MOVING
    session.tick(32.0)
    assert session.state is State.DRAINING


def test_a_second_last_word_changes_nothing() -> None:
    terms = Terms(session=1, peer="p", ranks=(0, 1), expected_bytes=1, limits=TransferLimits())
    session = ReceiveSession(terms, 0.0)
    done = Finished(epoch=1, session=1, pairs=(), seconds=0.0, wire="w")
    session.on_rank(0, done, 0.0)
    session.on_rank(0, Aborted(epoch=1, session=1), 0.0)
    session.seal((), 0.0)
    assert session.events == []
    session.on_rank(1, done, 0.0)
    assert [type(e) for e in session.events] == [Arrived, Drained]


def test_failing_twice_or_after_the_end_changes_nothing() -> None:
    p = pair()
    receive, send = p.hand_off(TOKENS, SOURCE, TARGET)
    p.receiving.fail(receive, "one")
    p.receiving.fail(receive, "two")
    p.sending.fail(send, "three")
    p.run()
    assert failure(p.received_events).reason == "one"
    assert failure(p.sent_events).reason == "three"
    p.receiving.fail(receive, "four")
    assert p.receiving.poll() == []


def test_open_sessions_are_bounded() -> None:
    p = pair(limits=TransferLimits(max_sessions=1))
    _, offer = p.receiving.open("r", p.prefill.me, 0, 16, TARGET, "memory")
    with pytest.raises(Overloaded, match="1 hand-off sessions"):
        p.receiving.open("r", p.prefill.me, 0, 16, TARGET, "memory")
    p.sending.open(offer, p.decode.me)
    with pytest.raises(Overloaded, match="1 hand-off sessions"):
        p.sending.open(offer, p.decode.me)


def test_blocks_that_do_not_cover_the_positions_are_a_bug() -> None:
    p = pair()
    with pytest.raises(InvariantBroken, match="do not fit"):
        p.receiving.open("r", p.prefill.me, 0, 97, TARGET, "memory")
