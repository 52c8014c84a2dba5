"""The table of symptoms, and what it makes of evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ekiden import __version__
from ekiden.doctor.evidence import Evidence
from ekiden.doctor.finding import Cause, Diagnosis, Finding, Unseen
from ekiden.doctor.rules.balance import uneven_load
from ekiden.doctor.rules.experts import hot_experts
from ekiden.doctor.rules.failure import lost_replicas
from ekiden.doctor.rules.first_token import late_first_token
from ekiden.doctor.rules.handoff import apart_and_slower
from ekiden.doctor.rules.memory import full_cache
from ekiden.doctor.rules.parallel import idle_stages, slower_with_tp
from ekiden.doctor.rules.quality import other_answers
from ekiden.doctor.rules.scaling import does_not_scale
from ekiden.doctor.rules.tokens import slow_tokens
from ekiden.doctor.rules.use import busy_without_result, starved
from ekiden.doctor.rules.words import listed

Rule = Callable[[Evidence], Iterator[Cause]]
Lack = Callable[[Evidence], str]
"""Why a rule cannot look, in words; empty: it can."""


class Symptom(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    requirement: str
    name: str
    rule: Rule
    lacks: Lack


def _no_experts(evidence: Evidence) -> str:
    """Replicas do not tell of experts, since none serves any yet."""
    if any(situation.experts for situation, _ in evidence.answered):
        return ""
    return (
        "no replica has a mixture of experts, so there is no histogram of routing: give --bench a "
        "result of `ekiden sim --expert-skew S --json`"
    )


def _no_replicas(evidence: Evidence) -> str:
    if any(situation.replicas for situation in evidence.situations):
        return ""
    return _why(evidence, "registry", "no replica tells of itself: give --redis URL")


def _no_work(evidence: Evidence) -> str:
    if any(situation.busy for situation in evidence.situations):
        return ""
    return _no_replicas(evidence) or "replicas had hardly any work: watch while requests are served"


def _no_answers(evidence: Evidence) -> str:
    if any(answers.count for _, answers in evidence.answered):
        return ""
    if kinds := [kind for _, answers in evidence.answered for kind in answers.errors]:
        return f"every request failed ({listed(dict.fromkeys(kinds))}): nothing is known of times"
    return _why(evidence, "gateway", "no request was answered: watch under load, or give --bench")


def _neither(evidence: Evidence) -> str:
    return _no_work(evidence) and _no_answers(evidence)


def _no_watch(evidence: Evidence) -> str:
    """A bench does not tell which replicas were lost."""
    if any(situation.load is None and situation.replicas for situation in evidence.situations):
        return ""
    return _why(evidence, "registry", "no replica was watched: give --redis URL")


def _no_scaling(evidence: Evidence) -> str:
    """A wire that is full is found without; that none is full says little of scaling."""
    sizes = {len(s.of("decode")) for s in evidence.situations if s.load is not None}
    if len(sizes) > 1:
        return ""
    return "give two --bench results with different numbers of decode replicas"


def _not_compared(evidence: Evidence) -> str:
    if evidence.same_prompts is not None:
        return ""
    return _why(evidence, "same prompts", "give --reference-url URL of the unquantised model")


def _why(evidence: Evidence, what: str, otherwise: str) -> str:
    return evidence.missing.get(what, otherwise)


SYMPTOMS = (
    Symptom(requirement="R43", name="fits one device, but more TP is slower",
            rule=slower_with_tp, lacks=_no_work),
    Symptom(requirement="R44", name="TPOT is high or jitters",
            rule=slow_tokens, lacks=_no_answers),
    Symptom(requirement="R45", name="a pipeline with late first tokens",
            rule=idle_stages, lacks=_no_work),
    Symptom(requirement="R46", name="the tail of a mixture of experts is unstable",
            rule=hot_experts, lacks=_no_experts),
    Symptom(requirement="R47", name="long prompts find no memory",
            rule=full_cache, lacks=_neither),
    Symptom(requirement="R48", name="throughput does not scale with replicas",
            rule=does_not_scale, lacks=_no_scaling),
    Symptom(requirement="R49", name="one device lost, all down",
            rule=lost_replicas, lacks=_no_watch),
    Symptom(requirement="R50", name="replicas are loaded unevenly",
            rule=uneven_load, lacks=_no_work),
    Symptom(requirement="R51", name="devices idle, throughput is low",
            rule=starved, lacks=_neither),
    Symptom(requirement="R52", name="devices are busy, throughput is low",
            rule=busy_without_result, lacks=_no_work),
    Symptom(requirement="R53", name="TTFT is high",
            rule=late_first_token, lacks=_no_answers),
    Symptom(requirement="R54", name="quantised, and answers differ",
            rule=other_answers, lacks=_not_compared),
    Symptom(requirement="R55", name="prefill and decode apart are slower",
            rule=apart_and_slower, lacks=_no_answers),
)  # fmt: skip


def diagnose(evidence: Evidence) -> Diagnosis:
    """Every symptom looked for: the surest finding first."""
    findings, clean, unseen = [], [], []
    for symptom in SYMPTOMS:
        if causes := ranked(symptom.rule(evidence)):
            findings.append(
                Finding(requirement=symptom.requirement, symptom=symptom.name, causes=causes)
            )
        elif reason := symptom.lacks(evidence):
            unseen.append(
                Unseen(requirement=symptom.requirement, symptom=symptom.name, reason=reason)
            )
        else:
            clean.append(symptom.requirement)
    return Diagnosis(
        version=__version__,
        findings=tuple(sorted(findings, key=lambda found: -found.confidence)),
        clean=tuple(clean),
        unseen=tuple(unseen),
        evidence=evidence,
    )


def ranked(causes: Iterator[Cause]) -> tuple[Cause, ...]:
    """The likeliest first; of one cause in several situations, the one that shows it best."""
    best: dict[str, Cause] = {}
    for cause in causes:
        known = best.get(cause.what)
        if known is None or cause.confidence > known.confidence:
            best[cause.what] = cause
    return tuple(sorted(best.values(), key=lambda cause: -cause.confidence))
