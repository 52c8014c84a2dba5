"""The two state machines of a hand-off, one for each side. Pure: time comes in, events go out.

Receiving (decode)::

    WAITING ──bytes──▶ MOVING ──every rank done──▶ DELIVERED ──seal──▶ done: Arrived, Drained
       │                 └──seal──▶ SEALED ──every rank done──────────▶ done: Arrived, Drained
       └── any state: deadline, cancel, a broken rank, a seal that differs ──▶ Failed, DRAINING

Sending (prefill)::

    WAITING ──chunk──▶ MOVING ──all computed──▶ SENDING ──every rank done──▶ SealedOut, Drained

DRAINING waits until every rank of this side has said its last word, which means that its port
never touches the pool for this session again; then comes Drained. A rank that says nothing leaves
the session STUCK: listed, its blocks in quarantine, never freed.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kv_transfer.messages import (
    Aborted,
    Broken,
    Finished,
    PairTally,
    PortEvent,
    Progress,
    Seal,
    SessionOffer,
    TransferLimits,
    encode,
)


class State(StrEnum):
    WAITING = "waiting for the first bytes"
    MOVING = "receiving or sending while prefill computes"
    DELIVERED = "waiting for the seal"
    SEALED = "waiting for the last bytes"
    SENDING = "sending the last bytes"
    DRAINING = "draining"
    STUCK = "stuck in draining"
    DONE = "done"


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """Decode: every byte is in the pool and the seal agrees. ``seconds``: first byte to last."""

    session: int
    bytes: int
    seconds: float
    wire: str


class SealedOut(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill: everything was handed to the wire; ``seal`` goes to decode."""

    session: int
    seal: bytes
    bytes: int
    seconds: float


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The session did not work out. ``state`` is where it was, ``peer`` the other replica."""

    session: int
    reason: str
    state: str
    peer: str


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of every session: no port reads or writes its blocks any more."""

    session: int


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is about. ``ranks`` are those of this side."""

    session: int
    peer: str
    ranks: tuple[int, ...]
    expected_bytes: int
    limits: TransferLimits


SessionEvent = Arrived | SealedOut | Failed | Drained


class Session:
    """What both sides share: the ranks' last words, deadlines, failing and draining.

    ``events`` and ``aborts`` (ranks that must be told to stop) are taken by the owner.
    """

    def __init__(self, terms: Terms, now: float) -> None:
        self.session = terms.session
        self.peer = terms.peer
        self.state = State.WAITING
        self.events: list[SessionEvent] = []
        self.aborts: list[int] = []
        self._open_ranks = set(terms.ranks)
        self._finished: dict[int, Finished] = {}
        self._progress: dict[int, Progress] = {}
        self._expected_bytes = terms.expected_bytes
        self._limits = terms.limits
        self._seen_bytes = 0
        self._deadline: float | None = now + terms.limits.first_bytes_s

    @property
    def deadline(self) -> float | None:
        """When ``tick`` must be called at the latest; None when stuck or done."""
        return self._deadline

    @property
    def failed(self) -> bool:
        return self.state in (State.DRAINING, State.STUCK)

    @property
    def moved_bytes(self) -> int:
        finished = sum(p.bytes for f in self._finished.values() for p in f.pairs)
        moving = sum(p.bytes for r, p in self._progress.items() if r not in self._finished)
        return finished + moving

    def on_rank(self, rank: int, event: PortEvent, now: float) -> None:
        """A word of one rank's port. A second last word of the same rank changes nothing."""
        if rank not in self._open_ranks:
            return
        if isinstance(event, Progress):
            self._progress[rank] = event
        else:
            self._open_ranks.discard(rank)
        if isinstance(event, Finished):
            self._finished[rank] = event
        if self.failed:
            self._try_drained()
        elif isinstance(event, Broken):
            self.fail(f"rank {rank}: {event.reason}", now)
        elif isinstance(event, Aborted):
            self.fail(f"rank {rank} gave the session up", now)
        else:
            self._advance(now)

    def fail(self, reason: str, now: float) -> None:
        """Give up, from any state; does nothing once failed or done."""
        if self.failed or self.state is State.DONE:
            return
        self.events.append(
            Failed(session=self.session, reason=reason, state=self.state, peer=self.peer)
        )
        self.aborts.extend(sorted(self._open_ranks))
        self._enter(State.DRAINING, now + self._limits.drain_s)
        self._try_drained()

    def tick(self, now: float) -> None:
        """Act on a deadline that has passed."""
        if self._deadline is None or now < self._deadline:
            return
        if self.state is State.DRAINING:
            self._enter(State.STUCK, None)
            return
        self.fail(
            f"nothing came for too long while {self.state}: {self.moved_bytes} of "
            f"{self._expected_bytes} bytes moved, peer {self.peer}, own ranks still open: "
            f"{sorted(self._open_ranks)}",
            now,
        )

    def stuck(self) -> str | None:
        """One sentence about the ranks that never answered an abort, else None."""
        if self.state is not State.STUCK:
            return None
        return (
            f"session {self.session} with {self.peer}: ranks {sorted(self._open_ranks)} did not "
            f"answer an abort within {self._limits.drain_s:g} s; its blocks stay in quarantine"
        )

    def _advance(self, now: float) -> None:
        raise NotImplementedError

    def _enter(self, state: State, deadline: float | None) -> None:
        self.state, self._deadline = state, deadline

    def _await_bytes(self, state: State, now: float) -> None:
        """Nothing but bytes is outstanding: as long as they move, the deadline moves with them."""
        moved = self.moved_bytes
        if self.state is state and moved == self._seen_bytes:
            return
        self._seen_bytes = moved
        # What has moved is paid for afterwards where a rate is limited, the last bytes too.
        unseen = min(self._expected_bytes, self._limits.unseen_bytes)
        self._enter(state, now + self._limits.base_s + unseen / self._limits.min_bytes_per_s)

    def _try_drained(self) -> None:
        if not self._open_ranks:
            self._enter(State.DONE, None)
            self.events.append(Drained(session=self.session))

    def _tallies(self) -> tuple[PairTally, ...]:
        return tuple(sorted(pair for f in self._finished.values() for pair in f.pairs))

    def _seconds(self) -> float:
        return max((f.seconds for f in self._finished.values()), default=0.0)


