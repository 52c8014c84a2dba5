"""One way to open Redis: short deadlines and no hidden retries.

The library's defaults hold a call for seconds when Redis is frozen or gone; every caller here has
its own next try, so a call fails at once instead.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ekiden.core.errors import SetupError
from ekiden.registry.dialling import use_dialling

SOCKET_TIMEOUT_S = 0.5


def open_redis(url: str) -> redis.asyncio.Redis:
    """A client of ``redis://``, ``rediss://`` or ``unix://``; connects on first use.

    Raises:
        SetupError: the URL is not one of these.
    """
    try:
        client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            max_connections=4,
        )
    except ValueError as error:
        raise SetupError(
            f"{shown(url)} is not a Redis URL ({error}): pass redis://HOST:PORT/DB"
        ) from None
    use_dialling(client.connection_pool)
    return client


def shown(url: str) -> str:
    """The URL without its password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
