"""A cause that several symptoms share: more processes than cores."""

from __future__ import annotations

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import Host
from ekiden.doctor.finding import Cause


def crowded(host: Host | None) -> Cause | None:
    """Its confidence is 1: the caller weighs it by the symptom's."""
    if host is None or not host.replicas or host.load / host.cores <= at.CROWDED:
        return None
    here = len(host.replicas)
    return Cause(
        what="more processes want this host's cores than it has",
        seen=f"load {host.load:.1f} on {host.cores} cores, {here} replica{'s' * (here > 1)} here",
        remedy="fewer replicas or ranks on this host, a lower --threads-per-rank, or "
        "--core-sharing",
        confidence=1.0,
    )
