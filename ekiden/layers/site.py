"""What every layer is made from: where its weights come from, its ranks, its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ekiden.layers.ops import Ops
from ekiden.layers.weights import WeightSource
from ekiden.parallel.communicator import Communicator


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """One rank's place to build layers at."""

    source: WeightSource
    tp: Communicator
    ops: Ops
    device: torch.device
