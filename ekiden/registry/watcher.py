"""The replicas that are registered now, and still the last known ones while Redis is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import redis
import redis.asyncio

from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.errors import DeadlineExceeded, SetupError
from ekiden.registry import scripts
from ekiden.registry.client import open_redis, shown
from ekiden.registry.loop import Periodic
from ekiden.registry.record import INDEX_KEY, KEY_PREFIX, POLL_S, TTL_S, ReplicaRecord, decode

log = logging.getLogger(__name__)

_CALL_S = 1.0
_FAILURES = (redis.RedisError, OSError, TimeoutError)

Listener = Callable[[Sequence[ReplicaRecord]], None]


class Watcher:
    """Polls the registry. Joins, leaves and new stats are seen within about ``poll_s``.

    While Redis cannot be reached the members stay as they were and ``stale_for_s`` grows. A Redis
    that comes back may have forgotten everything: members that are missing then are kept for one
    more TTL, in which the living ones register again.
    """

    def __init__(
        self, redis_url: str, *, clock: Clock | None = None, poll_s: float = POLL_S
    ) -> None:
        self._url = redis_url
        self._client: redis.asyncio.Redis = open_redis(redis_url)
        self._list = self._client.register_script(scripts.MEMBERS)
        self._clock = clock or MonotonicClock()
        self._poll_s = poll_s
        self._members: dict[str, ReplicaRecord] = {}
        self._changed_at: dict[tuple[str, int], float] = {}
        self._answered_at = self._clock.now()
        self._grace_until = 0.0
        self._away = False
        self._must_answer = False
        self._unreadable = 0
        self._listeners: list[Listener] = []
        self._polled = asyncio.Condition()
        self._loop: Periodic | None = None

    async def start(self, *, require: bool = False) -> None:
        """Poll once, then go on in the background. Started already, it does nothing.

        Raises:
            SetupError: ``require`` is set and Redis does not answer.
        """
        if self._loop is not None:
            return
        self._must_answer = require
        self._loop = Periodic(self._poll, self._poll_s, "registry-watcher")
        error = await self._poll()
        self._must_answer = False
        if error is not None and require:
            await self.close()
            raise SetupError(
                f"cannot reach Redis at {shown(self._url)} ({error}): start one there, or pass "
                "--redis URL (environment: REDIS_URL)"
            )

    async def close(self) -> None:
        if self._loop is not None:
            await self._loop.stop()
        await self._client.aclose()

    def replicas(self) -> tuple[ReplicaRecord, ...]:
        """One record a replica, the latest life of each, in order of id."""
        return tuple(self._members[key] for key in sorted(self._members))

    @property
    def stale_for_s(self) -> float:
        """Seconds since Redis last answered; 0 while it does."""
        return self._clock.now() - self._answered_at if self._away else 0.0

    def changed_at(self, record: ReplicaRecord) -> float:
        """When (on this process's clock) the record was first seen with its present stats."""
        return self._changed_at.get(record.life, 0.0)

    def on_change(self, listener: Listener) -> None:
        """Call ``listener(members)`` whenever anything but the stats has changed."""
        self._listeners.append(listener)

    async def wait_until(
        self, condition: Callable[[Sequence[ReplicaRecord]], bool], timeout_s: float
    ) -> None:
        """Return once ``condition(members)`` holds.

        Raises:
            DeadlineExceeded: not within ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s), self._polled:
                await self._polled.wait_for(lambda: condition(self.replicas()))
        except TimeoutError:
            known = ", ".join(record.id for record in self.replicas()) or "none"
            raise DeadlineExceeded(
                f"the registry did not come to the state waited for in {timeout_s:g} s "
                f"(replicas now: {known})",
                state="registry",
            ) from None

    async def _poll(self) -> str | None:
        """Ask once; the reason if there was no answer."""
        try:
            async with asyncio.timeout(_CALL_S):
                found = await self._list([INDEX_KEY], [KEY_PREFIX])
        except _FAILURES as error:
            return self._note_outage(error)
        self._note_answer()
        records = [record for data in found if (record := decode(data)) is not None]
        self._note_unreadable(len(found) - len(records))
        self._absorb(records)
        async with self._polled:
            self._polled.notify_all()
        return None

    def _absorb(self, found: Sequence[ReplicaRecord]) -> None:
        now, before = self._clock.now(), self._members
        after = {record.id: record for record in found}
        if now < self._grace_until:
            after = {**before, **after}
        changed_at: dict[tuple[str, int], float] = {}
        for record in after.values():
            same = before.get(record.id) == record
            changed_at[record.life] = self._changed_at.get(record.life, now) if same else now
        self._members, self._changed_at = after, changed_at
        if _identities(before) != _identities(after):
            for listener in self._listeners:
                listener(self.replicas())

    def _note_unreadable(self, count: int) -> None:
        if count > self._unreadable:
            log.warning("%d registered replicas run a version this one cannot read", count)
        self._unreadable = count

    def _note_answer(self) -> None:
        now = self._clock.now()
        if self._away:
            log.info("Redis is back after %.1f s", now - self._answered_at)
            self._grace_until = now + TTL_S
        self._answered_at, self._away = now, False

    def _note_outage(self, error: BaseException) -> str:
        reason = str(error) or type(error).__name__
        if not self._away and not self._must_answer:
            log.warning(
                "Redis at %s is unreachable (%s); going on with the %d replicas known",
                shown(self._url),
                reason,
                len(self._members),
            )
        self._away = True
        return reason


def _identities(members: dict[str, ReplicaRecord]) -> set[tuple[object, ...]]:
    return {(*record.life, record.address, record.status) for record in members.values()}
