"""One pair of the in-process grid, from the first meeting to the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ekiden.core.clock import Clock
from ekiden.core.errors import EkidenError

from .compare import Reference
from .errand import Errand, make_errand
from .exchange import Exchange
from .inline import InlineReplica
from .judge import bound_of, check_output
from .outcome import CellFailed, Outcome
from .script import SHARED, Script


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a pair has to do."""

    script: Script
    names: Sequence[str]
    references: Mapping[str, Reference]
    salt: str
    """New for every pair, so that decode finds nothing of an earlier one."""
    timeout_s: float


def run_pair(
    prefill: InlineReplica,
    decode: InlineReplica,
    work: Work,
    clock: Clock,
    exchange: type[Exchange] = Exchange,
) -> Outcome:
    """Hand every prompt over and compare what comes of it with the truth. Never raises."""
    outcome = Outcome()
    try:
        _PairRun(prefill, decode, work, clock, exchange, outcome).run()
    except CellFailed as failure:
        outcome.status, outcome.detail = failure.status, failure.detail
    except EkidenError as error:
        outcome.status, outcome.detail = "failed", error.message
    return outcome


class _PairRun:
    """Rounds of errands: all prompts, then those that go on behind a tie."""

    def __init__(
        self,
        prefill: InlineReplica,
        decode: InlineReplica,
        work: Work,
        clock: Clock,
        exchange: type[Exchange],
        outcome: Outcome,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._work = work
        self._clock = clock
        self._exchange = exchange
        self._outcome = outcome
        self._deadline = clock.now() + work.timeout_s
        self._bound = bound_of(prefill.layout.dtype, decode.layout.dtype)

    def run(self) -> None:
        errands = [self._first(name) for name in self._work.names]
        starts = dict.fromkeys(self._work.names, 0)
        self._outcome.prompts = len(errands)
        while errands:
            exchange = self._exchange(self._prefill, self._decode, self._outcome, self._clock)
            exchange.run(errands, self._deadline)
            errands = [
                again for errand in errands if (again := self._judged(errand, starts)) is not None
            ]

    def _first(self, name: str) -> Errand:
        """``long`` and ``fork`` are computed anew for every pair, the others may be cached."""
        fresh = name in ("long", "fork")
        return make_errand(
            name,
            self._work.script.prompts[name],
            model=self._prefill.me.model,
            max_tokens=self._work.script.max_tokens,
            salt=self._work.salt,
            prefill_salt=self._work.salt if fresh else "kept",
            after="long" if name == "fork" else "",
            shares=SHARED if name == "fork" else 0,
        )

    def _judged(self, errand: Errand, starts: dict[str, int]) -> Errand | None:
        """What is left to do for a prompt whose answer left the truth at a tie."""
        name, record, start = errand.name, errand.record, starts[errand.name]
        reference = self._work.references[name]
        before = self._outcome.equal_tokens
        difference = check_output(
            name, reference, record.tokens, record.tops, start, self._bound, self._outcome
        )
        self._outcome.tokens += self._outcome.equal_tokens - before + (difference is not None)
        if difference is None:
            return None
        starts[name] = difference.position + 1
        return self._behind(errand, reference, starts[name])

    def _behind(self, errand: Errand, reference: Reference, start: int) -> Errand | None:
        """Go on with the truth's token. Not between two KV dtypes: what decode's own tokens left
        in the truth's cache was not converted, what prefill would send now is."""
        same = self._prefill.layout.dtype == self._decode.layout.dtype
        left = len(reference.tokens) - start
        if not (same and left):
            return None
        salt = f"{self._work.salt}/behind {start}"
        return make_errand(
            errand.name,
            reference.prompt + reference.tokens[:start],
            model=self._prefill.me.model,
            max_tokens=left,
            salt=salt,
            prefill_salt=salt,
        )
