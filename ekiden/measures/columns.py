"""Rows as lines of text. Without numpy, since the command line imports it at each start."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, figures: bool = False) -> list[str]:
    """Lines whose columns stand below one another, to the left. ``figures``: all but the first
    column to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            text.rjust(width) if figures and i else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
