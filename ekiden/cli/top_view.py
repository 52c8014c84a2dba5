"""What ``ekiden top`` shows: text, made of records and readings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ekiden.core.types import ReplicaStats
from ekiden.doctor.scrape import Interval
from ekiden.measures.columns import aligned
from ekiden.registry.record import READY, ReplicaRecord

BAR = 10
_COLUMNS = (
    *("replica", "status", "split", "running", "waiting", "to prefill"),
    *("KV", "", "cached", "prefill", "step", "comm", "idle"),
)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One moment."""

    replicas: tuple[ReplicaRecord, ...]
    stale_s: float
    """Since the registry last answered; 0 while it does."""
    gateway: Interval | None = None
    trouble: str = ""
    """Why there is nothing of the gateway."""


def screen(view: View, width: int) -> str:
    """Lines of at most ``width`` characters."""
    lines = [*_requests(view), ""]
    for role in ("prefill", "decode"):
        pool = [record for record in view.replicas if record.role == role]
        lines += [_pool_line(role, pool), *_table(pool), ""]
    if view.stale_s:
        lines.append(f"Redis has not answered for {view.stale_s:.0f} s: this is what it said then")
    return "\n".join(line[:width] for line in lines).rstrip()


def _requests(view: View) -> list[str]:
    found = view.gateway
    if found is None:
        return [f"gateway   {view.trouble}"]
    bad = sum(
        count for status, count in found.by("ekiden_requests_total", "status").items()
        if not status.startswith("2")
    )  # fmt: skip
    sources = found.by("ekiden_prompt_tokens_total", "source")
    cached = sources["decode_cache"] + sources["prefill_cache"]
    parts = [
        f"{found.after.total('ekiden_gateway_in_flight'):.0f} in flight",
        f"{found.rate('ekiden_requests_total'):.1f} answers/s",
        f"{bad / found.seconds if found.seconds else 0:.1f} errors/s",
        f"{found.rate('ekiden_completion_tokens_total'):.0f} tokens/s",
        f"prompts {cached / sources.total():.0%} cached" if sources else "",
    ]
    return [
        "gateway   " + "   ".join(filter(None, parts)),
        "          " + "   ".join((_times("TTFT", found), _times("TPOT", found), _moved(found))),
        *_fallbacks(found),
    ]


def _times(name: str, found: Interval) -> str:
    metric = f"ekiden_{name.lower()}_seconds"
    values = [(q, found.quantile(metric, q / 100)) for q in (50, 95)]
    return f"{name} " + " ".join(f"P{q} {'-' if v is None else _ms(v)}" for q, v in values)


def _moved(found: Interval) -> str:
    wires = found.by("ekiden_transfer_bytes_total", "wire")
    moved = ", ".join(f"{_size(n / found.seconds)}/s over {wire}" for wire, n in wires.items())
    return f"KV {moved}" if moved else "KV nothing moved"


def _fallbacks(found: Interval) -> list[str]:
    kinds = found.after.of("ekiden_fallbacks_total")
    told = ", ".join(f"{n:.0f} {labels['kind']}" for labels, n in kinds if n)
    return [f"          fallbacks since the start: {told}"] if told else []


def _pool_line(role: str, pool: Sequence[ReplicaRecord]) -> str:
    if not pool:
        return f"{role:<8}  no replica"
    stats = [record.stats for record in pool]
    total = sum(one.kv_blocks_total for one in stats)
    held = sum(one.kv_blocks_held for one in stats)
    return (
        f"{role:<8}  {len(pool)} replica{'s' * (len(pool) > 1)}   "
        f"{sum(one.running for one in stats)} running   "
        f"{sum(one.waiting for one in stats)} waiting   "
        f"{_receiving(stats)}KV {held / total if total else 0:.0%}"
    )


def _receiving(stats: Sequence[ReplicaStats]) -> str:
    count = sum(one.receiving for one in stats)
    return f"{count} receiving KV   " if count else ""


def _table(pool: Sequence[ReplicaRecord]) -> list[str]:
    if not pool:
        return []
    cells = [_COLUMNS, *(_cells(record) for record in sorted(pool, key=lambda r: r.id))]
    return [f"  {line}" for line in aligned(cells)]


def _cells(record: ReplicaRecord) -> tuple[str, ...]:
    stats = record.stats
    used = stats.kv_blocks_held / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    return (
        record.id,
        record.status if record.status == READY else record.status.upper(),
        f"TP{record.tp}" + (f" x PP{record.pp}" if record.pp > 1 else ""),
        str(stats.running),
        str(stats.waiting),
        f"{stats.waiting_tokens:,}",
        "█" * round(BAR * used) + "░" * (BAR - round(BAR * used)),
        f"{used:.0%}",
        _share(stats.kv_blocks_cached, stats.kv_blocks_total),
        f"{stats.prefill_tokens_per_s:,.0f} tok/s" if stats.prefill_tokens_per_s else "-",
        _ms(stats.step_s) if stats.step_s else "-",
        f"{stats.collective_share:.0%}",
        _idle(stats),
    )


def _idle(stats: ReplicaStats) -> str:
    return "/".join(f"{share:.0%}" for share in stats.stage_idle) or "-"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
