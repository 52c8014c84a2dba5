"""What doctor says: symptoms found, each with its causes, and what it could not look at."""

from __future__ import annotations

import math

import msgspec

from ekiden.doctor.evidence import Evidence, Situation

SCHEMA = "ekiden.doctor/1"
"""Changes when a field's meaning does; fields are only ever added under one schema."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One explanation of a symptom."""

    what: str
    seen: str
    """The figures, and in which situation."""
    remedy: str
    confidence: float
    """0 to 1: ``confidence``."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A symptom that is there; the likeliest cause first."""

    requirement: str
    """As ``R53``."""
    symptom: str
    causes: tuple[Cause, ...]

    @property
    def confidence(self) -> float:
        return self.causes[0].confidence


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """A symptom that could not be looked for."""

    requirement: str
    symptom: str
    reason: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one set of evidence: what ``--json`` prints."""

    schema: str = SCHEMA
    version: str
    findings: tuple[Finding, ...]
    clean: tuple[str, ...]
    """Requirements that were looked at with nothing found."""
    unseen: tuple[Unseen, ...]
    evidence: Evidence


def confidence(value: float, threshold: float, seen: float, enough: float) -> float:
    """How sure a cause is whose ``value`` has passed its ``threshold``.

    Half of it is the distance: 0 at the threshold, all at twice the threshold. It counts in full
    once there are ``enough`` observations, and by half with none: 0.25 to 1 in all.
    """
    distance = min(1.0, max(0.0, math.log2(value / threshold))) if threshold > 0 else 1.0
    amount = min(1.0, seen / enough)
    return round((0.5 + 0.5 * distance) * (0.5 + 0.5 * amount), 2)


def weighed(cause: Cause, by: float, seen: str = "", where: Situation | None = None) -> Cause:
    """``cause`` of a symptom that is ``by`` sure; ``seen`` of the symptom goes before its own."""
    told = "; ".join(filter(None, (seen, cause.seen))) + (f" ({where.name})" if where else "")
    return msgspec.structs.replace(cause, seen=told, confidence=round(by * cause.confidence, 2))
