"""What our own services tell of a level: the account in each answer, and the gateway's metrics."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ekiden.bench.http import Address
from ekiden.bench.record import Account, Record
from ekiden.bench.result import ReplicaShare, Service
from ekiden.measures.spread import Spread, ms, spread

EVERY_S = 1.0
SCRAPE_S = 5.0
GAUGES = {
    "ekiden_gateway_in_flight": "requests in flight",
    "ekiden_kv_used_ratio": "KV in use",
    "ekiden_waiting_requests": "requests waiting",
    "ekiden_running_requests": "requests running",
    "ekiden_receiving_requests": "requests receiving KV",
    "ekiden_stage_idle_ratio": "stage idle",
    "ekiden_collective_ratio": "communication share",
}
SPLITS = "ekiden_replica_ranks"
_CACHES = ("decode_cache", "prefill_cache")


class Gauges:
    """Readings by name, then by labels."""

    def __init__(self) -> None:
        self._readings: dict[str, dict[str, list[float]]] = {}
        self.splits: dict[str, tuple[int, int]] = {}
        """By replica: TP and PP."""

    def read(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            if family.name == SPLITS:
                for sample in family.samples:
                    found = sample.labels
                    self.splits[found["replica"]] = (int(found["tp"]), int(found["pp"]))
            if what := GAUGES.get(family.name):
                for sample in family.samples:
                    readings = self._readings.setdefault(what, defaultdict(list))
                    readings[" ".join(sample.labels.values())].append(sample.value)

    def spreads(self) -> dict[str, dict[str, Spread]]:
        return {
            what: {where: spread(values) for where, values in sorted(readings.items())}
            for what, readings in self._readings.items()
        }


@asynccontextmanager
async def watching(address: Address) -> AsyncIterator[Gauges]:
    """Reads ``/metrics`` now and then while the block lasts; a server without any is let be."""
    gauges = Gauges()
    async with httpx.AsyncClient(timeout=SCRAPE_S, trust_env=False) as client:
        task = asyncio.create_task(_watch(client, f"{address.root}/metrics", gauges))
        try:
            yield gauges
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _watch(client: httpx.AsyncClient, url: str, gauges: Gauges) -> None:
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            response = await client.get(url)
            if response.status_code != 200 or "ekiden_" not in response.text:
                return
            gauges.read(response.text)
        except (httpx.HTTPError, ValueError):
            return  # a server with other metrics or none


def service(
    records: Sequence[Record],
    gauges: dict[str, dict[str, Spread]],
    splits: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> Service | None:
    """None where no answer had our account. ``splits``: TP and PP by replica."""
    told = [(row, row.account) for row in records if row.ok and row.account is not None]
    if not told:
        return None
    accounts = [account for _, account in told]
    sources: Counter[str] = Counter()
    wires: Counter[str] = Counter()
    for account in accounts:
        sources.update(account.sources)
        if account.moved_bytes:
            wires[account.wire] += account.moved_bytes
    shares = list(_shares(told, splits))
    return Service(
        prompt_sources=dict(sources),
        cache_hit_share=sum(sources[name] for name in _CACHES) / (sources.total() or 1),
        phases_ms=_phases(accounts),
        replicas=shares,
        imbalance={
            role: _imbalance([s.tokens for s in shares if s.role == role])
            for role in dict.fromkeys(share.role for share in shares)
        },
        fallbacks=dict(Counter(kind for account in accounts for kind in account.fallbacks)),
        wires=dict(wires),
        gauges=gauges,
    )


def _phases(accounts: Iterable[Account]) -> dict[str, Spread]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for account in accounts:
        for phase, value in account.times.items():
            seconds[phase.removesuffix("_s")].append(value)
    return {phase: ms(values) for phase, values in seconds.items()}


def _shares(
    told: Sequence[tuple[Record, Account]], splits: Mapping[str, tuple[int, int]]
) -> Iterator[ReplicaShare]:
    for role in ("prefill", "decode"):
        requests: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for row, account in told:
            if replica := getattr(account, f"{role}_replica"):
                requests[replica] += 1
                tokens[replica] += row.prompt_tokens if role == "prefill" else row.output_tokens
        for replica in sorted(requests):
            tp, pp = splits.get(replica, (0, 0))
            yield ReplicaShare(
                role=role,
                replica=replica,
                requests=requests[replica],
                tokens=tokens[replica],
                tp=tp,
                pp=pp,
            )


def _imbalance(tokens: Sequence[int]) -> float:
    mean = statistics.fmean(tokens)
    return max(tokens) / mean if mean else 1.0
