"""A diagnosis as a page for people."""

from __future__ import annotations

import textwrap

from ekiden.doctor.evidence import Answers, Situation
from ekiden.doctor.finding import Cause, Diagnosis, Finding

WIDTH = 98
_INDENT = 10


def page(found: Diagnosis) -> str:
    """Findings, then what is clean, then what could not be looked at."""
    failing = [_wrapped("failed", _failing(*one)) for one in found.evidence.failing]
    parts = [_head(found), *failing]
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
    none = "requests fail, else nothing found" if found.evidence.failing else "nothing found"
    told = f"{count} finding{'s' * (count != 1)}" if count else none
    return f"ekiden doctor   {told}   ({looked or 'no deployment watched'})"


def _failing(situation: Situation, answers: Answers) -> str:
    """What was measured of a service that does not answer: no question of its speed."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in answers.errors.items())
    whole = answers.count + answers.failed
    return (
        f"{situation.name}: {answers.failed} of {whole} requests failed ({kinds}). What is below "
        "is of the others; the logs of gateway and replicas say why"
    )


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
