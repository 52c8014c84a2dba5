"""A plan as one HTML file: the page, and three pictures of it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ekiden.cli import svg
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
  svg {{ width: 100%; height: auto; font-size: 12px; fill: #444; }}
  pre {{ font-size: 13px; line-height: 1.45; overflow-x: auto; background: #f6f6f6; padding: 1em; }}
  .legend span {{ margin-right: 1.2em; font-size: 14px; white-space: nowrap; }}
  .legend i {{ display: inline-block; width: .8em; height: .8em; margin-right: .4em; }}
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

    goal = decision.asked.objectives.ttft_p95
    return [
        "<h2>Requests a second against time to first token</h2>",
        svg.lines(
            frontier(decision), "requests/s", "TTFT P95, ms", goal=goal * 1e3 if goal else None
        ),
        "<h2>Memory of a GPU</h2>",
        svg.bars(memory_bars(decision), "GiB"),
        "<h2>KV against sequences</h2>",
        svg.lines(kv_lines(decision), "sequences on a replica", "thousands of tokens"),
    ]
