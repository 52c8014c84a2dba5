"""The contract of a wire, run against every wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from kv_ends import Ends, poll
from kv_rig import FAKES

from ekiden.core.errors import ReplicaFailed, SetupError
from kv_transfer import transports
from kv_transfer.options import PortOptions
from kv_transfer.transports import open_transports
from kv_transfer.transports.base import Completed, Incoming, PeerLost, Transport
from kv_transfer.transports.memory import Faults, Hub, MemoryTransport
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.shm import ShmTransport
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.ucx import UcxTransport

SIZES = (16, 4096, 65535, 65536, 65537, 3_000_000)


@pytest.fixture(params=[*FAKES, "ucx", "tcp", "shm", "nixl"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    hub = Hub()
    makers: dict[str, Callable[[], Transport]] = {
        **{name: partial(fake, hub) for name, fake in FAKES.items()},
        "ucx": UcxTransport,
        "tcp": TcpTransport,
        "nixl": NixlTransport,
        "shm": ShmTransport,
    }
    ends = Ends(makers[request.param])
    yield ends
    ends.close(ends.a)
    ends.close(ends.b)


def deliver(ends: Ends, tag: int, size: int) -> None:
    data, target = ends.pattern(size, tag), ends.buffer(ends.b, size)
    sent = ends.a.send(ends.to_b, tag, [data])
    (incoming,) = ends.wait(ends.b, Incoming)
    assert (incoming.tag, incoming.bytes) == (tag, size)
    received = ends.b.receive(incoming.message, [target])
    assert ends.wait(ends.b, Completed) == [Completed(received, "")]
    assert ends.wait(ends.a, Completed) == [Completed(sent, "")]
    assert target == data


@pytest.mark.parametrize("size", SIZES)
def test_a_message_arrives_bit_for_bit_under_its_tag(ends: Ends, size: int) -> None:
    deliver(ends, (1 << 63) + size, size)


def test_messages_may_be_received_in_any_order(ends: Ends) -> None:
    data = {tag: ends.pattern(200_000, tag) for tag in range(1, 7)}
    for tag, buffer in data.items():
        ends.a.send(ends.to_b, tag, [buffer])
    incoming = ends.wait(ends.b, Incoming, 6)
    targets = {i.tag: ends.buffer(ends.b, i.bytes) for i in incoming}
    for i in reversed(incoming):
        ends.b.receive(i.message, [targets[i.tag]])
    assert all(c.error == "" for c in ends.wait(ends.b, Completed, 6))
    assert targets == data


@pytest.mark.parametrize("size", [1000, 3_000_000])
def test_a_discarded_message_ends_and_later_ones_arrive(ends: Ends, size: int) -> None:
    ends.a.send(ends.to_b, 1, [ends.pattern(size, 1)])
    (incoming,) = ends.wait(ends.b, Incoming)
    ends.b.discard(incoming.message)
    ends.wait(ends.a, Completed)
    assert not [e for e in ends.events[ends.b] if isinstance(e, Completed)]
    deliver(ends, 2, size)


def test_connecting_twice_is_one_connection(ends: Ends) -> None:
    assert ends.a.connect(ends.b.describe()) == ends.to_b


def test_breaking_a_connection_ends_what_is_under_way_at_both_ends(ends: Ends) -> None:
    deliver(ends, 1, 16)
    sent = ends.a.send(ends.to_b, 2, [ends.pattern(3_000_000, 2)])
    (incoming,) = ends.wait(ends.b, Incoming)
    ends.b.disconnect(ends.to_a)
    assert ends.wait(ends.b, PeerLost)[0].peer == ends.to_a
    assert ends.wait(ends.a, PeerLost)[0].peer == ends.to_b
    (failed,) = ends.wait(ends.a, Completed)
    assert failed.op == sent
    assert failed.error
    # The message was announced before the loss; taking it now must end, not hang.
    ends.b.receive(incoming.message, [ends.buffer(ends.b, incoming.bytes)])
    assert ends.wait(ends.b, Completed)[0].error


def test_after_a_loss_the_same_endpoints_connect_anew(ends: Ends) -> None:
    deliver(ends, 1, 200_000)
    ends.a.disconnect(ends.to_b)
    ends.wait(ends.a, PeerLost)
    ends.wait(ends.b, PeerLost)
    again = ends.a.connect(ends.b.describe())
    assert again != ends.to_b
    ends.to_b, ends.to_a = again, ends.b.connect(ends.a.describe())
    deliver(ends, 2, 200_000)


def test_sending_to_a_lost_peer_fails_at_once(ends: Ends) -> None:
    ends.a.disconnect(ends.to_b)
    op = ends.a.send(ends.to_b, 1, [ends.pattern(16, 1)])
    (failed,) = ends.wait(ends.a, Completed)
    assert failed.op == op
    assert failed.error


def test_the_end_of_a_peer_is_told(ends: Ends) -> None:
    deliver(ends, 1, 16)
    ends.close(ends.b)
    assert ends.wait(ends.a, PeerLost)[0].peer == ends.to_b


def test_an_idle_poll_sleeps(ends: Ends) -> None:
    deliver(ends, 1, 200_000)
    begun, polls = time.thread_time(), 0
    until = time.monotonic() + 0.5
    while (left := until - time.monotonic()) > 0:
        poll(ends.a, left)
        polls += 1
    assert polls < 50
    assert time.thread_time() - begun < 0.2


@pytest.mark.parametrize("garbage", [b"", b"nonsense", bytes(81), b"\xff" * 81])
def test_what_is_no_endpoint_is_refused(ends: Ends, garbage: bytes) -> None:
    with pytest.raises(ReplicaFailed, match=r"endpoint|address"):
        ends.a.connect(garbage)


def test_an_unknown_wire_is_refused_with_the_choices() -> None:
    with pytest.raises(SetupError, match=r"pigeon.*shm, ucx, tcp"):
        open_transports(PortOptions(transports=("pigeon",)), None)


def test_of_several_wires_those_that_cannot_run_are_left_out_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(options: PortOptions, pool_fd: int | None) -> Transport:
        raise SetupError("no such package")

    monkeypatch.setitem(transports._OPENERS, "ucx", absent)
    both = PortOptions(transports=("ucx", "tcp"))
    with pytest.raises(SetupError, match="no such package"):
        open_transports(both, None)
    left = open_transports(msgspec.structs.replace(both, all_needed=False), None)
    assert list(left) == ["tcp"]
    left["tcp"].close()


def test_a_folder_that_is_named_and_cannot_be_used_is_no_reason_to_take_another_wire(
    tmp_path: Path,
) -> None:
    nowhere = PortOptions(
        transports=("shm", "tcp"), all_needed=False, shm_folder=str(tmp_path / "no" / "folder")
    )
    with pytest.raises(SetupError, match=r"--kv-shm-dir .*no/folder"):
        open_transports(nowhere, None)


def test_memory_that_cannot_be_registered_is_a_setup_error() -> None:
    transport = MemoryTransport(Hub(), faults=Faults(register_fails=True))
    with pytest.raises(SetupError, match="register"):
        transport.register(memoryview(bytearray(16)))
