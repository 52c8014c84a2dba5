"""R54: a quantised model answers otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import Evidence
from ekiden.doctor.finding import Cause, confidence
from ekiden.doctor.rules.words import share


def other_answers(evidence: Evidence) -> Iterator[Cause]:
    found = evidence.same_prompts
    if found is None or not found.asked:
        return
    other = 1 - found.equal / found.asked
    if other > 1 - at.SAME_TOKENS:
        yield Cause(
            what="the method does not suit the model",
            seen=f"after {found.asked} equal prompts the most likely token is that of "
            f"{found.against} {share(1 - other)} of the time",
            remedy="-q int8 in place of int4 or fp8, a checkpoint that was quantised with "
            "calibration (AWQ, GPTQ), or --kv-cache-dtype int8 alone; it keeps the ends wide",
            confidence=confidence(other, 1 - at.SAME_TOKENS, found.asked, at.ENOUGH_PROMPTS),
        )
