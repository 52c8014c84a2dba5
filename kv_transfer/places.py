"""Where units of KV lie in a memory. The name of the shape is explained in ``boxes.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Places(NamedTuple):
    """Where the units of a run lie: in ``memory``, at (block, offset) each."""

    memory_UHL2SR: torch.Tensor
    spots: Sequence[tuple[int, int]]
