"""RMSNorm over the whole width of q and of k, whose heads are split over the TP ranks (OLMo 2).

Shapes: T tokens, E = Q + 2 W: this rank's widths of q, k and v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ekiden.layers.site import Site


class WidthNorm:
    """The ranks add up their sums of squares, so that each norms by the whole width."""

    def __init__(
        self,
        q_weight_Q: Tensor,
        k_weight_W: Tensor,
        *,
        widths: tuple[int, int],
        counts_k: bool,
        eps: float,
        site: Site,
    ) -> None:
        """``widths`` of q and k: of all ranks. ``counts_k``: no rank before has these KV heads."""
        self.q_weight_Q = q_weight_Q
        self.k_weight_W = k_weight_W
        self.widths_2 = torch.tensor(widths, dtype=torch.float32, device=q_weight_Q.device)
        self.counts_k = counts_k
        self.eps = eps
        self.tp = site.tp

    def __call__(self, qkv_TE: Tensor) -> Tensor:
        """The same with q and k normed; computed in float32, dtype kept."""
        width_q, width_k = len(self.q_weight_Q), len(self.k_weight_W)
        q_TQ, k_TW, v_TW = torch.split(qkv_TE, [width_q, width_k, width_k], dim=1)
        q_TQ, k_TW = q_TQ.float(), k_TW.float()
        squares_T2 = torch.stack((q_TQ.square().sum(1), k_TW.square().sum(1) * self.counts_k), 1)
        scale_T2 = (self.tp.all_reduce(squares_T2) / self.widths_2 + self.eps).rsqrt()
        q_TQ = q_TQ * scale_T2[:, :1] * self.q_weight_Q
        k_TW = k_TW * scale_T2[:, 1:] * self.k_weight_W
        return torch.cat((q_TQ.to(v_TW.dtype), k_TW.to(v_TW.dtype), v_TW), dim=1)
