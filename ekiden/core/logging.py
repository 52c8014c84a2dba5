"""One format for every service's log: time, level, who speaks, what happened."""

from __future__ import annotations

import logging
import sys

from ekiden.core.env import log_level


def setup_logging(who: str) -> None:
    """Log to stderr. ``who`` names the process, e.g. ``prefill-3f2a`` or ``decode-91bc rank 1``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)-7s [{who}] %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level())
    for noisy in ("asyncio", "urllib3", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
