"""From readings of a registry and of a gateway to one situation. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from ekiden.core.types import ReplicaStats
from ekiden.doctor.evidence import Answers, Replica, Situation, Times, Wire
from ekiden.doctor.scrape import Interval, Scrape
from ekiden.registry.record import DRAINING, UNWELL, ReplicaRecord

PHASES = ("queue", "prefill", "transfer", "first_decode", "decode")
GENERATING = ("/v1/chat/completions", "/v1/completions")
_CLIENTS_OWN = ("4",)
_OVERLOADED = "429"


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at everything, at one moment. None: it could not be looked at."""

    records: tuple[ReplicaRecord, ...] | None = None
    scrape: Scrape | None = None


def situation(readings: Sequence[Reading], seconds: float) -> Situation:
    """What was watched, from the first reading to the last."""
    scrapes = [reading.scrape for reading in readings if reading.scrape is not None]
    looks = [reading.records for reading in readings if reading.records is not None]
    if not looks:
        looks = [tuple(told_by_gateway(scrape)) for scrape in scrapes]
    return Situation(
        name=f"watched for {seconds:.0f} s",
        seconds=seconds,
        answers=_answers(Interval(before=scrapes[0], after=scrapes[-1])) if scrapes[1:] else None,
        replicas=tuple(_replicas(looks)),
        in_flight=_mean(scrape.total("ekiden_gateway_in_flight") for scrape in scrapes)
        if scrapes
        else None,
    )


def _answers(found: Interval) -> Answers:
    errors = {
        status: round(count)
        for endpoint in GENERATING
        for status, count in found.by(
            "ekiden_requests_total", "status", endpoint=endpoint
        ).items()
        if not status.startswith("2")
        and (status == _OVERLOADED or not status.startswith(_CLIENTS_OWN))
    }  # fmt: skip
    sources = found.by("ekiden_prompt_tokens_total", "source")
    count = round(found.added("ekiden_phase_seconds_count", phase="decode"))
    return Answers(
        count=count,
        errors=errors,
        tokens_per_s=found.rate("ekiden_completion_tokens_total"),
        ttft=_times(found, "ekiden_ttft_seconds"),
        tpot=_times(found, "ekiden_tpot_seconds"),
        phases=dict(_phases(found)),
        prompt_tokens=sources.total() / count if count else 0.0,
        output_tokens=found.added("ekiden_completion_tokens_total") / count if count else 0.0,
        sources=dict(sources),
        predicted_cached=found.added("ekiden_predicted_cached_tokens_total"),
        fallbacks={k: round(n) for k, n in found.by("ekiden_fallbacks_total", "kind").items()},
        moved=dict(found.by("ekiden_transfer_bytes_total", "wire")),
    )


def _times(found: Interval, metric: str) -> Times:
    quantiles = [found.quantile(metric, share) or 0.0 for share in (0.5, 0.95, 0.99)]
    count = round(found.added(f"{metric}_count"))
    mean = found.added(f"{metric}_sum") / count if count else 0.0
    return Times(count=count, mean=mean, p50=quantiles[0], p95=quantiles[1], p99=quantiles[2])


def _phases(found: Interval) -> Iterator[tuple[str, float]]:
    for phase in PHASES:
        if count := found.added("ekiden_phase_seconds_count", phase=phase):
            yield phase, found.added("ekiden_phase_seconds_sum", phase=phase) / count


def told_by_gateway(scrape: Scrape) -> Iterator[ReplicaRecord]:
    """What a gateway's metrics tell of its replicas: enough to judge load, not to meet them."""
    for labels, _ in scrape.of("ekiden_replica_ranks"):
        name = labels["replica"]
        share = scrape.total("ekiden_kv_used_ratio", replica=name)
        idle = {int(h["stage"]): v for h, v in scrape.of("ekiden_stage_idle_ratio", replica=name)}
        yield ReplicaRecord(
            id=name,
            role=labels["role"],
            model=labels["model"],
            address="",
            epoch=0,
            version="",
            block_size=0,
            granule=0,
            max_model_len=0,
            tp=int(labels["tp"]),
            pp=int(labels["pp"]),
            stats=ReplicaStats(
                running=round(scrape.total("ekiden_running_requests", replica=name)),
                waiting=round(scrape.total("ekiden_waiting_requests", replica=name)),
                receiving=round(scrape.total("ekiden_receiving_requests", replica=name)),
                kv_blocks_total=_PARTS,
                kv_blocks_held=round(_PARTS * share),
                collective_share=scrape.total("ekiden_collective_ratio", replica=name),
                stage_idle=tuple(idle[stage] for stage in sorted(idle)),
            ),
        )


_PARTS = 10_000
"""Blocks of a pool whose size is not told, only its share in use."""


def _replicas(looks: Sequence[tuple[ReplicaRecord, ...]]) -> Iterator[Replica]:
    """Every replica that was there in any of the looks, in order of id."""
    seen: dict[str, list[ReplicaRecord]] = defaultdict(list)
    for look in looks:
        for record in look:
            seen[record.id].append(record)
    left = {record.id for record in looks[-1]} if looks else set()
    for name in sorted(seen):
        yield _replica(seen[name], gone=name not in left)


def _replica(records: Sequence[ReplicaRecord], *, gone: bool) -> Replica:
    last, stats = records[-1], [record.stats for record in records]
    shares = [one.kv_blocks_held / one.kv_blocks_total for one in stats if one.kv_blocks_total]
    newest = stats[-1]

    def mean(figure: Callable[[ReplicaStats], float]) -> float:
        return _mean(map(figure, stats))

    return Replica(
        id=last.id,
        role=last.role,
        model=last.model,
        host=last.address.rpartition(":")[0],
        tp=last.tp,
        pp=last.pp,
        max_num_seqs=last.max_num_seqs,
        readings=len(records),
        running=mean(lambda one: one.running),
        waiting=mean(lambda one: one.waiting),
        receiving=mean(lambda one: one.receiving),
        kv_share=_mean(shares),
        kv_peak=max(shares, default=0.0),
        kv_tokens=newest.kv_blocks_total * last.block_size,
        step_s=newest.step_s,
        prefill_tokens_per_s=newest.prefill_tokens_per_s,
        collective_share=newest.collective_share,
        stage_idle=newest.stage_idle,
        lost=_lost(records, gone=gone),
        wires=tuple(
            Wire(peer=one.peer, wire=one.wire, bytes_per_s=one.bytes_per_s) for one in newest.wires
        ),
    )


def _lost(records: Sequence[ReplicaRecord], *, gone: bool) -> str:
    """A replica that drained before it left was sent away, not lost."""
    last = records[-1]
    if gone:
        return "" if last.status == DRAINING else "gone"
    if last.status == UNWELL:
        return UNWELL
    return "restarted" if records[0].epoch != last.epoch else ""


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0
