"""``ekiden plan``: what a model takes of which GPUs. So far: ``--score``, how far off it is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiden.cli.command import add_command

if TYPE_CHECKING:
    from ekiden.planner.score import Judged, Score

_EXAMPLES = """examples:
  ekiden plan --score measured.csv            every row beside what was measured
  ekiden plan --score measured.csv --json     medians and 90th percentiles

The file has one published measurement a line: start-up logs of KV capacity (kind kv) and what did
or did not fit (kind oom). A row that cannot be scored is listed with the reason.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "plan", "foretell what a model takes of a GPU", _EXAMPLES)
    parser.add_argument(
        "--score", type=Path, metavar="FILE", required=True,
        help="compare the planner with the measurements of a CSV file",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import msgspec

    from ekiden.planner.score import score

    found = score(args.score)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found.summary())).decode())
    else:
        print(_table(found))
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
