"""The hand-offs of one pair inside one process: what decode_svc and prefill_svc say to each other.

For each request, as those services have it:

    add_handoff -> Ready -> reserve, both sessions opened -> chunks move while others compute
    -> PrefillDone: the hand-off token -> SealedOut: the seal -> Arrived: adopt -> decode

All requests are in flight at once. What has arrived is compared to the bit before it is adopted.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ekiden.core.clock import Clock
from ekiden.engine.engine import EngineOutput, PrefillDone, Ready
from kv_transfer.session import Arrived, Drained, Failed, SealedOut, SessionEvent

from .compare import whole_cache
from .errand import Errand
from .inline import InlineReplica
from .judge import check_kv
from .outcome import CellFailed, Outcome

WAIT_S = 0.2
"""At most, for a port to say something, before deadlines are looked at again."""


class Exchange:
    """The errands between two replicas, driven from one thread until all are over."""

    def __init__(
        self, prefill: InlineReplica, decode: InlineReplica, outcome: Outcome, clock: Clock
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._outcome = outcome
        self._clock = clock
        self._errands: dict[str, Errand] = {}
        self._later: list[Errand] = []
        self._no_room: list[Errand] = []

    def run(self, errands: list[Errand], deadline: float) -> None:
        """Carry all of them through.

        Raises:
            CellFailed: they are not over at ``deadline``, a session failed, bytes differ, or
                something is still held at the end.
        """
        for errand in errands:
            self._errands[errand.request.request_id] = errand
            self._set_out(errand)
        while not all(errand.over for errand in errands):
            if self._clock.now() > deadline:
                raise CellFailed("hung", f"not done in time: {self._standing()}")
            self._round()
        for replica in (self._prefill, self._decode):
            if leak := replica.leaks():
                raise CellFailed("failed", leak)

    def _set_out(self, errand: Errand) -> None:
        before = next((e for e in self._errands.values() if e.name == errand.after), None)
        if before is not None and not before.adopted:
            self._later.append(errand)
            return
        request = msgspec.structs.replace(errand.request, salt=errand.prefill_salt)
        self._prefill.engine.add_handoff(request)

    def _round(self) -> None:
        bell = self._prefill.bell
        bell.clear()
        moved = False
        for replica in (self._prefill, self._decode):
            output, events = replica.turn()
            moved = moved or bool(output) or bool(events)
            if replica is self._prefill:
                self._on_prefill(output)
            else:
                self._on_decode(output)
            for event in events:
                self._on_session(event)
        if not moved and not self._prefill.engine.in_flight and not self._decode.engine.in_flight:
            bell.wait(WAIT_S)

    def _on_prefill(self, output: EngineOutput) -> None:
        for delta in output.deltas:
            self._errands[delta.request_id].first.append(delta)
        for event in output.events:
            errand = self._errands[event.request_id]
            if isinstance(event, Ready):
                self._reserve(errand)
            elif isinstance(event, PrefillDone):
                self._computed(errand)

    def _reserve(self, errand: Errand) -> None:
        """Decode's blocks and both sessions; later if decode has no room."""
        reservation = self._decode.engine.reserve(errand.request)
        if reservation is None:
            self._no_room.append(errand)
            return
        size, end = self._decode.me.kv.block_size, len(errand.request.prompt)
        if reservation.held_tokens != errand.shares // size * size:
            raise CellFailed(
                "failed",
                f"prompt {errand.name}: decode holds {reservation.held_tokens} tokens of it "
                f"already, of {errand.shares} that it was given before",
            )
        errand.reservation = reservation
        errand.receive, offer = self._decode.receiving.open(
            errand.name,
            self._prefill.me,
            reservation.held_tokens,
            end,
            reservation.blocks,
            self._prefill.wire,
        )
        errand.send = self._prefill.sending.open(offer, self._decode.me)
        self._prefill.engine.open_session(errand.request.request_id, errand.send)

    def _computed(self, errand: Errand) -> None:
        """Prefill has the whole prompt: keep a copy of its KV, pass the hand-off token on."""
        blocks = self._prefill.sent_blocks(errand.send)
        errand.source = whole_cache(self._prefill.layout, self._prefill.kv(blocks))
        errand.computed = True
        self._decode.engine.hand_off(errand.request.request_id, errand.first)
        if errand.seal:
            self._decode.receiving.sealed(errand.receive, errand.seal)
        self._let_go(errand)

    def _let_go(self, errand: Errand) -> None:
        if errand.computed and errand.sent:
            self._prefill.engine.let_go(errand.request.request_id)
            self._prefill.forget(errand.send)

    def _on_decode(self, output: EngineOutput) -> None:
        for delta in output.deltas:
            self._errands[delta.request_id].record.add(delta)
        for finished in output.finished:
            self._errands[finished.request_id].finished = True
        if output.room:
            waiting, self._no_room = self._no_room, []
            for errand in waiting:
                self._reserve(errand)

    def _on_session(self, event: SessionEvent) -> None:
        """Session numbers are odd on decode and even on prefill."""
        errand = next(e for e in self._errands.values() if event.session in (e.receive, e.send))
        if isinstance(event, Failed):
            raise CellFailed("failed", f"prompt {errand.name}, {event.state}: {event.reason}")
        if isinstance(event, SealedOut):
            errand.seal = event.seal
            if errand.computed:
                self._decode.receiving.sealed(errand.receive, event.seal)
        elif isinstance(event, Arrived):
            self._arrived(errand, event)
        elif isinstance(event, Drained):
            self._drained(errand, event.session)

    def _arrived(self, errand: Errand, event: Arrived) -> None:
        self._check_bytes(errand, event.bytes)
        self._check_kv(errand)
        self.adopt(errand)
        errand.adopted = True
        later, self._later = self._later, []
        for other in later:
            self._set_out(other)

    def adopt(self, errand: Errand) -> None:
        """Let decode go on from what has arrived."""
        self._decode.engine.adopt(errand.request.request_id)

    def _check_bytes(self, errand: Errand, moved: int) -> None:
        held = errand.held.held_tokens
        rows = sum(r.num_heads * r.num_layers for r in self._decode.layout.ranks) * 2
        expected = (len(errand.request.prompt) - held) * rows * self._prefill.layout.row_bytes
        if moved != expected:
            raise CellFailed(
                "failed", f"prompt {errand.name}: {moved} bytes moved instead of {expected}"
            )
        self._outcome.kv_bytes += moved

    def _check_kv(self, errand: Errand) -> None:
        """What moved is this prompt's; what decode held before is that of the one it shares."""
        held, source = errand.held.held_tokens, errand.kv
        if held:
            before = next(e for e in self._errands.values() if e.name == errand.after)
            source = np.concatenate((before.kv[:, :, :held], source[:, :, held:]), axis=2)
        target = self._decode.kv(errand.held.blocks)
        check_kv(
            errand.name,
            (self._prefill.layout, source),
            (self._decode.layout, target),
            len(errand.request.prompt),
            self._outcome,
        )

    def _drained(self, errand: Errand, session: int) -> None:
        if session == errand.send:
            errand.sent = True
            self._let_go(errand)
        else:
            errand.received = True
            self._decode.engine.writer_done(errand.held.key)

    def _standing(self) -> str:
        late = [e for e in self._errands.values() if not e.over]
        return ", ".join(f"prompt {errand.name} {errand.state}" for errand in late)
