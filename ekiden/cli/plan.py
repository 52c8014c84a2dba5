"""``ekiden plan``: which layout a model should have on which GPUs, and why; ``--score``, how far
off that is."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiden.cli.bar import Bar
from ekiden.cli.command import add_command
from ekiden.cli.plan_options import add_question
from ekiden.cli.plan_question import question

if TYPE_CHECKING:
    from ekiden.planner.decision import Decision
    from ekiden.planner.score import Judged, Score

_EXAMPLES = """examples:
  ekiden plan Llama-3.1-8B --gpu A6000 --gpus-per-host 8          how to use eight cards
  ekiden plan Llama-3.1-70B --gpu H100 --gpus-per-host 8 --workload rag --rate 2 \\
      --ttft-p95 3s --tpot-p95 50ms --gpu-price 2.5               for a rate and objectives
  ekiden plan /models/llama --gpu L40S --gpus-per-host 4 --out ./deploy    and the files for it
  ekiden plan Llama-3.1-8B --gpu H100 --rate 4 --simulate         and check it by simulated traffic
  ekiden plan --score measured.csv            the planner beside what was measured

--score takes a file with one published measurement a line: start-up logs of KV capacity (kind kv),
what did or did not fit (kind oom), and latencies (kind perf). A row that cannot be scored is listed
with the reason. docs/plan.md has the formulas.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "plan", "say how to lay a model out over GPUs, and why", _EXAMPLES
    )
    add_question(parser)
    parser.add_argument(
        "--simulate", action="store_true",
        help="check the choice by simulated traffic; the exit code is 1 too where that misses an "
        "objective",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print plain data, not a page")
    output.add_argument(
        "--out", type=Path, metavar="DIR",
        help="write the page, the data and what deploys it into this folder",
    )  # fmt: skip
    output.add_argument(
        "--html", type=Path, metavar="FILE", help="write the page with plots into this file"
    )
    parser.add_argument(
        "--score", type=Path, metavar="FILE",
        help="compare the planner with the measurements of a CSV file, and plan nothing",
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    return _score(args) if args.score else _plan(args)


def _plan(args: argparse.Namespace) -> int:
    """0; 1 where nothing meets the objectives."""
    from ekiden.cli.plan_files import deployment, write
    from ekiden.cli.plan_html import html
    from ekiden.cli.plan_page import page
    from ekiden.cli.plan_simulate import section
    from ekiden.models.catalogue import CATALOGUE
    from ekiden.models.registry import MODELS
    from ekiden.planner.catalogue import servable
    from ekiden.planner.decision import decide
    from ekiden.planner.report import report

    decision = decide(question(args))
    model = args.model if args.model in CATALOGUE else servable(args.model)
    plan = report(decision, model, MODELS)
    text = page(plan)
    if args.simulate:
        plan["simulated"] = _simulated(decision, args.trace)
        text = f"{text}\n\n{section(plan)}"
    print(_json(plan) if args.json else text)
    if args.out:
        texts = {"plan.txt": text + "\n", "plan.json": _json(plan) + "\n"}
        blocked = plan["deploy"]["blocked"]
        write(args.out, texts | ({} if blocked else deployment(decision, model, args.out)))
        if blocked:
            print(f"{args.out} has no files to deploy: {blocked}", file=sys.stderr)
    if args.html:
        write(args.html.parent, {args.html.name: html(decision, plan)})
    kept = not (args.simulate and plan["simulated"]["missed"])
    return 0 if plan["met"] and kept else 1


def _simulated(decision: Decision, trace: Path | None) -> dict[str, Any]:
    from ekiden.cli.plan_simulate import simulated

    bar = Bar(unit=lambda total: f"{total} requests")
    try:
        return simulated(decision, trace, partial(bar, "simulate"))
    finally:
        bar.close()


def _json(found: object) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(found)).decode()


def _score(args: argparse.Namespace) -> int:
    from ekiden.planner.score import score

    found = score(args.score)
    print(_json(found.summary()) if args.json else _table(found))
    return 0


def _table(found: Score) -> str:
    summary = found.summary()
    lines = [_line(judged) for judged in found.judged]
    tpot = summary["tpot"]
    spreads = {
        **{what: summary[what] for what in ("kv_capacity", "weights", "ttft")},
        **{f"tpot, {kind}": tpot[kind] for kind in ("dense", "moe")},
    }
    lines += [
        f"{what}: median {spread['median_error']:.2%}, P90 {spread['p90_error']:.2%} of "
        f"{spread['rows']} rows"
        for what, spread in spreads.items()
        if spread["rows"]
    ]
    for count in ("oom_called_fitting", "fitting_called_oom"):
        lines.append(f"{count}: {summary[count]}")
    return "\n".join(lines)


def _line(judged: Judged) -> str:
    head = f"{judged.id:<8} {judged.what:<12}"
    if judged.unscored:
        return f"{head} not scored: {judged.unscored}"
    if judged.error is None:
        told, was = (
            "fits" if value else "does not" for value in (judged.predicted, judged.measured)
        )
        return f"{head} {told} (measured: {was})"
    return (
        f"{head} {judged.predicted:,.2f} {judged.unit} (measured: {judged.measured:,.2f}), "
        f"off by {judged.error:.2%}"
    )
