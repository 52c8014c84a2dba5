"""An option is added, renamed or given another default on purpose, or not at all."""

import difflib
from pathlib import Path

from option_tree import option_tree

FROZEN = Path(__file__).with_name("cli.txt")


def test_the_command_line_is_the_frozen_one():
    kept, now = FROZEN.read_text(), option_tree()
    changes = difflib.unified_diff(kept.splitlines(), now.splitlines(), "cli.txt", "now", "", "")
    assert now == kept, "meant? see option_tree.py\n" + "\n".join(changes)
