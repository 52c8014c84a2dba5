"""What becomes of the output when its reader has left."""

from __future__ import annotations

import os
import sys


def leave_output() -> None:
    """Send what is still to be printed nowhere: at exit Python would try once more, and complain.

    Call it after a BrokenPipeError, which ``ekiden ... | head`` gives.
    """
    with open(os.devnull, "w") as nobody:
        os.dup2(nobody.fileno(), sys.stdout.fileno())
