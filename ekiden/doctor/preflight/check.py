"""One thing that was looked at before serving, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

SCHEMA = "ekiden.preflight/1"
"""Changes when a field's meaning does; fields are only ever added under one schema."""


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It will serve, and not as it could."""
    FAILURE = "failure"
    """It will not serve, or not right."""
    UNSEEN = "not looked at"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the page."""

    name: str
    verdict: Verdict
    seen: str
    remedy: str = ""


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """All of them: what ``--json`` prints."""

    schema: str = SCHEMA
    version: str
    checks: Sequence[Check]

    @property
    def failed(self) -> bool:
        return any(check.verdict is Verdict.FAILURE for check in self.checks)


def ok(name: str, seen: str) -> Check:
    return Check(name=name, verdict=Verdict.OK, seen=seen)


def warning(name: str, seen: str, remedy: str) -> Check:
    return Check(name=name, verdict=Verdict.WARNING, seen=seen, remedy=remedy)


def failure(name: str, seen: str, remedy: str) -> Check:
    return Check(name=name, verdict=Verdict.FAILURE, seen=seen, remedy=remedy)


def unseen(name: str, why: str, remedy: str = "") -> Check:
    return Check(name=name, verdict=Verdict.UNSEEN, seen=why, remedy=remedy)
