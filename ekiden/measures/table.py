"""Figures as text."""

from __future__ import annotations

from collections.abc import Mapping

from ekiden.measures.goodput import Goodput
from ekiden.measures.spread import Spread


def milliseconds(value: float) -> str:
    """Three figures that count, whole numbers above 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def points(spread: Spread, *names: str) -> list[str]:
    """Its values of those names; dashes where there were none to spread."""
    return [milliseconds(getattr(spread, name)) if spread.count else "-" for name in names]


def of_goodput(good: Goodput | None) -> str:
    return "-" if good is None else f"{good.requests_per_s:.2f}/s ({good.share:.0%})"


def by_source(tokens: Mapping[str, int]) -> str:
    """Shares of prompt tokens by where their KV came from; empty where there are none."""
    total = sum(tokens.values()) or 1
    return ", ".join(
        f"{name.replace('_', ' ')} {count / total:.0%}" for name, count in tokens.items() if count
    )


def means(phases: Mapping[str, Spread]) -> str:
    return ", ".join(f"{name} {milliseconds(spread.mean)}" for name, spread in phases.items())
