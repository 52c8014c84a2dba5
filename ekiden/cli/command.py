"""How every command introduces itself: what it does, its options, examples to copy."""

from __future__ import annotations

import argparse
from typing import Any

DEFAULT_MODEL = "smollm2-135m-instruct"
MODEL_HELP = "a Hugging Face directory, a name of `ekiden models list`, or a hub id"
SERVED_NAME_HELP = "what clients call it (default: the catalogue name, hub id or folder name)"


def add_command(commands: Any, name: str, does: str, epilog: str) -> argparse.ArgumentParser:
    """A parser under ``commands``. ``does`` is a phrase without a full stop; ``epilog`` has the
    examples, and stands as it is written."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser
