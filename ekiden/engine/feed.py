"""What a rank has been told to do, in order, and the tokens that steps planned ahead go on from.

A step may be planned before the one in front of it has ended: all that its decode rows lack then
is the token that is being sampled. Such a chunk names the step that samples it (``Chunk.after``).
The sampling rank knows the token as soon as it has drawn it; the first stage's ranks, which embed
it, are told by the driver; no other rank needs it. A rank takes its work in the order it was
told, so a step that waits for tokens holds back what comes after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from ekiden.core.errors import InvariantBroken
from ekiden.engine.history import followed
from ekiden.engine.plan import Chunk, Sampled, StepPlan

KEPT_STEPS = 64
"""Steps whose tokens are remembered; more than any pipeline has in flight."""

MAX_WAITING = 65536
"""Things that may wait behind a step without its tokens."""

Work = StepPlan | bytes
"""A step, or a message for the KV port."""


class Feed:
    """One rank's work. Used from one thread."""

    def __init__(self, *, needs_tokens: bool) -> None:
        """``needs_tokens``: the rank embeds or samples; on others a token's place is enough."""
        self._needs_tokens = needs_tokens
        self._work: deque[Work] = deque()
        self._tokens: dict[int, dict[int, int]] = {}

    def put(self, work: Work) -> None:
        """Add what the rank is told to do.

        Raises:
            InvariantBroken: MAX_WAITING things wait already.
        """
        if len(self._work) >= MAX_WAITING:
            raise InvariantBroken(f"{MAX_WAITING} things wait behind a step that lacks its tokens")
        self._work.append(work)

    def tell(self, step: int, tokens: Mapping[int, int]) -> None:
        """``tokens`` (by sequence) were sampled in ``step``. Telling it twice is harmless."""
        self._tokens[step] = dict(tokens)
        while len(self._tokens) > KEPT_STEPS:
            del self._tokens[next(iter(self._tokens))]

    @property
    def ready(self) -> bool:
        """Whether ``take`` has something to give."""
        return bool(self._work) and (
            not isinstance(self._work[0], StepPlan) or self._knows(self._work[0])
        )

    def take(self) -> Work:
        """The next thing to do, a step with its tokens filled in. Only when ``ready``.

        Raises:
            InvariantBroken: a step goes on from a token that was not sampled.
        """
        work = self._work.popleft()
        return self.fill(work) if isinstance(work, StepPlan) else work

    def _knows(self, plan: StepPlan) -> bool:
        return not self._needs_tokens or all(
            chunk.after in self._tokens for chunk in plan.chunks if chunk.after
        )

    def fill(self, plan: StepPlan) -> StepPlan:
        """``plan`` with every token that it goes on from in its place."""
        if not self._needs_tokens or not any(chunk.after for chunk in plan.chunks):
            return plan
        chunks = tuple(self._filled(chunk) if chunk.after else chunk for chunk in plan.chunks)
        return msgspec.structs.replace(plan, chunks=chunks)

    def _filled(self, chunk: Chunk) -> Chunk:
        token = self._tokens.get(chunk.after, {}).get(chunk.sequence)
        if token is None:
            raise InvariantBroken(
                f"sequence {chunk.sequence} goes on from step {chunk.after}, which sampled nothing "
                "for it"
            )
        samples = tuple(followed(spec, token) for spec in chunk.samples)
        return msgspec.structs.replace(chunk, tokens=(token,), samples=samples)


def tokens_of(sampled: Iterable[Sampled]) -> dict[int, int]:
    """Token by sequence: the last one where there are several, which nobody goes on from."""
    return {sample.sequence: sample.token for sample in sampled}
