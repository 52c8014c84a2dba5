"""The gateways: place each request, try another replica where one fails, keep the account."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ekiden.registry.record import ReplicaRecord
from ekiden.sim.asked import Asked
from ekiden.sim.handoff import MESSAGE_S
from ekiden.sim.loop import Loop
from ekiden.sim.prompts import Prompt, Prompts
from ekiden.sim.record import DISCONNECTED, TIMEOUT, UNAVAILABLE, Record
from ekiden.sim.registry import Life, Registry
from ekiden.sim.replica import Replica
from ekiden.sim.visit import Visit
from gateway.placing import MAX_ATTEMPTS, Placed, Placer
from gateway.routing import Ask

_NONE = Prompt(tokens=[], keys=[])


class Front:
    """Requests go in by ``submit``; what became of them is in ``records``."""

    def __init__(
        self,
        loop: Loop,
        prompts: Prompts,
        registry: Registry,
        placers: Sequence[Placer],
        lives: Mapping[Life, Replica],
        *,
        link_rate: Callable[[Replica, Replica], float],
        local_prefill_tokens: int,
        request_s: float,
        timeout_s: float,
    ) -> None:
        """``placers``: of each gateway; requests come to them in turn. ``lives``: the replicas that
        can be reached. ``link_rate``: bytes/s between two."""
        self.loop, self.prompts, self.registry, self.placers = loop, prompts, registry, placers
        self.rate_between = link_rate
        self.local_prefill_tokens = local_prefill_tokens
        self.request_s, self.timeout_s = request_s, timeout_s
        self.records: list[Record] = []
        self.left = 0
        """Requests that have not ended."""
        self._lives = lives

    def replica(self, life: Life) -> Replica | None:
        """It, where it can be reached and takes work."""
        found = self._lives.get(life)
        return found if found is not None and not found.draining else None

    def reached(self) -> list[ReplicaRecord]:
        """Decode replicas that are known and can be reached."""
        return list(self.registry.known.decode.values())

    def decode(self, life: Life) -> Replica:
        """One that can be reached."""
        return self._lives[life]

    def submit(self, asked: Asked) -> None:
        """Expect a request at the moment at which it is due."""
        self.left += 1
        self.loop.at(asked.due_s, lambda: Flight(self, asked))


class Flight:
    """One request at the gateway."""

    def __init__(self, front: Front, asked: Asked) -> None:
        self.front = front
        self.record = Record(asked=asked)
        self.prompt: Prompt = front.prompts.of(asked)
        self.placer = front.placers[asked.number % len(front.placers)]
        self.placed: Placed
        self._granules = self.prompt.granules
        self._without: set[Life] = set()
        self._visit: Visit | None = None
        self._over = False
        front.records.append(self.record)
        front.loop.after(front.request_s, self._place)
        front.loop.after(front.timeout_s, self._late)

    def _place(self) -> None:
        if self._over:
            return
        front, known = self.front, self.front.registry.known
        ready = front.reached()
        if self._without:
            ready = [record for record in ready if record.life not in self._without]
        if not ready:
            self._end(DISCONNECTED if self._without else UNAVAILABLE)
            return
        asked = self.record.asked
        ask = Ask(prompt=asked.prompt, max_output=asked.output)
        self.placed = self.placer.place(ready, list(known.prefill.values()), self._granules, ask)
        self.record.predicted_cached = self.placed.predicted_cached
        decode = front.decode(self.placed.decode.life)
        self.record.decode_replica = decode.name
        self._visit = visit = Visit(front, self, decode)
        front.loop.after(MESSAGE_S, visit.begin)

    def first_token(self) -> None:
        """It is on its way to the client; prefill is done with the request."""
        self.record.first_s = self.front.loop.now() + MESSAGE_S
        self.placer.first_token(self.placed)

    def ended(self) -> None:
        """Its last token is on its way."""
        if not self._over:
            self.placer.finish(self.placed, worked=True, prefilled_on=self.record.prefill_replica)
            self._end()

    def failed(self, *, certain: bool) -> None:
        """Its decode replica is dead (``certain``) or takes no more work: another one may do it, if
        the client has seen nothing."""
        if self._over:
            return
        life = self.placed.decode.life
        self.placer.failed(life, certain=certain)
        self.placer.finish(self.placed, worked=False)
        self._without.add(life)
        if self.record.first_s is not None or len(self._without) >= MAX_ATTEMPTS:
            self._end(DISCONNECTED)
            return
        self.record.fallbacks.append("decode_retry")
        self._place()

    def _late(self) -> None:
        if self._over:
            return
        if self._visit is not None:
            self._visit.leave()
            self.placer.finish(self.placed, worked=False)
        self._end(TIMEOUT)

    def _end(self, error: str = "") -> None:
        self._over = True
        self.prompt, self._granules, self._visit = _NONE, [], None
        self.record.error = error
        self.record.ended_s = self.front.loop.now() + MESSAGE_S
        self.front.left -= 1
