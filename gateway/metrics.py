"""The gateway's figures for Prometheus. Labels come from configuration, never from clients."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ekiden.core.types import Completion
from gateway.fleet import Fleet

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """One registry an application, so that two in one process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Answers by status.", "endpoint", "status")
        self._sources = self._counter(
            "prompt_tokens", "Prompt tokens by where their KV came from.", "model", "source"
        )
        self._output = self._counter("completion_tokens", "Tokens generated.", "model")
        self._fallbacks = self._counter(
            "fallbacks", "Requests served another way than asked.", "kind"
        )
        self._predicted = self._counter(
            "predicted_cached_tokens", "Prompt tokens the router expected to be cached.", "model"
        )
        self._moved = self._counter("transfer_bytes", "KV bytes handed over.", "wire")
        self._ttft = self._histogram(
            "ttft_seconds", "From the whole body to the first token.", _SECONDS, "model"
        )
        self._tpot = self._histogram(
            "tpot_seconds", "Time per output token after the first.", _STEP_SECONDS, "model"
        )
        self._parts = self._histogram(
            "phase_seconds",
            "The parts of a request's time, on the decode replica's clock.",
            _SECONDS,
            *("model", "phase"),
        )
        self._replicas = Gauge(
            "ekiden_replicas", "Registered replicas.", ("role", "model"), registry=self._registry
        )
        self._ranks = Gauge(
            "ekiden_replica_ranks",
            "Ranks of a replica, and how they split the model.",
            ("replica", "role", "model", "tp", "pp"),
            registry=self._registry,
        )
        self._running = self._replica_gauge("running_requests", "Requests in a replica's batch.")
        self._waiting = self._replica_gauge("waiting_requests", "Requests a replica has queued.")
        self._receiving = self._replica_gauge(
            "receiving_requests", "Requests whose KV a decode replica is handed."
        )
        self._kv_used = self._replica_gauge(
            "kv_used_ratio", "Share of a replica's KV blocks that requests hold."
        )
        self._stage_idle = Gauge(
            "ekiden_stage_idle_ratio",
            "Share of the time with steps in flight in which a pipeline stage computed nothing.",
            ("replica", "stage"),
            registry=self._registry,
        )
        self._collective = self._replica_gauge(
            "collective_ratio",
            "Share of a step that its slowest rank was in collectives and stage links.",
        )
        self._speculated = Gauge(
            "ekiden_speculated_tokens",
            "Tokens proposed by speculation since a replica's start, and those that were right.",
            ("replica", "outcome"),
            registry=self._registry,
        )
        self._stale = Gauge(
            "ekiden_registry_stale_seconds",
            "Seconds since Redis last answered; 0 while it does.",
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "ekiden_gateway_in_flight", "Requests being answered.", registry=self._registry
        )

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def first_token(self, model: str, seconds: float) -> None:
        self._ttft.labels(model).observe(seconds)

    def finished(
        self, model: str, account: Completion, *, choices: int, predicted_cached: int
    ) -> None:
        sources, times = account.sources, account.times
        for source in ("decode_cache", "prefill_cache", "prefill_computed", "local_computed"):
            self._sources.labels(model, source).inc(getattr(sources, source))
        for phase in ("queue", "prefill", "transfer", "first_decode", "decode"):
            self._parts.labels(model, phase).observe(getattr(times, f"{phase}_s"))
        self._output.labels(model).inc(account.completion_tokens)
        self._predicted.labels(model).inc(predicted_cached)
        for fallback in account.fallbacks:
            self._fallbacks.labels(fallback.kind).inc()
        if account.transfer.bytes:
            self._moved.labels(account.transfer.wire).inc(account.transfer.bytes)
        if (after_first := account.completion_tokens / choices - 1) > 0:
            rest = times.transfer_s + times.first_decode_s + times.decode_s
            self._tpot.labels(model).observe(rest / after_first)

    def render(self, fleet: Fleet) -> bytes:
        """The text exposition, with the fleet as it is now."""
        self._stale.set(fleet.stale_for_s)
        self._replicas.clear()
        tally = Tally((record.role, record.model) for record in fleet.replicas())
        for (role, model), count in tally.items():
            self._replicas.labels(role, model).set(count)
        self._show_load(fleet)
        self._show_ranks(fleet)
        return generate_latest(self._registry)

    def _show_load(self, fleet: Fleet) -> None:
        for gauge in (
            self._ranks,
            self._running,
            self._waiting,
            self._receiving,
            self._kv_used,
        ):
            gauge.clear()
        for record in fleet.replicas():
            stats, split = record.stats, (str(record.tp), str(record.pp))
            self._ranks.labels(record.id, record.role, record.model, *split).set(
                record.tp * record.pp
            )
            self._running.labels(record.id).set(stats.running)
            self._waiting.labels(record.id).set(stats.waiting)
            self._receiving.labels(record.id).set(stats.receiving)
            if stats.kv_blocks_total:
                self._kv_used.labels(record.id).set(stats.kv_blocks_held / stats.kv_blocks_total)

    def _show_ranks(self, fleet: Fleet) -> None:
        self._stage_idle.clear()
        self._collective.clear()
        self._speculated.clear()
        for record in fleet.replicas():
            self._collective.labels(record.id).set(record.stats.collective_share)
            if proposed := record.stats.spec_proposed_tokens:
                self._speculated.labels(record.id, "proposed").set(proposed)
                self._speculated.labels(record.id, "accepted").set(
                    record.stats.spec_accepted_tokens
                )
            for stage, share in enumerate(record.stats.stage_idle):
                self._stage_idle.labels(record.id, str(stage)).set(share)

    def _replica_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"ekiden_{name}", text, ("replica",), registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ekiden_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"ekiden_{name}", text, labels, buckets=buckets, registry=self._registry)
