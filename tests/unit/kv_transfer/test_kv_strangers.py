"""Whoever comes without the key of an endpoint, or does what no peer would, is turned away."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kv_rig import layout

from ekiden.cache.tensors import allocate_shared_cache
from ekiden.core.errors import ReplicaFailed
from kv_transfer.transports import stream
from kv_transfer.transports.base import Completed, Event, Incoming, PeerLost
from kv_transfer.transports.frames import HEADER, Kind
from kv_transfer.transports.shm import ShmTransport
from kv_transfer.transports.tcp import TcpTransport

DEADLINE_S = 10.0


def frame(kind: int, payload: bytes = b"", *, op: int = 1, size: int | None = None) -> bytes:
    length = len(payload) if size is None else size
    return HEADER.pack(kind, op, 7, length, 0) + payload


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """As long as it lasts this process can open nothing more."""
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def host() -> Iterator[TcpTransport]:
    transport = TcpTransport()
    yield transport
    transport.close()


@pytest.fixture
def stranger(host: TcpTransport) -> Iterator[socket.socket]:
    sock = socket.create_connection(("127.0.0.1", host._listener.getsockname()[1]), DEADLINE_S)
    yield sock
    sock.close()


def until_closed(host: TcpTransport, sock: socket.socket) -> list[Event]:
    """Poll the host until it hangs up on the socket; what it said meanwhile."""
    events: list[Event] = []
    sock.setblocking(False)
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        events += host.poll()
        if select.select([sock], [], [], 0.005)[0]:
            try:
                if not sock.recv(4096):
                    return events
            except ConnectionError:
                return events
    raise AssertionError("the stranger was not turned away")


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n" + bytes(64),
        frame(Kind.EAGER, b"0123456789abcdef"),
        frame(Kind.OFFER, size=1 << 40),
        frame(Kind.HELLO, bytes(16) + b"tcp-who-knows"),
        frame(Kind.HELLO, b"short"),
        frame(Kind.HELLO, size=1 << 30),
        frame(Kind.WELCOME) + frame(Kind.EAGER, b"0123456789abcdef"),
    ],
    ids=["http", "a message", "an offer", "a wrong key", "half a key", "a long hello", "a welcome"],
)
def test_whoever_does_not_show_the_key_is_hung_up_on_and_not_heard(
    host: TcpTransport, stranger: socket.socket, words: bytes
) -> None:
    stranger.sendall(words)
    assert until_closed(host, stranger) == []
    assert not host._connections


def test_a_caller_who_says_nothing_is_hung_up_on_in_time(
    host: TcpTransport, stranger: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "GREETING_S", 0.1)
    assert until_closed(host, stranger) == []


@pytest.mark.parametrize(
    "words",
    [
        frame(Kind.DATA, bytes(64), op=99),
        frame(Kind.TAKE, op=99),
        frame(Kind.EAGER, size=stream.EAGER_BYTES + 1),
        frame(99),
        frame(Kind.WELCOME),
        frame(Kind.HELLO, b"again"),
    ],
    ids=[
        "data nobody asked for",
        "what was not offered",
        "too much unasked",
        "no such kind",
        "a welcome",
        "another hello",
    ],
)
def test_a_peer_that_breaks_the_rules_loses_its_connection(
    host: TcpTransport, stranger: socket.socket, words: bytes
) -> None:
    stranger.sendall(frame(Kind.HELLO, host._key + b"tcp0123456789abcdef127.0.0.1|9") + words)
    assert until_closed(host, stranger) == []


def test_a_number_is_not_offered_again_while_its_message_comes(
    host: TcpTransport, stranger: socket.socket
) -> None:
    offer = frame(Kind.OFFER, op=5, size=1 << 20)
    stranger.sendall(frame(Kind.HELLO, host._key + b"tcp0123456789abcdef127.0.0.1|9") + offer)
    message = _until(host.poll)[0].message
    op = host.receive(message, [memoryview(bytearray(1 << 20))])
    stranger.sendall(offer)
    (ended,) = until_closed(host, stranger)
    assert ended.op == op
    assert "again" in ended.error


@pytest.mark.parametrize("word", [Kind.TAKE, Kind.DROP])
def test_a_message_is_taken_once_and_then_not_dropped(host: TcpTransport, word: Kind) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1|{server.getsockname()[1]}"
        peer = host.connect(b"tcp0123456789abcdef" + address.encode())
        dialled, _ = server.accept()
    with dialled:
        op = host.send(peer, 5, [memoryview(bytes(64 << 20))])
        dialled.sendall(frame(Kind.WELCOME) + frame(Kind.TAKE, op=op) + frame(word, op=op))
        events = until_closed(host, dialled)
    assert [type(event) for event in events] == [Completed, PeerLost]
    assert "was not offered" in events[0].error


def test_a_peer_cannot_end_what_is_sent_to_another(
    host: TcpTransport, stranger: socket.socket
) -> None:
    friend = TcpTransport()
    data = bytes(range(256)) * 256
    op = host.send(host.connect(friend.describe()), 5, [memoryview(data)])
    offer = _until(lambda: [e for e in (*host.poll(), *friend.poll()) if isinstance(e, Incoming)])
    hello = frame(Kind.HELLO, host._key + b"tcp0123456789abcdef127.0.0.1|9")
    stranger.sendall(hello + frame(Kind.DROP, op=op))
    assert until_closed(host, stranger) == []
    buffer = memoryview(bytearray(len(data)))
    friend.receive(offer[0].message, [buffer])
    said: list[Event] = []
    until = time.monotonic() + DEADLINE_S
    while len(said) < 2 and time.monotonic() < until:
        said += [*host.poll(), *friend.poll()]
    assert [e.error for e in said if isinstance(e, Completed)] == ["", ""]
    assert buffer == data
    friend.close()


def test_the_other_peers_of_a_host_are_not_disturbed_by_strangers(
    host: TcpTransport, stranger: socket.socket
) -> None:
    friend = TcpTransport()
    peer = friend.connect(host.describe())
    stranger.sendall(bytes(200))
    until_closed(host, stranger)
    friend.send(peer, 5, [memoryview(b"hello")])
    said = _until(lambda: [e for e in (*friend.poll(), *host.poll()) if isinstance(e, Incoming)])
    assert said[0].tag == 5
    friend.close()


def test_a_number_is_never_given_to_a_dead_port() -> None:
    closed = TcpTransport()
    endpoint = closed.describe()
    closed.close()
    caller = TcpTransport()
    peer = caller.connect(endpoint)
    op = caller.send(peer, 1, [memoryview(bytes(8))])
    events: list[Event] = []
    _until(lambda: events.extend(caller.poll()) or [e for e in events if isinstance(e, PeerLost)])
    assert [e.op for e in events if isinstance(e, Completed)] == [op]
    caller.close()


def test_a_mapped_pool_can_be_read_and_never_written() -> None:
    kv = layout()
    cache, fd = allocate_shared_cache(kv, 0, 4)
    owner, reader = ShmTransport(), ShmTransport()
    owner.share(fd)
    cache.fill_(3.0)
    peer = reader.connect(owner.describe())

    def pool() -> list[memoryview]:
        owner.poll()
        reader.poll()
        found = reader.pool(peer)
        return [found] if found is not None else []

    (mapped,) = _until(pool)
    assert mapped.readonly
    assert mapped[:4] == b"\x00\x00\x40\x40"
    cache.fill_(5.0)
    assert mapped[:4] == b"\x00\x00\xa0\x40"
    with pytest.raises(PermissionError):  # as whoever is given the descriptor would try
        mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1)
    owner.close()
    reader.poll()
    assert mapped[:4] == b"\x00\x00\xa0\x40"  # the mapping outlives its owner
    reader.close()
    os.close(fd)


def test_sockets_of_the_dead_are_swept_and_those_of_the_living_left(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(tmp_path / "ekiden-kv-1-dead.sock"))
    dead.close()  # as a killed process leaves it
    living = ShmTransport(str(tmp_path))
    other = ShmTransport(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    peer = other.connect(living.describe())
    other.send(peer, 3, [memoryview(b"hello")])
    _until(lambda: [e for e in (*other.poll(), *living.poll()) if isinstance(e, Incoming)])
    living.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_could_not_be_taken_for_want_of_descriptors_is_asked_for_again() -> None:
    _, fd = allocate_shared_cache(layout(), 0, 4)
    owner, reader = ShmTransport(), ShmTransport()
    owner.share(fd)
    reader.connect(owner.describe())
    for _ in range(3):  # it is welcomed, and the descriptor is on its way
        owner.poll()
    with no_descriptors():
        events = reader.poll()
    assert [type(event) for event in events] == [PeerLost]
    peer = reader.connect(owner.describe())
    _until(lambda: [*owner.poll(), *reader.poll(), *([1] if reader.pool(peer) else [])])
    owner.close()
    reader.close()
    os.close(fd)


def test_a_caller_for_whom_there_is_no_descriptor_waits_and_is_let_in_later() -> None:
    host, caller = TcpTransport(), TcpTransport()
    peer = caller.connect(host.describe())
    caller.send(peer, 5, [memoryview(b"hello")])
    polls, until = 0, time.monotonic() + 0.5
    with no_descriptors():
        while (left := until - time.monotonic()) > 0:
            assert host.poll() == []
            select.select(host.fds, [], [], min(host.idle(), left))
            polls += 1
    assert polls < 30
    said = _until(lambda: [e for e in (*caller.poll(), *host.poll()) if isinstance(e, Incoming)])
    assert said[0].tag == 5
    host.close()
    caller.close()


@pytest.mark.parametrize(
    "address",
    [
        b"127.0.0.1|99999",
        b"127.0.0.1|http",
        b"127.0.0.1",
        b"\xff|80",
        b"a\0b|80",
    ],
)
def test_an_address_that_makes_no_sense_is_no_end_of_the_port(
    host: TcpTransport, address: bytes
) -> None:
    with pytest.raises(ReplicaFailed, match=r"is no address of the tcp wire"):
        host.connect(b"tcp" + bytes(stream.KEY_BYTES) + address)


def test_a_pool_that_is_not_shared_is_told_at_once() -> None:
    owner, reader = ShmTransport(), ShmTransport()
    peer = reader.connect(owner.describe())

    def refused() -> list[str]:
        owner.poll()
        reader.poll()
        try:
            reader.pool(peer)
        except ReplicaFailed as error:
            return [error.message]
        return []

    assert _until(refused) == ["the peer does not share its KV cache"]
    owner.close()
    reader.close()


def _until(look: Callable[[], list]) -> list:  # type: ignore[type-arg]
    until = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < until
        select.select([], [], [], 0.002)
    return found
