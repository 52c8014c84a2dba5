"""A plan as one HTML file: the page, and three pictures of it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ekiden.cli.plan_page import page

if TYPE_CHECKING:
    from ekiden.planner.decision import Decision

_HTML = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 860px; margin: 2em auto; padding: 0 1em;
    color: #222; background: #fff; }}
  svg {{ width: 100%; height: auto; margin: 1em 0; }}
  pre {{ font-size: 13px; line-height: 1.45; overflow-x: auto; background: #f6f6f6; padding: 1em; }}
</style>
<h1>{title}</h1>
{pictures}
<h2>The plan</h2>
<pre>{text}</pre>
</html>
"""


def html(decision: Decision, plan: dict[str, Any]) -> str:
    """The file's text. Needs no network and no script."""
    title = f"{plan['asked']['geometry']}: {plan['chosen']['name']}"
    pictures = "" if plan["chosen"]["refused"] else "\n".join(_pictures(decision))
    return _HTML.format(title=escape(title), pictures=pictures, text=escape(page(plan)))


def _pictures(decision: Decision) -> list[str]:
    from ekiden.planner.curves import frontier, kv_lines, memory_bars
    from ekiden.plots.bars import stacked
    from ekiden.plots.lines import curves

    goal = decision.asked.objectives.ttft_p95
    return [
        curves(
            "Requests a second against time to first token",
            "requests/s",
            "TTFT P95, ms",
            frontier(decision),
            goal=goal * 1e3 if goal else None,
        ),
        stacked("Memory of a GPU", "GiB", memory_bars(decision)),
        curves(
            "KV against sequences",
            "sequences on a replica",
            "thousands of tokens",
            kv_lines(decision),
        ),
    ]
