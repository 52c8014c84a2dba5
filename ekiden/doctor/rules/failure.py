"""R49: one rank went, and took its replica along."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.doctor.evidence import Evidence, Replica, Situation
from ekiden.doctor.finding import Cause
from ekiden.doctor.rules.words import listed


def lost_replicas(evidence: Evidence) -> Iterator[Cause]:
    for situation in evidence.situations:
        for replica in situation.replicas:
            if replica.lost:
                yield _lost(situation, replica)


def _lost(situation: Situation, replica: Replica) -> Cause:
    pool = situation.of(replica.role, replica.model)
    left = [other for other in pool if not other.lost]
    errors = situation.answers.errors if situation.answers else {}
    answered = listed(f"{count} x {kind}" for kind, count in errors.items())
    return Cause(
        what=f"{replica.id} is {replica.lost}: its {replica.ranks} rank"
        f"{'s are' if replica.ranks > 1 else ' is'} one failure domain",
        seen=f"{len(left)} of {len(pool)} {replica.role} replicas are left"
        f"{f', errors: {answered}' if answered else ''} ({situation.name})",
        remedy=f"start it again, and read the end of its log; {_smaller(replica)}",
        # It is seen, not inferred; that a whole pool is gone leaves no other explanation.
        confidence=0.9 if left else 1.0,
    )


def _smaller(replica: Replica) -> str:
    if replica.tp > 1:
        return f"-tp {replica.tp // 2} and twice as many replicas lose half as much at once"
    return f"a second replica of the pool (`ekiden serve {replica.role}`) goes on without it"
