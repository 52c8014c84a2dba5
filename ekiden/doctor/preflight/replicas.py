"""Replicas that are registered: can they be reached, are they alike, what does KV take?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ekiden import __version__
from ekiden.doctor.preflight.check import Check, failure, ok, warning
from ekiden.doctor.rules.words import listed, size
from ekiden.registry.record import ReplicaRecord

SLOW_WIRE = 1e8
"""Bytes a second: a hundredth of what shared memory does; a hand-off would be all transfer."""

Records = Sequence[ReplicaRecord]


def reached(records: Records, trouble: Mapping[str, str]) -> Check:
    """``trouble``: by address, why a replica did not answer; empty: it did."""
    silent = [
        f"{record.id} at {record.address}: {trouble[record.address]}"
        for record in records
        if trouble.get(record.address)
    ]
    if silent:
        return failure(
            "replicas", listed(silent),
            "a route and an open port between the machines, the same EKIDEN_SECRET, and an "
            "--advertise that can be dialled from here",
        )  # fmt: skip
    counts = {role: sum(r.role == role for r in records) for role in ("prefill", "decode")}
    told = listed(f"{count} {role}" for role, count in counts.items() if count)
    return ok("replicas", f"{told or 'none is registered'}{', all answer' if told else ''}")


def alike(records: Records, model: str, ours: Mapping[str, str]) -> list[Check]:
    """Whether all replicas of ``model`` are of one version, one checkpoint, one tokenizer.

    ``ours``: fingerprints of the replica that is to be, by field of the record; may be empty.
    """
    same = [record for record in records if record.model == model or not model]
    checks = [_agree("versions", same, lambda r: r.version, __version__, "the same ekiden on all")]
    for name, field in (("model", "model_fingerprint"), ("tokenizer", "tokenizer_fingerprint")):
        checks += _fingerprints(name, field, same, ours.get(field, ""))
    return checks


def _fingerprints(name: str, field: str, records: Records, ours: str) -> list[Check]:
    """One line for each model that is served."""
    checks = []
    for model in sorted({record.model for record in records}) or [""]:
        mine = [record for record in records if record.model == model]
        if mine or ours:
            title = f"{name} {model}".strip()
            remedy = "the same files and the same --quantization on every replica of the model"
            checks.append(_agree(title, mine, lambda r: str(getattr(r, field)), ours, remedy))
    return checks


def _agree(
    name: str, records: Records, of: Callable[[ReplicaRecord], str], ours: str, remedy: str
) -> Check:
    told: dict[str, list[str]] = {}
    for who, value in [*((r.id, of(r)) for r in records), ("this one", ours)]:
        if value:
            told.setdefault(value, []).append(who)
    seen = "; ".join(f"{listed(who)}: {value[:16]}" for value, who in told.items())
    return ok(name, seen or "not told") if len(told) < 2 else failure(name, seen, remedy)


def wires(records: Records) -> list[Check]:
    """What KV takes from each prefill replica to each decode replica of its model, as measured."""
    checks: list[Check] = []
    for record in (one for one in records if one.role == "decode"):
        peers = {r.id for r in records if r.role == "prefill" and r.model == record.model}
        known = {wire.peer: wire for wire in record.stats.wires}
        for peer in sorted(peers & known.keys()):
            wire = known[peer]
            seen = f"{record.id} from {peer}: {wire.wire}, {size(wire.bytes_per_s)}/s"
            slow = 0 < wire.bytes_per_s < SLOW_WIRE
            checks.append(_slow(seen) if slow else ok("wire", seen))
        if missing := sorted(peers - known.keys()):
            checks.append(_unmet(record.id, missing))
    return checks


def _slow(seen: str) -> Check:
    return warning(
        "wire", seen, "both pools on one host (shm), a faster network, or a higher --kv-rate-limit"
    )


def _unmet(decode: str, missing: Sequence[str]) -> Check:
    return warning(
        "wire", f"{decode} has no wire from {listed(missing)}",
        f"the log of {decode} says why: search it for {missing[0]}",
    )  # fmt: skip
