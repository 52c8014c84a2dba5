"""What a chaos run found: as JSON, on the screen, and as a page of the docs."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from chaos_round import NOT_REACHED, Row


class Report(msgspec.Struct, kw_only=True):
    """All lanes together."""

    kv_transport: str
    seeds: list[int]
    seconds: float
    skipped: str
    """Why links were not cut; empty if they were."""
    rows: list[Row]
    trouble: list[str] = []
    """What kept a lane from its end."""

    @property
    def injected(self) -> list[Row]:
        return [row for row in self.rows if row.outcome != NOT_REACHED]

    @property
    def breaches(self) -> list[str]:
        said = [
            f"seed {row.seed}: {row.fault} while {row.state}: {breach}"
            for row in self.rows
            for breach in row.breaches
        ]
        return [*said, *self.trouble]

    def verdict(self) -> str:
        missed = len(self.rows) - len(self.injected)
        text = (
            f"{len(self.injected)} faults injected over {self.kv_transport} in "
            f"{self.seconds / 60:.1f} minutes, seeds {', '.join(map(str, self.seeds))}; "
            f"{sum(row.requests for row in self.rows)} requests judged; "
            f"{len(self.breaches)} breaches"
        )
        return text + (f"; {missed} states did not come about" if missed else "")


def save(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "verdict": report.verdict(),
        "breaches": report.breaches,
        **msgspec.to_builtins(report),
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


def table(report: Report) -> list[tuple[str, ...]]:
    """Fault, state, how often, outcome, seconds to recover (median and worst)."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in report.injected:
        groups[row.fault, row.state].append(row)
    lines = [("fault", "state", "n", "the request", "others", "median s", "worst s")]
    for (fault, state), rows in groups.items():
        seconds = [row.recovery_s for row in rows]
        lines.append(
            (
                *(fault, state, str(len(rows))),
                _counted(row.outcome for row in rows),
                _counted(other for row in rows for other in row.others),
                f"{statistics.median(seconds):.1f}",
                f"{max(seconds):.1f}",
            )
        )
    return [lines[0], *sorted(lines[1:])]


def _counted(outcomes: Iterable[str]) -> str:
    counts = Counter(outcomes)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def screen(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(lines: Sequence[tuple[str, ...]]) -> str:
    head, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *rest])
