"""What doctor tells people to type exists."""

from __future__ import annotations

import argparse
import re

import pytest
from cases import CASES

from ekiden.cli.main import build_parser
from ekiden.doctor.symptoms import diagnose


def options(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found |= options(child)
    return found


def commands() -> set[str]:
    (action,) = (
        a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)
    )  # fmt: skip
    return set(action.choices)


@pytest.mark.parametrize("name", CASES)
def test_options_and_commands_of_a_remedy_are_there(name: str) -> None:
    for finding in diagnose(CASES[name][1]).findings:
        for cause in finding.causes:
            named = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", cause.remedy))
            assert named <= options(build_parser()), cause.remedy
            typed = set(re.findall(r"`ekiden (\w+)", cause.remedy))
            assert typed <= commands(), cause.remedy
