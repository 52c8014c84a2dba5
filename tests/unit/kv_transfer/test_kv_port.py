"""The port of a rank: its bounds, its thread, and what it says when it cannot go on."""

from __future__ import annotations

import os
import queue

import pytest
import torch
from kv_rig import EMPTY, FAKES, Pair, describe, empty_cache, layout, read, truth, write

from ekiden.cache.tensors import allocate_shared_cache
from ekiden.core.clock import ManualClock, MonotonicClock
from ekiden.core.errors import InvariantBroken, SetupError
from ekiden.engine.port import ChunkDone, PortContext
from kv_transfer.description import ReplicaDescription
from kv_transfer.messages import (
    Abort,
    Aborted,
    BlockRead,
    Broken,
    Computed,
    ReadBlock,
    TransferLimits,
    decode_event,
    encode,
    tag,
)
from kv_transfer.options import PortOptions
from kv_transfer.port import Port, open_port
from kv_transfer.session import Arrived, Drained, Failed, SealedOut
from kv_transfer.sessions import ReceiveSessions, SendSessions
from kv_transfer.staging import Slots
from kv_transfer.transports.base import PeerLost
from kv_transfer.transports.memory import Faults, Hub, MemoryTransport
from kv_transfer.wire import NOTHING, Wire

SOURCE, TARGET = [7, 3, 1, 5, 9, 11], [2, 4, 6, 8, 10, 0]


def memory_pair(options: PortOptions | None = None, faults: Faults | None = None) -> Pair:
    hub, clock = Hub(), ManualClock()
    return Pair(
        layout(tp=2),
        layout(),
        lambda rank: MemoryTransport(hub, clock=clock, faults=faults),
        clock=clock,
        options=options,
        blocks=128,
    )


def context(options: bytes = b"", rank: int = 0) -> PortContext:
    return PortContext(rank=rank, layout=layout(), epoch=5, options=options)


def test_many_hand_offs_share_few_slots_and_all_arrive() -> None:
    p = memory_pair(PortOptions(slots=2, window=1))
    sends = []
    for number in range(20):
        blocks = list(range(number * 6, number * 6 + 6))
        sends.append((p.hand_off(90, blocks, blocks)[1], blocks))
    p.run(1000)
    assert sum(isinstance(e, Arrived) for e in p.received_events) == 20
    assert all(p.equal(send, blocks, 90) for send, blocks in sends)


@pytest.mark.parametrize("wire", ["memory", "in_place_memory"])
def test_blocks_that_nobody_holds_may_change_while_their_kv_is_under_way(wire: str) -> None:
    """As those that are sent to measure a wire: what was there once arrives, and it has its sum."""
    hub, kv = Hub(), layout()
    p = Pair(kv, kv, lambda rank: FAKES[wire](hub), wire=wire)
    _, offer = p.receiving.open("r", p.prefill.me, 0, 64, [4, 5, 6, 7], wire)
    send = p.sending.open(offer, p.decode.me)
    write(p.prefill.caches[0], kv, 0, [0, 1, 2, 3], 64, seed=send)
    told = Computed(session=send, end=64, blocks=(0, 1, 2, 3), held=False)
    p.prefill.send_port(encode(told), None)
    p.prefill.deliver()
    while p.prefill.ports[0].step(0.0):
        pass
    p.prefill.caches[0].fill_(7.0)
    p.run()
    assert [type(event) for event in p.received_events] == [Arrived, Drained]
    assert p.equal(send, [4, 5, 6, 7], 64)
    p.close()


def test_one_peer_cannot_take_all_the_slots() -> None:
    hub = Hub()
    mine, stuck, good = (MemoryTransport(hub) for _ in range(3))
    wire = Wire(mine, Slots(4, 4096), PortOptions(slots=4, window=2), MonotonicClock())
    peer, other = mine.connect(stuck.describe()), mine.connect(good.describe())
    for number in range(2):
        assert wire.may_send(peer)
        wire.send(1, peer, number, wire.slots.take(), [NOTHING], lambda slot, error: None)
    assert not wire.may_send(peer)
    assert wire.may_send(other)


def test_a_message_that_is_early_waits_for_its_session() -> None:
    p = memory_pair()
    receive, offer = p.receiving.open("r", p.prefill.me, 0, 90, TARGET, "memory")
    held, p.decode.pipe = p.decode.pipe, type(p.decode.pipe)()
    send = p.sending.open(offer, p.decode.me)
    for rank, cache in enumerate(p.prefill.caches):
        write(cache, p.prefill.kv, rank, SOURCE, 90, seed=send)
    p.computed(send, 90, SOURCE)
    for _ in range(10):
        p.round()
    p.decode.pipe = held
    p.run()
    assert [type(e) for e in p.received_events] == [Arrived, Drained]
    assert p.equal(send, TARGET, 90)
    assert receive == 1


