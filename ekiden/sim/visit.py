"""One request at one decode replica, as the decode service lives it.

1. look the prefix cache up; a short rest is prefilled here
2. else ask the prefill candidates in order, each in one ``Handoff``
3. none worked: prefill here
4. the hand-off token was seen but its KV never came: recompute from what the client has seen
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ekiden.engine.scheduling.sequence import Sequence
from ekiden.sim.asked import Asked
from ekiden.sim.handoff import Handoff
from ekiden.sim.loop import Loop
from ekiden.sim.prompts import Prompt
from ekiden.sim.record import Record
from ekiden.sim.replica import Replica

if TYPE_CHECKING:
    from ekiden.sim.front import Flight, Front


class Visit:
    """Hears of the sequence at the decode replica, and tells the gateway."""

    def __init__(self, front: Front, flight: Flight, decode: Replica) -> None:
        self.front, self.flight, self.decode = front, flight, decode
        self.asked: Asked = flight.record.asked
        self.prompt: Prompt = flight.prompt
        self.record: Record = flight.record
        self.loop: Loop = front.loop
        self._candidates = list(flight.placed.prefill)
        self._handoff: Handoff | None = None
        self._sequence: Sequence | None = None
        self._left = False

    def begin(self) -> None:
        if self._left:
            return
        if not self.decode.alive or self.decode.draining:
            self.flight.failed(certain=not self.decode.alive)
            return
        self.decode.callers[self] = None
        rest = self.asked.prompt - self.decode.cached(self.prompt)
        if self._candidates and rest > self.front.local_prefill_tokens:
            self._ask_next()
        else:
            self._compute()

    def leave(self) -> None:
        """The request is given up: nothing of it stays anywhere."""
        self._left = True
        self.decode.callers.pop(self, None)
        if self._handoff is not None:
            self._handoff.leave()
        if self._sequence is not None:
            self.decode.remove(self._sequence)

    def lost(self) -> None:
        """The decode replica is dead."""
        self.leave()
        self.flight.failed(certain=True)

    # Prefill

    def _ask_next(self) -> None:
        """The next candidate that lives, or nobody is left."""
        while self._candidates:
            record = self._candidates.pop(0)
            replica = self.front.replica(record.life)
            if replica is not None:
                self._handoff = Handoff(self, replica)
                self._handoff.begin()
                return
            self.record.fallbacks.append("prefill_retry")
        self.record.fallbacks.append("local_prefill")
        self._compute()

    def handoff_failed(self, handoff: Handoff) -> None:
        """Nothing came of it. What the client has seen binds."""
        if self._left or handoff is not self._handoff:
            return
        self._handoff = None
        if self.record.first_s is None:
            self.record.fallbacks.append("prefill_retry")
            self._ask_next()
        else:
            self.record.fallbacks.append("recompute")
            self._compute(seen=1)

    def hand_off(self, handoff: Handoff) -> None:
        """The first token is here, before its KV."""
        self.record.prefill_replica = handoff.prefill.name
        self._note_sources(handoff)
        self.flight.first_token()
        if self.asked.output == 1:
            self.flight.ended()

    def adopt(self, handoff: Handoff) -> None:
        """The KV is here."""
        assert handoff.target is not None
        self._handoff, self._sequence = None, handoff.target
        if self.asked.output == 1:
            self.leave()
        else:
            self.record.ready_s = self.loop.now()
            self.decode.join(handoff.target)

    def _note_sources(self, handoff: Handoff) -> None:
        assert handoff.target is not None
        record, held = self.record, handoff.target.cached
        record.decode_cache = held
        record.prefill_cache = max(0, handoff.sequence.cached - held)
        record.prefill_computed = self.asked.prompt - held - record.prefill_cache

    def _compute(self, seen: int = 0) -> None:
        """Here, after ``seen`` tokens that the client has."""
        self._sequence = sequence = self.decode.sequence(self.prompt, self.asked.output)
        sequence.tokens += [1] * seen
        self.decode.add(sequence, self)

    # What the decode replica tells

    def ready(self) -> None:
        """Never: only hand-offs are announced."""

    def note_started(self) -> None:
        if self.record.started_s is None:
            self.record.started_s = self.loop.now()

    def started(self) -> None:
        self.note_started()
        assert self._sequence is not None
        if self.record.first_s is None or "recompute" in self.record.fallbacks:
            cached = min(self._sequence.cached, self.asked.prompt)
            self.record.decode_cache = cached
            self.record.prefill_cache = self.record.prefill_computed = 0
            self.record.local_computed = self.asked.prompt - cached

    def computed(self, stop: int) -> None:
        """Its KV stays where it is."""

    def sampled(self) -> None:
        if self.record.ready_s is None:
            self.record.ready_s = self.loop.now()
        if self.record.first_s is None:
            self.flight.first_token()

    def finished(self) -> None:
        self.decode.callers.pop(self, None)
        self.flight.ended()

    def preempted(self) -> None:
        self.record.preemptions += 1
