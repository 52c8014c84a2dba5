"""Looks at a running deployment once a second: its registry and its gateway."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import httpx

from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.cores import usable_cores
from ekiden.core.errors import SetupError
from ekiden.doctor.evidence import Evidence, Host, Situation
from ekiden.doctor.readings import Reading, situation
from ekiden.doctor.scrape import Scrape, scrape
from ekiden.registry.watcher import Watcher

EVERY_S = 1.0
SCRAPE_S = 2.0


class Watch:
    """``redis`` or ``gateway`` may be empty; what was not there is in ``missing``."""

    def __init__(self, redis: str, gateway: str, clock: Clock | None = None) -> None:
        self._redis, self._gateway = redis, gateway
        self._clock = clock or MonotonicClock()
        self.missing: dict[str, str] = {}

    async def run(self, seconds: float, tick: Callable[[float], None]) -> Evidence:
        """Readings for so long; ``tick`` is told the seconds that have passed.

        Raises:
            SetupError: nothing can be looked at, neither a registry nor a gateway.
        """
        watcher = Watcher(self._redis) if self._redis else None
        if watcher is not None:
            await watcher.start(require=True)
        try:
            async with httpx.AsyncClient(timeout=SCRAPE_S, trust_env=False) as http:
                readings, passed = await self._readings(watcher, http, seconds, tick)
        finally:
            if watcher is not None:
                await watcher.close()
        self._check(readings)
        found = situation(readings, passed)
        return Evidence(situations=(found,), host=this_host(found), missing=self.missing)

    async def _readings(
        self,
        watcher: Watcher | None,
        http: httpx.AsyncClient,
        seconds: float,
        tick: Callable[[float], None],
    ) -> tuple[list[Reading], float]:
        began = self._clock.now()
        readings = [await self._read(watcher, http)]
        while (passed := self._clock.now() - began) < seconds:
            tick(passed)
            await asyncio.sleep(min(EVERY_S, seconds - passed))
            readings.append(await self._read(watcher, http))
        return readings, passed

    async def _read(self, watcher: Watcher | None, http: httpx.AsyncClient) -> Reading:
        return Reading(
            records=watcher.replicas() if watcher is not None else None,
            scrape=await self._scrape(http) if self._gateway else None,
        )

    async def _scrape(self, http: httpx.AsyncClient) -> Scrape | None:
        found = await scrape(http, self._gateway, self._clock)
        if isinstance(found, Scrape):
            return found
        self.missing["gateway"] = f"{self._gateway}/metrics tells nothing ({found}): give --url"
        return None

    def _check(self, readings: list[Reading]) -> None:
        if self._redis or any(reading.scrape for reading in readings):
            return
        raise SetupError(
            f"nothing to look at: {self.missing['gateway']} of a gateway, --redis URL or --bench "
            "FILE"
        )


def this_host(found: Situation) -> Host:
    """This machine, and which of the replicas it has."""
    here = tuple(r.id for r in found.replicas if r.host and is_here(r.host))
    return Host(cores=usable_cores(), load=os.getloadavg()[0], replicas=here)


def is_here(host: str) -> bool:
    """Whether an address is one of this machine's: it can be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
