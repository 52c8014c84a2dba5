"""One sequence of tokens whose KV lies in one block table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Tokens
from enum import Enum, auto
from typing import Protocol

from ekiden.cache.prefix_index import KeyChain, Parent
from ekiden.engine.scheduling.policy import blocks_for

_numbers = itertools.count(1)

Order = tuple[int, int, int]
"""(priority, arrival, choice): smaller goes first and is preempted last."""


class Gate(Enum):
    """Whether a waiting sequence may be scheduled."""

    NONE = auto()
    """A local request: whenever there is room."""
    CLOSED = auto()
    """A hand-off that has not been told to get ready."""
    ANNOUNCED = auto()
    """Told to get ready; its session is not open yet."""
    OPEN = auto()
    """Its session is open: it may run, and its blocks are read by the transfer from now on."""


class Lookup(Protocol):
    """Proposes what follows a sequence; ``ekiden.engine.speculation.PromptLookup`` is one."""

    def propose(self, tokens: Tokens[int], limit: int) -> tuple[int, ...]: ...


class Sequence:
    """Tokens, their KV blocks, and how far they are.

    ``scheduled`` positions have been put into submitted steps, ``computed`` ones into collected
    steps. While a prompt is computed one sequence stands for all its ``choices``; they part when
    their first tokens are known.
    """

    def __init__(
        self,
        *,
        request_id: str,
        order: Order,
        tokens: Tokens[int],
        choices: Tokens[int],
        chain: KeyChain,
        max_tokens: int,
        gate: Gate = Gate.NONE,
    ) -> None:
        """``max_tokens`` is the length, prompt included, that the sequence never passes."""
        self.number = next(_numbers)
        """Its name in plans; no two sequences of a process share one."""
        self.request_id = request_id
        self.order = order
        self.tokens = list(tokens)
        self.choices = tuple(choices)
        self.chain = chain
        self.max_tokens = max_tokens
        self.gate = gate
        self.session = 0
        self.blocks: list[int] = []
        self.cached = 0
        """Positions found in the prefix cache when it was last admitted."""
        self.scheduled = 0
        self.computed = 0
        self.in_flight = 0
        """Submitted steps that have not been collected and use its blocks."""
        self.awaited = 0
        """The last step that samples for it; in flight, if all known tokens are in steps."""
        self.preemptions = 0
        self.dead = False
        """Nobody wants its tokens any more; it lives on until its last step is collected."""
        self.copy: tuple[int, int] | None = None
        """(source, target) blocks to copy before its next step; it owns a share of both."""
        self.draft: tuple[int, ...] = ()
        """Tokens proposed to follow the known ones; a step may take as many as it has room for."""
        self.lookup: Lookup | None = None
        """Where its proposals come from, once it has had any."""
        self.published = 0
        """Whole blocks offered to the prefix index."""
        self.parent: Parent | None = chain.root
        """What the next published block follows; None: nothing more can be published."""

    @property
    def remaining(self) -> int:
        """Known tokens that are in no step yet."""
        return len(self.tokens) - self.scheduled

    @property
    def goes_on(self) -> bool:
        """Whether it can go on after the token that is being sampled. It may end by it still."""
        return not self.pinned and len(self.tokens) + 1 < self.max_tokens

    @property
    def pinned(self) -> bool:
        """A transfer reads its blocks, so they cannot be taken from it."""
        return self.gate is not Gate.NONE

    @property
    def seats(self) -> int:
        """Rows it may come to need in a step. A hand-off's choices are not decoded here."""
        return 1 if self.pinned else len(self.choices)

    def growth_left(self) -> int:
        """Blocks that it may still ask for."""
        if self.pinned:
            return 0
        return max(0, blocks_for(self.max_tokens, self.chain.block_size) - len(self.blocks))
