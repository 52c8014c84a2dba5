"""What ``ekiden verify`` shows: a progress line, the table, one last line with the counts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping

from .cell import Outcome
from .layouts import Grid, Layout

_ORDER = ("equal", "refused", "differs", "hung", "failed")

Results = Mapping[tuple[Layout, Layout], Outcome]


def progress(what: str, done: int, total: int) -> None:
    """One line on stderr, rewritten in place on a terminal."""
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\r\x1b[K[{done}/{total}] {what}", end=end, file=sys.stderr, flush=True)
    elif done == total or "->" in what:
        print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)


def print_report(grid: Grid, results: Results) -> int:
    """Print table, details and counts; 0 when every cell is equal or refused, else 1."""
    print(_table(grid, results))
    for (prefill, decode), outcome in results.items():
        if outcome.detail:
            print(f"{prefill} -> {decode}: {outcome.status}: {outcome.detail}")
    print(_last_line(results))
    return 0 if all(outcome.ok for outcome in results.values()) else 1


def _table(grid: Grid, results: Results) -> str:
    head = ["prefill \\ decode", *map(str, grid.decode)]
    rows = [
        [str(prefill), *(_cell(results[prefill, decode]) for decode in grid.decode)]
        for prefill in grid.prefill
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
    return "\n".join(lines)


def _cell(outcome: Outcome) -> str:
    text = outcome.status if outcome.ok else outcome.status.upper()
    ties = f" ({outcome.ties} tie{'s' if outcome.ties > 1 else ''})" if outcome.ties else ""
    return text + ties


def _last_line(results: Results) -> str:
    counts = Counter(outcome.status for outcome in results.values())
    outcomes = results.values()
    return (
        f"{len(results)} cells: "
        + ", ".join(f"{counts[status]} {status}" for status in _ORDER)
        + f"; {sum(o.prompts for o in outcomes)} prompts, {sum(o.tokens for o in outcomes)} "
        f"tokens, {sum(o.ties for o in outcomes)} ties; "
        f"{sum(o.kv_bytes for o in outcomes) / 1e6:.0f} MB of KV moved, "
        f"{sum(o.kv_tokens_compared for o in outcomes)} tokens of it compared bit by bit"
    )
