"""The PyTorch reference of every task: the truth candidates are judged against.

Each takes the GEMM result ``acc`` (M, N) and the operands, all already in the
compute dtype (fp64 for the truth, fp32 for the same-precision reference), and
returns every output unrounded. Written from the paper's mathematics (arXiv
2605.19269, Appendix C.1), independently of the primitives and of the op list.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    return torch.stack((even, odd), dim=-1).flatten(-2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring columns by -theta (the sign convention of CODA)."""
    even, odd = x[:, 0::2], x[:, 1::2]
    return _interleave(even * cos + odd * sin, odd * cos - even * sin)


def _swiglu(z: Tensor) -> Tensor:
    return F.silu(z[:, 0::2]) * z[:, 1::2]


def _select(z: Tensor, target: Tensor) -> Tensor:
    """z[m, target[m]]; NaN where the target is outside the columns."""
    inside = (target >= 0) & (target < z.shape[1])
    picked = z.gather(1, torch.where(inside, target, 0).long()[:, None])[:, 0]
    return torch.where(inside, picked, torch.nan)


def gemm_rope(acc, cos_sin):
    return {"d": acc, "o": _rotate(acc, cos_sin[:, 0::2], cos_sin[:, 1::2])}


def gemm_rope_lean(acc, position, freq):
    # the angle is fp64 even in the fp32 evaluation: an fp32 product of a position
    # near 10^5 is wrong by whole rotations and would make any tolerance meaningless
    freq = freq.double()
    theta = 2.0 * math.pi * (position.double()[:, None] * (freq[0::2] + freq[1::2]))
    return {"o": _rotate(acc, theta.cos().to(acc.dtype), theta.sin().to(acc.dtype))}


def _rope_lean_fp32(acc, position, freq):
    """What a PyTorch user writes: angles in fp32 (wrong by up to 0.5 rad near position 10^5, but fast)."""
    theta = 2.0 * math.pi * (position[:, None] * freq[0::2])
    return {"o": _rotate(acc, theta.cos(), theta.sin())}


def gemm_swiglu(acc):
    return {"z": acc, "y": _swiglu(acc)}


def gemm_swiglu_lean(acc):
    return {"y": _swiglu(acc)}


def gemm_cross_entropy(acc, target):
    return {"z": acc, "logit": _select(acc, target), "lse": acc.logsumexp(-1)}


def gemm_residual_rmsnorm(acc, residual, weight):
    h = acc + residual
    return {"h": h, "sumsq": h.square().sum(-1), "y": h * weight}


def gemm_rmsnorm(acc, rstd):
    return {"y": acc * rstd[:, None]}


def gemm_rmsnorm_swiglu(acc, rstd):
    z = acc * rstd[:, None]
    return {"z": z, "y": _swiglu(z)}


def gemm_rmsnorm_swiglu_lean(acc, rstd):
    return {"y": _swiglu(acc * rstd[:, None])}


def gemm_rmsnorm_rope(acc, rstd, cos_sin):
    return gemm_rope(acc * rstd[:, None], cos_sin)


def gemm_rmsnorm_rope_lean(acc, rstd, position, freq):
    return gemm_rope_lean(acc * rstd[:, None], position, freq)


def gemm_rmsnorm_cross_entropy(acc, rstd, target):
    return gemm_cross_entropy(acc * rstd[:, None], target)


def gemm_rmsnorm_cross_entropy_lean(acc, rstd, target):
    full = gemm_rmsnorm_cross_entropy(acc, rstd, target)
    return {"logit": full["logit"], "lse": full["lse"]}


def gemm_residual_rmsnorm_bwd(acc, x, dx_in, weight, rstd, zdz):
    rstd, zdz = rstd[:, None], zdz[:, None]
    xhat = x * rstd
    return {
        "dx": dx_in + (acc * weight - xhat * zdz) * rstd,
        "n": xhat * weight,
        "dweight": (acc * xhat).sum(0),
    }


def gemm_residual_rmsnorm_bwd_lean(acc, x, dx_in, weight, correction):
    return {"dx": dx_in + acc * weight + x * correction[:, None], "dweight": (acc * x).sum(0)}


def gemm_swiglu_bwd(acc, z):
    g, u = z[:, 0::2], z[:, 1::2]
    s = g.sigmoid()
    dz = _interleave(acc * u * s * (1 + g * (1 - s)), acc * g * s)
    return {"dz": dz, "y": g * s * u, "zdz": (z * dz).sum(-1)}


# what torch.compile is timed on where the truth itself would be an unfair baseline (fp64 angles)
TIMED: dict = {
    "gemm_rope_lean": _rope_lean_fp32,
    "gemm_rmsnorm_rope_lean": lambda acc, rstd, position, freq: _rope_lean_fp32(acc * rstd[:, None], position, freq),
}
