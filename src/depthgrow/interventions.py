"""What can be done to the residual stream where a block begins, to tell a forward cause from a backward one.

An intervention acts on the stream entering every block but the first, in any placement. With n(x) = x / rms(x) (no
weight), sg = stop-gradient, c a constant:

    forward-norm     y = x + sg(n(x) - x)     the block reads a normalised stream; gradients pass as if nothing were there
    backward-norm    y = n(x) + sg(x - n(x))  the block reads x; gradients pass as through a norm
    rescale          y = x sg(c / rms(x))     the scale is set; gradients are scaled, not projected
    structural-clip  rescale, but only for structural tokens: special tokens and each document's first

Every one is per token, so a document's result does not depend on what is beside it or after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-6


def unit(x_ND: Tensor) -> Tensor:
    """n(x) = x / sqrt(mean(x^2) + eps), in float32 or wider."""
    wide = x_ND if x_ND.dtype == torch.float64 else x_ND.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x_ND.dtype)


def forward_norm(x_ND: Tensor, structural_N: Tensor, scale: float) -> Tensor:
    # y = x + sg(n(x) - x)
    return x_ND + (unit(x_ND) - x_ND).detach()


def backward_norm(x_ND: Tensor, structural_N: Tensor, scale: float) -> Tensor:
    # y = n(x) + sg(x - n(x))
    n_ND = unit(x_ND)
    return n_ND + (x_ND - n_ND).detach()


def rescale(x_ND: Tensor, structural_N: Tensor, scale: float) -> Tensor:
    # y = x sg(c / rms(x))
    rms_N1 = (x_ND.detach().square().mean(-1, keepdim=True) + EPS).sqrt()
    return x_ND * (scale / rms_N1)


def structural_clip(x_ND: Tensor, structural_N: Tensor, scale: float) -> Tensor:
    # y = x sg(c / rms(x)) for structural tokens, y = x for the others
    return torch.where(structural_N.unsqueeze(-1), rescale(x_ND, structural_N, scale), x_ND)


INTERVENTIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward-norm": forward_norm,
    "backward-norm": backward_norm,
    "rescale": rescale,
    "structural-clip": structural_clip,
}

SCALED = ("rescale", "structural-clip")  # those that use the constant c
