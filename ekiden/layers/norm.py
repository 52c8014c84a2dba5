"""Root mean square normalisation (arXiv:1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """Over the last dimension, computed in float32; any leading shape, same dtype out."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.weight_fp32 = weight.float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight_fp32, self.eps).to(x.dtype)
