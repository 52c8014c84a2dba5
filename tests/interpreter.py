"""Imported before anything that imports triton: where there is no GPU, kernels are interpreted.

Triton reads TRITON_INTERPRET while it is imported, and transformers imports it.
"""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
