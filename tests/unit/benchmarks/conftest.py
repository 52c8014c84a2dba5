"""Puts ``scripts/`` on the path, where the benches keep what they share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
