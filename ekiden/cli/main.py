"""The root of the command line. Each command is a module with ``add_parser``.

Exit codes: 0 done, 1 it failed or differs, 2 the set-up cannot work (one sentence on stderr),
3 not ready in time, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from ekiden import __version__
from ekiden.cli import audit, bench, chat, doctor, models, plan, serve, sim, top, up, verify
from ekiden.cli.output import leave_output
from ekiden.core.errors import EkidenError, SetupError

COMMANDS = (up, serve, models, plan, sim, chat, bench, top, doctor, verify, audit)

_EXAMPLES = """examples:
  ekiden up                                   a whole deployment on this machine
  ekiden chat "What is a relay race?"         ask it something
  ekiden models pull smollm2-135m-instruct    fetch a model ahead of time
  ekiden serve decode --model DIR --redis redis://HOST:6379/0    one replica, anywhere
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error, without all the options before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ekiden: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ekiden",
        description="Serve large language models with prefill and decode on separate pools.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ekiden {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. No traceback for what an operator can mend."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except EkidenError as error:
        print(f"ekiden: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, SetupError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as `ekiden ... | head` does
        leave_output()
        return 1
