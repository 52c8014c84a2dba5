"""A name server that is silent holds nobody up: not other tries, not the end of the process."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio.connection import UnixDomainSocketConnection

from ekiden.registry import dialling
from ekiden.registry.client import open_redis
from ekiden.registry.dialling import PlainConnection, TlsConnection, dial, lookup


class Names:
    """A name server that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = threading.Event()
        self.addresses: list[Any] = []
        self.families: dict[str, int] = {}

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(host)
        self.answer.wait(20)
        if not self.addresses:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return [
            (self.families.get(address, socket.AF_INET), socket.SOCK_STREAM, 0, "", (address, port))
            for address in self.addresses
        ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    return names


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Of a server on 127.0.0.1 that takes every caller."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_tries_share_the_lookup_that_is_under_way(names: Names) -> None:
    for _ in range(20):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await dial("redis", 6379)
    assert names.asked == ["redis"]
    names.answer.set()
    with pytest.raises(OSError, match=r"redis is not known: .*Temporary failure"):
        await dial("redis", 6379)


async def test_a_lookup_that_fails_when_no_try_waits_for_it_any_more_is_no_error_of_ours(
    names: Names,
) -> None:
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    late = asyncio.ensure_future(dial("redis", 6379))
    await asyncio.wait([late], timeout=0.01)
    late.cancel()
    await asyncio.wait([late])
    under_way = lookup("redis", 6379)
    names.answer.set()
    assert isinstance(under_way.exception(20), OSError)
    del late, under_way  # and with them whatever waited
    await asyncio.sleep(0.01)
    gc.collect()
    assert told == []


async def test_a_name_is_looked_up_anew_once_the_last_answer_is_there(
    names: Names, port: int
) -> None:
    names.answer.set()
    with pytest.raises(OSError, match="not known"):
        await dial("redis", port)
    names.addresses = ["127.0.0.1"]
    (await dial("redis", port)).close()
    assert names.asked == ["redis", "redis"]


async def test_the_next_address_is_tried_when_one_refuses(names: Names, port: int) -> None:
    names.answer.set()
    names.addresses = ["127.0.0.2", "127.0.0.1"]
    with await dial("redis", port) as sock:
        assert sock.getpeername() == ("127.0.0.1", port)
    names.addresses = ["127.0.0.2", "127.0.0.3"]
    with pytest.raises(ConnectionRefusedError):
        await dial("redis", port)


async def test_an_address_of_a_kind_that_this_machine_lacks_is_passed_over(
    names: Names, port: int
) -> None:
    names.answer.set()
    names.addresses = ["::1", "127.0.0.1"]
    names.families["::1"] = 9999
    with await dial("redis", port) as sock:
        assert sock.getpeername() == ("127.0.0.1", port)


@pytest.fixture
def silent(port: int) -> Iterator[str]:
    """An address that takes no call and refuses none: its queue of callers is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.9", port))
        listener.listen(0)
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.9", port))
        yield "127.0.0.9"
        for caller in callers:
            caller.close()


async def test_a_silent_address_does_not_hide_the_next_one(
    names: Names, port: int, silent: str
) -> None:
    names.answer.set()
    names.addresses = [silent, "127.0.0.2", silent, "127.0.0.1"]
    async with asyncio.timeout(2):
        with await dial("redis", port) as sock:
            assert sock.getpeername() == ("127.0.0.1", port)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


async def test_an_answer_that_came_too_late_for_one_try_is_there_for_the_next(
    names: Names, port: int
) -> None:
    names.addresses = ["127.0.0.1"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await dial("redis", port)
    names.answer.set()
    lookup("redis", port).result(20)
    (await dial("redis", port)).close()
    assert names.asked == ["redis"]
    (await dial("redis", port)).close()
    assert names.asked == ["redis", "redis"]


async def test_an_answer_is_not_kept_once_it_was_of_no_use_or_is_old(
    names: Names, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.answer.set()
    names.addresses = ["127.0.0.2"]
    lookup("redis", port).result(20)
    with pytest.raises(ConnectionRefusedError):
        await dial("redis", port)
    names.addresses = ["127.0.0.1"]
    (await dial("redis", port)).close()
    assert names.asked == ["redis", "redis"]
    monkeypatch.setattr(dialling, "FRESH_S", 0.0)
    lookup("redis", port).result(20)
    time.sleep(0.01)
    (await dial("redis", port)).close()
    assert names.asked == ["redis"] * 4


def test_every_url_connects_by_it_but_that_of_a_unix_socket() -> None:
    kinds = {
        "redis://h:1/0": PlainConnection,
        "rediss://h:1/0": TlsConnection,
        "unix:///tmp/s": UnixDomainSocketConnection,
    }
    for url, kind in kinds.items():
        assert open_redis(url).connection_pool.connection_class is kind


async def test_tls_checks_the_name_and_not_the_address(names: Names, port: int) -> None:
    connection = TlsConnection(host="redis.example", port=port)
    with socket.socket() as sock:
        connection._sock = sock
        arguments = connection._connection_arguments()
    assert arguments["server_hostname"] == "redis.example"
    assert isinstance(arguments["ssl"], ssl.SSLContext)
    assert arguments["sock"] is sock
    assert "host" not in arguments


async def test_a_client_answers_over_a_name(redis_url: str) -> None:
    client = open_redis(redis_url.replace("127.0.0.1", "localhost"))
    assert await client.ping()
    await client.aclose()


SILENT = """
import asyncio, socket, time, uvloop
socket.getaddrinfo = lambda *a, **k: time.sleep(60)
from ekiden.registry.client import open_redis

async def main():
    client = open_redis("redis://redis.test:6379/0")
    for _ in range(3):
        try:
            async with asyncio.timeout(0.1):
                await client.ping()
        except Exception as error:
            print(type(error).__name__)
    await client.aclose()

uvloop.run(main())
"""


def test_a_process_ends_though_its_lookup_does_not() -> None:
    run = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, timeout=30)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split() == ["TimeoutError"] * 3


def test_a_name_that_cannot_be_written_is_not_known() -> None:
    with pytest.raises(OSError, match="is not known"):
        lookup("a" * 300, 1).result(20)
