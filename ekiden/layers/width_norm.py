"""RMSNorm over the whole width of q and of k, whose heads are split over the TP ranks (OLMo 2).

In two halves, in plain torch: the ranks add up between them what the first gives, so that each
norms by the whole width.

Shapes: T tokens, E = Q + 2 W: this rank's widths of q, k and v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ekiden.layers.ops import WidthNorm


def parts(qkv_TE: Tensor, norm: WidthNorm) -> tuple[Tensor, ...]:
    """Views of q, k and v."""
    width_q, width_k = len(norm.q_weight_Q), len(norm.k_weight_W)
    return torch.split(qkv_TE, [width_q, width_k, width_k], dim=1)


def squares(qkv_TE: Tensor, norm: WidthNorm) -> Tensor:
    """Float32 [T, 2]: this rank's sums of squares of q and of k."""
    q_TQ, k_TW, _ = parts(qkv_TE, norm)
    of_q_T, of_k_T = (part.float().square().sum(1) for part in (q_TQ, k_TW))
    return torch.stack((of_q_T, of_k_T * norm.counts_k), 1)


def scale(qkv_TE: Tensor, squares_T2: Tensor, norm: WidthNorm) -> Tensor:
    """[T, E] normed by the squares of all ranks; computed in float32, dtype kept."""
    q_TQ, k_TW, v_TW = parts(qkv_TE, norm)
    of_q_T1, of_k_T1 = (
        (squares_T2[:, i, None] / width + norm.eps).rsqrt() for i, width in enumerate(norm.widths)
    )
    q_TQ = (q_TQ * of_q_T1 * norm.q_weight_Q).to(qkv_TE.dtype)
    k_TW = (k_TW * of_k_T1 * norm.k_weight_W).to(qkv_TE.dtype)
    return torch.cat((q_TQ, k_TW, v_TW), dim=1)
