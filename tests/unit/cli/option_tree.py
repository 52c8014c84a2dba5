"""The whole command line as text. Run it to write cli.txt anew after a change that is meant:

.venv/bin/python tests/unit/cli/option_tree.py > tests/unit/cli/cli.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ekiden.cli.main import build_parser


def option_tree() -> str:
    return "\n".join(_lines(build_parser())) + "\n"


def _lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield parser.prog
    subparsers: list[argparse.ArgumentParser] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subparsers += dict.fromkeys(action.choices.values())
        elif not isinstance(action, argparse._HelpAction):
            yield f"  {_described(action)}"
    for child in subparsers:
        yield from _lines(child)


def _described(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    parts = [names]
    if action.option_strings and action.nargs != 0:
        parts.append(str(action.metavar or action.dest.upper()))
    if action.choices:
        parts.append(f"one of {', '.join(map(str, action.choices))}")
    if action.required:
        parts.append("required")
    if action.default not in (None, "", [], argparse.SUPPRESS):
        parts.append(f"default {action.default}")
    return "  ".join(parts)


if __name__ == "__main__":
    print(option_tree(), end="")