class ReceiveSession(Session):
    """Decode's side. Arrived only if every rank is done and the seal says the same."""

    _seal: tuple[PairTally, ...] | None = None

    def seal(self, pairs: tuple[PairTally, ...], now: float) -> None:
        """Prefill says what it sent."""
        if self._seal is not None or self.failed:
            return
        self._seal = tuple(sorted(pairs))
        self._advance(now)

    def _advance(self, now: float) -> None:
        delivered, sealed = not self._open_ranks, self._seal is not None
        if delivered and sealed:
            self._finish(now)
        elif sealed:
            self._await_bytes(State.SEALED, now)
        elif delivered:
            self._enter(State.DELIVERED, now + self._limits.base_s)
        elif self._progress or self._finished:
            self._enter(State.MOVING, now + self._limits.stall_s)

    def _finish(self, now: float) -> None:
        received = self._tallies()
        if received != self._seal:
            self.fail(f"{self.peer} sealed {self._seal} but received was {received}", now)
            return
        wires = sorted({f.wire for f in self._finished.values()})
        self.events.append(
            Arrived(
                session=self.session,
                bytes=self.moved_bytes,
                seconds=self._seconds(),
                wire=", ".join(wires),
            )
        )
        self._try_drained()


class SendSession(Session):
    """Prefill's side: done when every rank has sent what ``offer`` asks for."""

    def __init__(self, terms: Terms, offer: SessionOffer, now: float) -> None:
        super().__init__(terms, now)
        self.offer = offer
        if not terms.ranks:
            self._finish()

    def _advance(self, now: float) -> None:
        if not self._open_ranks:
            self._finish()
        elif all(self._computed(rank) >= self.offer.end for rank in self._open_ranks):
            self._await_bytes(State.SENDING, now)
        else:
            self._enter(State.MOVING, now + self._limits.stall_s)

    def _computed(self, rank: int) -> int:
        progress = self._progress.get(rank)
        return progress.computed if progress else 0

    def _finish(self) -> None:
        seal = Seal(
            nonce=self.offer.nonce,
            prefill_epoch=self.offer.prefill_epoch,
            decode_epoch=self.offer.decode_epoch,
            pairs=self._tallies(),
        )
        self.events.append(
            SealedOut(
                session=self.session,
                seal=encode(seal),
                bytes=self.moved_bytes,
                seconds=self._seconds(),
            )
        )
        self._try_drained()