def test_messages_of_an_aborted_session_are_thrown_away_and_their_sender_ends() -> None:
    p = memory_pair(faults=Faults(delay_s=5.0))
    receive, _ = p.hand_off(90, SOURCE, TARGET)
    p.round()
    p.receiving.fail(receive, "cancelled")
    p.round()
    for _ in range(30):
        p.clock.advance(1.0)
        p.round()
    inbound = p.decode.ports[0].inbound
    assert inbound.discarded == 6
    assert not inbound._limbo
    assert [type(e) for e in p.sent_events] == [SealedOut, Drained]
    assert (p.decode.caches[0] == EMPTY).all()


def test_a_message_nobody_announces_is_thrown_away_in_time() -> None:
    p = memory_pair(PortOptions(slots=2, limbo_s=5.0))
    stranger = p.prefill.transports[0]
    peer = stranger.connect(p.decode.transports[0].describe())
    stranger.send(peer, tag(77, 1), [memoryview(bytearray(64))])
    p.decode.ports[0].step(0.0)
    assert p.decode.ports[0].inbound.discarded == 0
    p.clock.advance(5.0)
    p.decode.ports[0].step(0.0)
    assert p.decode.ports[0].inbound.discarded == 1


def test_a_message_of_another_length_than_agreed_breaks_the_session() -> None:
    p = memory_pair()
    receive, _ = p.receiving.open("r", p.prefill.me, 0, 90, TARGET, "memory")
    p.round()
    nonce = next(iter(p.decode.ports[0].inbound._by_nonce))
    stranger = p.prefill.transports[0]
    peer = stranger.connect(p.decode.transports[0].describe())
    stranger.send(peer, tag(nonce, 0), [memoryview(bytearray(64))])
    p.round()
    failed, drained = p.received_events
    assert isinstance(failed, Failed)
    assert "64 bytes" in failed.reason
    assert drained == Drained(session=receive)


def test_a_lost_connection_breaks_only_sessions_that_still_need_it() -> None:
    p = memory_pair()
    done, _ = p.hand_off(90, SOURCE, TARGET)
    p.run(seal=False, rounds=20)
    port = p.decode.ports[0]
    port.inbound.peer_lost(port._wires["memory"], 1, "gone")
    waiting, _ = p.receiving.open("r", p.prefill.me, 0, 16, [20], "memory")
    p.round()
    peer = p.decode.transports[0].connect(p.prefill.transports[0].describe())
    p.decode.transports[0]._tell(PeerLost(peer, "gone"))
    p.round()
    failed = [e for e in p.received_events if isinstance(e, Failed)]
    assert [f.session for f in failed] == [waiting]
    assert "rank 0 of prefill-1: gone" in failed[0].reason
    assert done in p.receiving._open


def test_a_dead_endpoint_fails_the_session() -> None:
    p = memory_pair()
    p.prefill.transports[1].close()
    p.receiving.open("r", p.prefill.me, 0, 16, TARGET, "memory")
    p.round()
    p.round()
    failed = p.received_events[0]
    assert isinstance(failed, Failed)
    assert "nobody is at" in failed.reason


def test_memory_that_cannot_be_registered_keeps_the_port_from_opening() -> None:
    transport = MemoryTransport(Hub(), faults=Faults(register_fails=True))
    cache = empty_cache(layout(), 0, 4)
    with pytest.raises(SetupError, match="register"):
        Port(cache, context(), lambda message: None, PortOptions(), {"memory": transport})


def test_options_that_cannot_be_read_are_a_setup_error() -> None:
    with pytest.raises(SetupError, match="options of the KV port"):
        open_port(empty_cache(layout(), 0, 4), context(b"\xc1"), lambda message: None)


def test_a_cache_that_is_not_what_the_layout_says_is_a_bug() -> None:
    cache = empty_cache(layout(head_dim=8), 0, 4)
    with pytest.raises(InvariantBroken, match="blocks of shape"):
        open_port(cache, context(encode(PortOptions(transports=("memory",)))), lambda message: None)


