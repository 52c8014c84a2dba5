"""Keeps one replica's record in Redis: registered, renewed with fresh stats, withdrawn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec
import redis
import redis.asyncio

from ekiden.core.types import ReplicaStats
from ekiden.registry import scripts
from ekiden.registry.client import open_redis, shown
from ekiden.registry.loop import Periodic
from ekiden.registry.record import (
    INDEX_KEY,
    KEY_PREFIX,
    RENEW_S,
    TTL_S,
    ReplicaRecord,
    encode,
    epoch_field,
)

log = logging.getLogger(__name__)

_FAILURES = (redis.RedisError, OSError, TimeoutError)
_CALL_S = 1.0


class Registration:
    """``start``, then the record is renewed every second until ``close`` withdraws it.

    While Redis is away it keeps trying, and comes back by itself. A later life of the same id
    (a larger epoch) is never overwritten and never withdrawn; ``superseded`` then says so.
    """

    def __init__(
        self,
        redis_url: str,
        record: ReplicaRecord,
        stats: Callable[[], ReplicaStats] = ReplicaStats,
        *,
        renew_s: float = RENEW_S,
        ttl_s: float = TTL_S,
    ) -> None:
        self._url = redis_url
        self._client: redis.asyncio.Redis = open_redis(redis_url)
        self._renew = self._client.register_script(scripts.RENEW)
        self._withdraw = self._client.register_script(scripts.WITHDRAW)
        self._record = record
        self._stats = stats
        self._renew_s, self._ttl_ms = renew_s, int(ttl_s * 1000)
        self._keys = [KEY_PREFIX + record.id, INDEX_KEY]
        self._loop: Periodic | None = None
        self.registered = False
        self.superseded = False

    async def start(self) -> None:
        """Try to register once, then go on in the background whether or not it worked."""
        await self._renew_once()
        self._loop = Periodic(self._renew_once, self._renew_s, "registration")

    async def set_status(self, status: str) -> None:
        """Say a status of the record: written now, or as soon as Redis can be reached."""
        self._record = msgspec.structs.replace(self._record, status=status)
        await self._renew_once()

    async def close(self) -> None:
        """Stop renewing and withdraw the record, within about a second."""
        if self._loop is not None:
            await self._loop.stop()
        with contextlib.suppress(*_FAILURES):  # the record expires by itself
            async with asyncio.timeout(_CALL_S):
                epoch = epoch_field(self._record.epoch)
                await self._withdraw(self._keys, [epoch, self._record.id])
        self.registered = False
        await self._client.aclose()

    async def _renew_once(self) -> None:
        record = msgspec.structs.replace(self._record, stats=self._stats())
        epoch = epoch_field(record.epoch)
        args: list[str | bytes | int] = [epoch, encode(record), self._ttl_ms, record.id]
        try:
            async with asyncio.timeout(_CALL_S):
                held = bool(await self._renew(self._keys, args))
        except _FAILURES as error:
            self._note_outage(error)
            return
        self._note_answer(held)

    def _note_answer(self, held: bool) -> None:
        if not held and not self.superseded:
            log.warning("%s: a later life is registered; not renewing", self._record.id)
        if held and not self.registered:
            log.info("%s registered at %s", self._record.id, shown(self._url))
        self.registered, self.superseded = held, not held

    def _note_outage(self, error: BaseException) -> None:
        if self.registered or self._loop is None:
            log.warning(
                "Redis at %s is unreachable (%s); %s goes on and registers again when it is back",
                shown(self._url),
                error or type(error).__name__,
                self._record.id,
            )
        self.registered = False
