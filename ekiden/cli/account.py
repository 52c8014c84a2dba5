"""The account of a finished request, as a table: token sources, time split, bytes moved."""

from __future__ import annotations

from typing import Any

_SOURCES = (
    ("decode_cache", "decode cache"),
    ("prefill_cache", "prefill cache"),
    ("prefill_computed", "computed on prefill"),
    ("local_computed", "computed on decode"),
)
_TIMES = (
    ("queue_s", "queue"),
    ("prefill_s", "prefill"),
    ("transfer_s", "transfer (exposed)"),
    ("first_decode_s", "first decode"),
    ("decode_s", "decode"),
)


def account_table(usage: dict[str, Any]) -> str:
    """Lines of text for OpenAI's ``usage`` with our ``ekiden`` part; what is absent is left out."""
    ours = usage.get("ekiden") or {}
    rows = [
        ("prompt tokens", str(usage.get("prompt_tokens", 0))),
        *_sources(ours.get("sources") or {}),
        ("output tokens", str(usage.get("completion_tokens", 0))),
        *_times(ours.get("times") or {}),
        *_transfer(ours),
        *(("fallback", f"{f['kind']}: {f['reason']}") for f in ours.get("fallbacks") or ()),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _sources(sources: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(f"  {label}", str(sources[key])) for key, label in _SOURCES if sources.get(key)]
    if reason := sources.get("reason"):
        rows.append(("  why", str(reason)))
    return rows


def _times(times: dict[str, Any]) -> list[tuple[str, str]]:
    if not times:
        return []
    total = sum(float(times.get(key, 0)) for key, _ in _TIMES)
    parts = [(f"  {label}", _ms(float(times.get(key, 0)))) for key, label in _TIMES]
    return [("time", _ms(total)), *parts]


def _transfer(ours: dict[str, Any]) -> list[tuple[str, str]]:
    transfer = ours.get("transfer") or {}
    rows = [
        (label, str(ours[key]))
        for key, label in (("prefill_replica", "prefilled by"), ("decode_replica", "decoded by"))
        if ours.get(key)
    ]
    if moved := transfer.get("bytes"):
        span = _ms(float(transfer.get("seconds", 0)))
        # No rate is made of it: while a long prompt's next chunk is computed nothing moves.
        rows.append(("KV moved", f"{moved / 1e6:.2f} MB, {span} from first to last byte"))
        rows.append(("wire", str(transfer.get("wire") or "unknown")))
    if fetched := transfer.get("fetched_tokens"):
        size = transfer.get("fetched_bytes", 0) / 1e6
        rows.append(("KV lent to prefill", f"{size:.2f} MB, {fetched} tokens that decode held"))
    return rows


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
