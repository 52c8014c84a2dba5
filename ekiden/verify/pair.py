"""One pair of the in-process grid, from the first meeting to the verdict."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from ekiden.core.clock import Clock
from ekiden.core.errors import EkidenError

from .compare import Bound, Reference
from .errand import Errand, make_errand
from .exchange import Exchange
from .inline import InlineReplica
from .judge import Verdict
from .outcome import CellFailed, Outcome
from .script import SHARED, Script

log = logging.getLogger(__name__)


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a pair has to do."""

    script: Script
    names: Sequence[str]
    references: Mapping[str, Reference]
    bound: Bound
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
    except Exception as error:  # one pair's trouble must not cost the others
        log.exception("%s -> %s", prefill.me.replica_id, decode.me.replica_id)
        outcome.status, outcome.detail = "failed", repr(error)
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
        same_kv = prefill.layout.dtype == decode.layout.dtype
        self._verdicts = {
            name: Verdict(name, work.references[name], work.bound, outcome, same_kv=same_kv)
            for name in work.names
        }

    def run(self) -> None:
        errands = [self._first(name) for name in self._work.names]
        self._outcome.prompts = len(errands)
        while errands:
            exchange = self._exchange(self._prefill, self._decode, self._outcome, self._clock)
            exchange.run(errands, self._deadline)
            errands = [
                self._behind(errand)
                for errand in errands
                if self._verdicts[errand.name].take(errand.record)
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

    def _behind(self, errand: Errand) -> Errand:
        """Go on with the truth's token where the answer left it at a tie."""
        reference = self._work.references[errand.name]
        start = self._verdicts[errand.name].start
        salt = f"{self._work.salt}/behind {start}"
        return make_errand(
            errand.name,
            reference.prompt + reference.tokens[:start],
            model=self._prefill.me.model,
            max_tokens=len(reference.tokens) - start,
            salt=salt,
            prefill_salt=salt,
        )
