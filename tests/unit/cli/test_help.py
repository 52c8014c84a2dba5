"""Every command says what it does and shows a line to copy; every option says what it is."""

import argparse
import shlex
from collections.abc import Iterator

import pytest

from ekiden.cli.main import build_parser


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


def examples(parser: argparse.ArgumentParser) -> list[str]:
    """The command lines under ``examples:``, continued lines joined, remarks cut off."""
    text = (parser.epilog or "").replace("\\\n", " ")
    _, _, below = text.partition("examples:\n")
    lines = below.split("\n\n")[0].splitlines()
    return [line.strip().split("    ")[0] for line in lines]


ALL = {parser.prog: parser for parser in parsers(build_parser())}


@pytest.mark.parametrize("name", ALL)
def test_a_command_says_what_it_does_and_what_its_arguments_are(name: str):
    parser = ALL[name]
    assert parser.description
    silent = [
        action.dest
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert silent == []


@pytest.mark.parametrize("name", ALL)
def test_an_option_names_the_values_that_it_takes(name: str):
    actions = [action for action in ALL[name]._actions if action.choices and action.metavar]
    actions = [a for a in actions if not isinstance(a, argparse._SubParsersAction)]
    unnamed = [(a.dest, c) for a in actions for c in a.choices or () if c not in (a.help or "")]
    assert unnamed == []


@pytest.mark.parametrize("name", ALL)
def test_its_examples_can_be_typed(name: str):
    shown = examples(ALL[name])
    assert shown
    for line in shown:
        program, *argv = shlex.split(line)
        assert program == "ekiden"
        assert line.startswith(name)
        build_parser().parse_args(argv)
