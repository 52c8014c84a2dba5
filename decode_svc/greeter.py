"""Meets prefill replicas as they appear, so that no request waits for a first meeting, and so that
what does not fit together is in the log before anybody asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ekiden.core.errors import EkidenError, SetupError
from ekiden.core.types import PrefillCandidate
from ekiden.registry.record import ReplicaRecord
from ekiden.registry.watcher import Watcher

from .core import DecodeCore
from .peers import RETRY_S

logger = logging.getLogger(__name__)


def prefill_candidates(members: Sequence[ReplicaRecord], model: str) -> list[PrefillCandidate]:
    """The prefill replicas of ``model`` that take work."""
    return [
        PrefillCandidate(replica_id=r.id, address=r.address, epoch=r.epoch)
        for r in members
        if r.role == "prefill" and r.model == model and r.status == "ready"
    ]


class Greeter:
    """Lives on the service's event loop, from start to ``close``."""

    def __init__(self, core: DecodeCore, watcher: Watcher) -> None:
        self._core = core
        self._meetings: dict[tuple[str, int], asyncio.Task[None]] = {}
        watcher.on_change(self._changed)
        self._starting = asyncio.ensure_future(watcher.start())

    def _changed(self, members: Sequence[ReplicaRecord]) -> None:
        """Meet each new life once; what is gone is forgotten."""
        found = {(c.address, c.epoch): c for c in prefill_candidates(members, self._core.me.model)}
        for life in self._meetings.keys() - found.keys():
            self._meetings.pop(life).cancel()
        for life in found.keys() - self._meetings.keys():
            self._meetings[life] = asyncio.ensure_future(self._greet(found[life]))

    async def _greet(self, candidate: PrefillCandidate) -> None:
        """Until it is met, or cannot ever work with this replica."""
        while True:
            try:
                await self._core.peers.meet(candidate)
                return
            except EkidenError as error:
                logger.warning("prefill replica %s: %s", candidate.replica_id, error.message)
                if isinstance(error, SetupError):
                    return
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        tasks = [self._starting, *self._meetings.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
