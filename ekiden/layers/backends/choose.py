"""Which kernels a rank computes with, decided once when it starts."""

from __future__ import annotations

import logging

import torch

from ekiden.core.errors import SetupError
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.ops import Ops

logger = logging.getLogger(__name__)


def choose_ops(kernels: str, device: torch.device, dtype: torch.dtype) -> Ops:
    """``--kernels``: torch, or ``auto`` for the fastest that works on ``device`` in ``dtype``.

    Raises:
        SetupError: kernels that this device, or this machine, cannot run.
    """
    if kernels not in ("auto", "torch"):
        raise SetupError(f"--kernels {kernels} is unknown: choose auto or torch")
    logger.info("kernels of %s in %s: torch", device, dtype)
    return TorchOps()
