"""The replicas this gateway can use now: the registry's members, their links, what is booked.

Joins the pure part (placing) with the live ones (watcher, links).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import msgspec

from ekiden.core.clock import Clock
from ekiden.core.errors import EkidenError, Unavailable
from ekiden.core.hashes import granule_hashes, root_hash
from ekiden.core.types import Completion, PrefillCandidate
from ekiden.registry.record import POLL_S, READY, UNWELL, ReplicaRecord
from ekiden.registry.watcher import Watcher
from gateway.catalog import ServedModel
from gateway.decode_link import CONNECT_S, DecodeLink
from gateway.placing import Placed, Placer
from gateway.prefix_guess import Life
from gateway.routing import Ask, Told

_RETRY_S = 1.0


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes. Given back to the fleet when the request ends."""

    placed: Placed
    link: DecodeLink

    @property
    def life(self) -> Life:
        return self.placed.decode.life

    @property
    def predicted_cached(self) -> int:
        return self.placed.predicted_cached

    @property
    def prefill(self) -> tuple[PrefillCandidate, ...]:
        return tuple(
            PrefillCandidate(replica_id=one.id, address=one.address, epoch=one.epoch)
            for one in self.placed.prefill
        )


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What every decode replica of a model can take, in tokens. A prefill replica that takes less
    limits nobody: decode prefills by itself what that one refuses."""

    max_model_len: int
    vocab_size: int


OpenLink = Callable[[ReplicaRecord], DecodeLink]


class Fleet:
    """Used from one event loop."""

    def __init__(
        self, watcher: Watcher, open_link: OpenLink, *, clock: Clock, rng: random.Random
    ) -> None:
        self._watcher = watcher
        self._open_link = open_link
        self._links: dict[Life, DecodeLink] = {}
        self._retired: set[DecodeLink] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._placer = Placer(clock, rng, told=self._told)
        watcher.on_change(self._follow)

    async def start(self) -> None:
        """Take the members known so far and give their links a moment to come up."""
        self._follow(self._watcher.replicas())
        await asyncio.gather(*(link.settled(CONNECT_S) for link in self._links.values()))

    async def close(self) -> None:
        links = [*self._links.values(), *self._retired]
        await asyncio.gather(*(link.close() for link in links), *self._closing)

    def fail_all(self, error: EkidenError) -> None:
        """End every request in flight with ``error``."""
        for link in (*self._links.values(), *self._retired):
            link.fail_all(error)

    @property
    def stale_for_s(self) -> float:
        return self._watcher.stale_for_s

    def replicas(self) -> tuple[ReplicaRecord, ...]:
        return self._watcher.replicas()

    def limits(self, model: ServedModel) -> Limits:
        """What fits on every usable decode replica of the model.

        Raises:
            Unavailable: no decode replica can serve it now; the message says what is missing.
        """
        records = self._usable(model, "decode") or self._unavailable(model)
        vocabulary = min(record.vocab_size or model.tokenizer.vocab_size for record in records)
        return Limits(
            max_model_len=min(record.max_model_len for record in records), vocab_size=vocabulary
        )

    def place(
        self, model: ServedModel, granules: Sequence[bytes], ask: Ask, *, without: set[Life]
    ) -> Placement:
        """Choose replicas and book them.

        Raises:
            Unavailable: no decode replica is left.
        """
        ready = [r for r in self._usable(model, "decode") if r.life not in without]
        placed = self._placer.place(
            ready or self._unavailable(model), self._usable(model, "prefill"), granules, ask
        )
        return Placement(placed=placed, link=self._links[placed.decode.life])

    def finish(self, placement: Placement, completion: Completion | None) -> None:
        """The request ended; without a completion it was cancelled or failed."""
        self._placer.finish(
            placement.placed,
            worked=completion is not None,
            prefilled_on=completion.prefill_replica if completion else "",
        )

    def first_token(self, placement: Placement) -> None:
        """Prefill is done with the request."""
        self._placer.first_token(placement.placed)

    def failed(self, placement: Placement, *, certain: bool) -> None:
        self._placer.failed(placement.life, certain=certain)

    def missing(self, model: ServedModel) -> str | None:
        """None if the model can be served now, else one sentence."""
        if self._usable(model, "decode"):
            return None
        records = [r for r in self.replicas() if r.role == "decode" and r.model == model.name]
        if not records:
            return (
                f"no decode replica of {model.name} is registered: start one with "
                "`ekiden serve decode`"
            )
        reasons = "; ".join(f"{r.id} {self._why_not(r, model)}" for r in records)
        return f"no decode replica of {model.name} can take a request: {reasons}"

    def _unavailable(self, model: ServedModel) -> list[ReplicaRecord]:
        why = self.missing(model) or f"every decode replica of {model.name} failed the request"
        raise Unavailable(why, retry_after_s=_RETRY_S)

    def _usable(self, model: ServedModel, role: str) -> list[ReplicaRecord]:
        return [
            record
            for record in self.replicas()
            if record.role == role
            and record.model == model.name
            and self._why_not(record, model) is None
        ]

    def _why_not(self, record: ReplicaRecord, model: ServedModel) -> str | None:
        # Only decode can be the last resort: what an unwell prefill would do, decode does itself.
        if record.status not in ((READY, UNWELL) if record.role == "decode" else (READY,)):
            return f"is {record.status}"
        theirs, ours = record.tokenizer_fingerprint, model.tokenizer.fingerprint
        if theirs and ours and theirs != ours:
            return f"has another tokenizer.json ({theirs[:12]}) than the gateway ({ours[:12]})"
        if record.role == "decode":
            link = self._links.get(record.life)
            if link is None or not link.connected:
                return f"cannot be reached ({link.trouble if link else 'unknown'})"
        return None

    def _told(self, record: ReplicaRecord) -> Told:
        """Figures are read up to one poll after they were written."""
        read_at = self._watcher.changed_at(record)
        return Told(read_at - POLL_S, read_at)

    def _follow(self, records: Sequence[ReplicaRecord]) -> None:
        """Open links to new lives, retire those of lives that are gone."""
        decode = {record.life: record for record in records if record.role == "decode"}
        for life, record in decode.items():
            if life not in self._links:
                self._links[life] = self._open_link(record)
                self._links[life].start()
        for life in [life for life in self._links if life not in decode]:
            self._retire(self._links.pop(life))
        self._placer.keep_only({record.life for record in records})

    def _retire(self, link: DecodeLink) -> None:
        """No new requests; what it holds may end, then it is closed."""
        self._retired.add(link)
        task = asyncio.create_task(self._close_when_idle(link))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_when_idle(self, link: DecodeLink) -> None:
        await link.idle()
        self._retired.discard(link)
        await link.close()


def prompt_granules(model: str, tokens: Sequence[int]) -> list[bytes]:
    """The names under which the prefix guess knows a prompt."""
    return granule_hashes(root_hash(model), tokens)
