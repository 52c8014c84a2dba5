"""The picture of a bench, as a file."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, svg: str) -> None:
    """Where it lies is printed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg)
    print(f"written: {path}")