@pytest.mark.parametrize("wire", ["memory", "ucx", "tcp", "shm"])
def test_ports_with_threads_hand_over_and_close(wire: str) -> None:
    words: queue.Queue[tuple[str, bytes]] = queue.Queue()
    caches, fds, ports, sides = {}, {}, {}, {}
    kv = layout(head_dim=256)
    for role, epoch in (("prefill", 1), ("decode", 2)):
        caches[role], fds[role] = allocate_shared_cache(kv, 0, 8)
        options = encode(PortOptions(transports=(wire,)))
        where = PortContext(rank=0, layout=kv, epoch=epoch, options=options, pool_fd=fds[role])
        ports[role] = open_port(caches[role], where, lambda m, role=role: words.put((role, m)))
        sides[role] = describe(kv, [ports[role].describe()], role=role, epoch=epoch, wires=(wire,))
    clock, limits = MonotonicClock(), TransferLimits(segment_tokens=32)
    receiving = ReceiveSessions(
        sides["decode"], lambda m, _: ports["decode"].command(m), clock, limits
    )
    sending = SendSessions(
        sides["prefill"], lambda m, _: ports["prefill"].command(m), clock, limits
    )
    write(caches["prefill"], kv, 0, [5, 1, 3, 0, 2, 4], 90)
    receive, offer = receiving.open("r", sides["prefill"], 0, 90, [0, 7, 1, 6, 2, 5], wire)
    send = sending.open(offer, sides["decode"])
    ports["prefill"].chunks_finished([ChunkDone(session=send, end=90, blocks=(5, 1, 3, 0, 2, 4))])
    events: list[object] = []
    while Drained(session=receive) not in events:
        role, message = words.get(timeout=20)
        (sending if role == "prefill" else receiving).on_port(0, message)
        for event in sending.poll():
            if isinstance(event, SealedOut):
                receiving.sealed(receive, event.seal)
        events += receiving.poll()
    assert isinstance(events[0], Arrived)
    assert torch.equal(read(caches["decode"], kv, [0, 7, 1, 6, 2, 5], 90), truth(kv, 0, 90))
    for port in ports.values():
        port.close()
        port.close()
    for fd in fds.values():
        os.close(fd)


def test_a_block_can_be_read_and_a_closed_port_says_that_it_cannot() -> None:
    words: queue.Queue[bytes] = queue.Queue()
    cache = empty_cache(layout(), 0, 4)
    cache[2] = torch.arange(cache[2].numel()).reshape(cache[2].shape)
    port = open_port(cache, context(encode(PortOptions(transports=("memory",)))), words.put)
    port.command(encode(ReadBlock(ticket=9, block=2)))
    read_back = decode_event(words.get(timeout=20))
    assert read_back == BlockRead(ticket=9, data=cache[2].numpy().tobytes())
    port.close()
    port.command(encode(ReadBlock(ticket=10, block=2)))
    assert decode_event(words.get(timeout=20)) == BlockRead(ticket=10, data=None)


def decode_port() -> tuple[Port, queue.Queue[bytes], ReplicaDescription, ReceiveSessions]:
    """A port over the memory wire, what it says, who it is, and the sessions that order it."""
    words: queue.Queue[bytes] = queue.Queue()
    kv = layout()
    port = open_port(
        empty_cache(kv, 0, 8), context(encode(PortOptions(transports=("memory",)))), words.put
    )
    me = describe(kv, [port.describe()], role="decode", epoch=5)
    receiving = ReceiveSessions(
        me, lambda m, _: port.command(m), MonotonicClock(), TransferLimits()
    )
    return port, words, me, receiving


def test_closing_gives_every_session_its_last_word_and_later_orders_too() -> None:
    port, words, me, receiving = decode_port()
    first, _ = receiving.open("r", me, 0, 16, [0], "memory")
    port.close()
    second, _ = receiving.open("r", me, 0, 16, [1], "memory")
    port.command(encode(Abort(session=second)))
    events = [decode_event(words.get(timeout=20)) for _ in range(3)]
    assert events[0].session == first
    assert isinstance(events[0], Aborted | Broken)
    assert isinstance(events[1], Broken)
    assert events[2] == Aborted(epoch=5, session=second)


def test_a_thread_that_fails_says_so_for_every_session_and_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port, words, me, receiving = decode_port()

    def burst() -> list[object]:
        raise OSError("the card is on fire")

    monkeypatch.setattr(port._wires["memory"].transport, "poll", burst)
    session, _ = receiving.open("r", me, 0, 16, [0], "memory")
    word = decode_event(words.get(timeout=20))
    assert word.session == session
    assert isinstance(word, Broken)
    assert "the card is on fire" in word.reason
    with pytest.raises(InvariantBroken, match="the card is on fire"):  # the rank ends with it
        receiving.open("r", me, 0, 16, [1], "memory")
    assert isinstance(decode_event(words.get(timeout=20)), Broken)
    with pytest.raises(InvariantBroken, match="the card is on fire"):
        port.chunks_finished([ChunkDone(session=2, end=16, blocks=(0,))])
    port.close()
    assert "the KV port of rank 0 has ended" in caplog.text
    assert "Traceback" in caplog.text
