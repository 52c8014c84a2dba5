"""A diagnosis as a page for people."""

from __future__ import annotations

import textwrap

from ekiden.doctor.evidence import Situation
from ekiden.doctor.finding import Cause, Diagnosis, Finding

WIDTH = 98
_INDENT = 10


def page(found: Diagnosis) -> str:
    """Findings, then what is clean, then what could not be looked at."""
    parts = [_head(found), *(_wrapped("failed", said) for said in failing(found))]
    parts += [_finding(one) for one in found.findings]
    if found.clean:
        parts.append(_wrapped("clean", ", ".join(found.clean)))
    if found.unseen:
        rows = [_wrapped(f"  {u.requirement}", f"{u.symptom}: {u.reason}") for u in found.unseen]
        parts.append("\n".join(("not looked at", *rows)))
    return "\n\n".join(parts)


def _head(found: Diagnosis) -> str:
    looked = "; ".join(map(_looked, found.evidence.situations))
    count = len(found.findings)
    none = "requests fail, else nothing found" if failing(found) else "nothing found"
    told = f"{count} finding{'s' * (count != 1)}" if count else none
    return f"ekiden doctor   {told}   ({looked or 'no deployment watched'})"


MANY_FAILED = 0.01
"""Share of requests from which it is no accident."""


def failing(found: Diagnosis) -> list[str]:
    """What was measured of a service that does not answer: no question of its speed."""
    told = []
    for situation in found.evidence.situations:
        answers = situation.answers
        if answers is None or answers.failed < MANY_FAILED * (answers.count + answers.failed):
            continue
        if answers.failed:
            kinds = ", ".join(f"{kind} {count}" for kind, count in answers.errors.items())
            whole = answers.count + answers.failed
            told.append(
                f"{situation.name}: {answers.failed} of {whole} requests failed ({kinds}). What is "
                "below is of the others; the logs of gateway and replicas say why"
            )
    return told


def _looked(situation: Situation) -> str:
    answers = situation.answers
    if answers is None:
        return situation.name
    failed = f", {answers.failed} failed" if answers.failed else ""
    return f"{situation.name}: {answers.count} answers{failed}"


def _finding(found: Finding) -> str:
    first, *others = found.causes
    lines = [f"{found.requirement}  {found.symptom}   confidence {found.confidence:.2f}"]
    lines += _cause(first)
    for cause in others:
        lines += [_wrapped("  or", f"{cause.what}   confidence {cause.confidence:.2f}")]
        lines += _cause(cause)[1:]
    return "\n".join(lines)


def _cause(cause: Cause) -> list[str]:
    return [
        _wrapped("  cause", cause.what),
        _wrapped("  seen", cause.seen),
        _wrapped("  do", cause.remedy),
    ]


def _wrapped(title: str, text: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=title.ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
