"""What ``ekiden verify`` shows: progress, a table, what failed, and the counts."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from ekiden.measures.columns import aligned

from .layouts import Layout, Pair
from .outcome import STATUSES, Outcome

MAX_TABLE = 12
"""Columns of a table of layouts; a grid of more is told by KV dtypes."""
MAX_LINES = 50
_TWENTIETH = 20
_WORD = re.compile(r"(?<![\w.:-])[a-z]+(?![\w.:-])")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one way to run the grid."""

    title: str
    results: Mapping[Pair, Outcome]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(outcome.ok for outcome in self.results.values())


class Progress:
    """Call it with (what, done, total): one line on stderr, redrawn in place on a terminal, else
    a line for every twentieth of the work."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._tty = sys.stderr.isatty()
        self._told = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._tty:
            end = "\n" if done >= total else ""
            line = f"[{done}/{total}] {what}{self._left(done, total)}"
            print(f"\r\x1b[K{line}", end=end, file=sys.stderr, flush=True)
            return
        kind = "cells" if "->" in what else what
        step = (kind, done * _TWENTIETH // max(total, 1))
        if step != self._told and (kind == "cells" or done == total):
            self._told = step
            print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)

    def _left(self, done: int, total: int) -> str:
        """Of the cells; truths come in between and are not foretold."""
        if not done:
            return ""
        seconds = (time.monotonic() - self._began) / done * (total - done)
        return f"  about {seconds / 60:.0f} min left" if seconds > 90 else ""


def print_report(parts: Sequence[Part]) -> int:
    """Print each part's table, details and counts; 0 when every cell is equal or refused."""
    for part in parts:
        print(f"{part.title}, {part.seconds:.0f} s")
        print("\n".join(_body(part.results)))
        print(last_line(part.results))
    return 0 if all(part.ok for part in parts) else 1


def write_json(path: Path, model: str, parts: Sequence[Part]) -> None:
    """Everything, cell by cell."""
    body = {
        "model": model,
        "parts": [
            {
                "title": part.title,
                "seconds": round(part.seconds, 1),
                "counts": _counts(part.results.values()),
                "cells": [
                    {"prefill": str(p), "decode": str(d), **msgspec.structs.asdict(outcome)}
                    for (p, d), outcome in part.results.items()
                ],
            }
            for part in parts
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1))


def _body(results: Mapping[Pair, Outcome]) -> list[str]:
    rows, columns = (list(dict.fromkeys(cell[side] for cell in results)) for side in (0, 1))
    small = len(columns) <= MAX_TABLE and len(rows) * len(columns) == len(results)
    table = _layout_table(rows, columns, results) if small else _dtype_table(results)
    bad = [cell for cell, outcome in results.items() if not outcome.ok]
    return [*table, *_details(bad, results), *_refusals(results)]


def _layout_table(
    rows: Sequence[Layout], columns: Sequence[Layout], results: Mapping[Pair, Outcome]
) -> list[str]:
    head = ["prefill \\ decode", *map(str, columns)]
    return aligned([head, *([str(p), *(_cell(results[p, d]) for d in columns)] for p in rows)])


def _dtype_table(results: Mapping[Pair, Outcome]) -> list[str]:
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for (prefill, decode), outcome in results.items():
        groups.setdefault((prefill.kv, decode.kv), []).append(outcome)
    rows = [["KV of prefill", "of decode", "cells", "tokens equal", "logprobs apart", "bound"]]
    for (prefill_kv, decode_kv), outcomes in groups.items():
        counts = ", ".join(f"{n} {status}" for status, n in _counts(outcomes).items() if n)
        tokens = sum(o.tokens for o in outcomes)
        equal = sum(o.equal_tokens for o in outcomes)
        share = f"{equal} of {tokens} ({equal / tokens:.2%})" if tokens else "-"
        distance = f"{max(o.logprob for o in outcomes):.1e}" if tokens else "-"
        bound = f"{max(o.bound for o in outcomes):.1e}" if tokens else "-"
        kinds = [prefill_kv or "auto", decode_kv or "auto"]
        rows.append([*kinds, counts, share, distance, bound])
    return aligned(rows)


def _details(cells: Sequence[Pair], results: Mapping[Pair, Outcome]) -> list[str]:
    lines = [
        f"{prefill} -> {decode}: {results[prefill, decode].status}: "
        f"{results[prefill, decode].detail}"
        for prefill, decode in cells[:MAX_LINES]
    ]
    left = len(cells) - len(lines)
    return [*lines, f"and {left} more; --json FILE has all of them"] if left else lines


def _refusals(results: Mapping[Pair, Outcome]) -> list[str]:
    """Every reason once, with the first cell that it was given for."""
    said: dict[tuple[str, ...], list[str]] = {}
    for (prefill, decode), outcome in results.items():
        if outcome.status == "refused":
            # The words without names and figures: what is left is the reason.
            reason = (prefill.kv, decode.kv, *_WORD.findall(outcome.detail))
            said.setdefault(reason, []).append(f"{prefill} -> {decode}: {outcome.detail}")
    return [
        f"refused: {lines[0]}" + (f" (and {len(lines) - 1} more alike)" if lines[1:] else "")
        for lines in said.values()
    ]


def _cell(outcome: Outcome) -> str:
    text = outcome.status if outcome.ok else outcome.status.upper()
    ties = f" ({outcome.ties} tie{'s' if outcome.ties > 1 else ''})" if outcome.ties else ""
    return text + ties


def _counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    counts = Counter(outcome.status for outcome in outcomes)
    return {status: counts[status] for status in STATUSES}


def last_line(results: Mapping[Pair, Outcome]) -> str:
    outcomes = results.values()
    tokens, equal = sum(o.tokens for o in outcomes), sum(o.equal_tokens for o in outcomes)
    return (
        f"{len(results)} cells: "
        + ", ".join(f"{count} {status}" for status, count in _counts(outcomes).items())
        + f"; {sum(o.prompts for o in outcomes)} prompts, {equal} of {tokens} tokens equal, "
        f"{sum(o.ties for o in outcomes)} ties; "
        f"{sum(o.kv_bytes for o in outcomes) / 1e6:.0f} MB of KV moved, "
        f"{sum(o.kv_tokens_compared for o in outcomes)} tokens of it compared bit by bit"
    )
