"""The PyTorch reference of every task: the truth candidates are judged against.

Each takes the GEMM result ``acc`` (M, N) and the operands, all already in the
compute dtype (fp64 for the truth, fp32 for the same-precision reference), and
returns every output unrounded. Written from the paper's mathematics (arXiv
2605.19269, Appendix C.1), independently of the primitives and of the op list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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


# --- what PyTorch is timed on ---------------------------------------------------------
#
# Inductor's code depends on how the same mathematics is spelled and laid out: interleaving
# by torch.stack costs it several passes, index arithmetic fuses, and halves that lie side by
# side ([gate | up], as most models keep them) need neither. A baseline is the fastest of the
# spellings below and the reference itself, chosen by measurement.


@dataclass(frozen=True)
class Spelling:
    """One formulation of a task's mathematics.

    ``compute`` takes the GEMM's result and the operands as a reference does. ``halves`` names
    the tensors ("b" among them) whose neighbouring columns it keeps as ``[even | odd]``
    halves: inputs are permuted once, outside the clock, outputs are put back for the check.
    ``narrow``: in 16 bits when compiled too, so that Inductor may fold an addition into the GEMM.
    """

    name: str
    compute: Callable[..., dict[str, Tensor]]
    halves: tuple[str, ...] = ()
    narrow: bool = False


def halves(t: Tensor) -> Tensor:
    """Columns ``0, 1, 2, 3, ...`` in the order ``0, 2, ... | 1, 3, ...``."""
    return torch.cat((t[..., 0::2], t[..., 1::2]), -1)


def pairs(t: Tensor) -> Tensor:
    """The inverse of ``halves``."""
    return _interleave(*t.chunk(2, -1))


def _both(half: Tensor) -> Tensor:
    """Repeat every column twice, as index arithmetic."""
    return half.unsqueeze(-1).expand(*half.shape, 2).flatten(-2)


def _even_columns(like: Tensor) -> Tensor:
    return torch.arange(like.shape[-1], device=like.device) % 2 == 0


def _rotate_fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * _both(cos) + swapped * torch.where(_even_columns(x), _both(sin), -_both(sin))


def _rope_fused(acc, cos_sin):
    return {"d": acc, "o": _rotate_fused(acc, cos_sin[:, 0::2], cos_sin[:, 1::2])}


def _rope_lean_fused(acc, position, freq):
    # fp32 angles, as models compute them: fast, and wrong by about 0.02 rad near position 10^5
    theta = 2.0 * math.pi * (position[:, None] * freq[0::2])
    return {"o": _rotate_fused(acc, theta.cos(), theta.sin())}


def _swiglu_bwd_fused(acc, z):
    g, u = z[:, 0::2], z[:, 1::2]
    s = g.sigmoid()
    dg, du = acc * u * s * (1 + g * (1 - s)), acc * g * s
    gg, uu, dd = _both(g), _both(u), _both(acc)
    ss = gg.sigmoid()
    dz = torch.where(_even_columns(z), dd * uu * ss * (1 + gg * (1 - ss)), dd * gg * ss)
    return {"dz": dz, "y": g * s * u, "zdz": (g * dg + u * du).sum(-1)}


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.chunk(2, -1)
    return torch.cat((even * cos + odd * sin, odd * cos - even * sin), -1)


def _rope_halves(acc, cos_sin):
    return {"d": acc, "o": _rotate_halves(acc, *cos_sin.chunk(2, -1))}


def _rope_lean_halves(acc, position, freq):
    theta = 2.0 * math.pi * (position[:, None] * freq.chunk(2, -1)[0])
    return {"o": _rotate_halves(acc, theta.cos(), theta.sin())}


def _swiglu_halves(acc):
    gate, up = acc.chunk(2, -1)
    return {"z": acc, "y": F.silu(gate) * up}


def _swiglu_lean_halves(acc):
    return {"y": _swiglu_halves(acc)["y"]}


def _swiglu_bwd_halves(acc, z):
    g, u = z.chunk(2, -1)
    s = g.sigmoid()
    dg, du = acc * u * s * (1 + g * (1 - s)), acc * g * s
    return {"dz": torch.cat((dg, du), -1), "y": g * s * u, "zdz": (g * dg + u * du).sum(-1)}


def _scaled(compute: Callable) -> Callable:
    """The same after a deferred RMSNorm: rows of the accumulator times ``rstd``."""
    return lambda acc, rstd, **operands: compute(acc * rstd[:, None], **operands)


_ROPE = ("b", "cos_sin", "d", "o")
_SPELLINGS = {
    "gemm_rope": [Spelling("fused", _rope_fused), Spelling("halves", _rope_halves, _ROPE)],
    "gemm_rope_lean": [
        Spelling("fused", _rope_lean_fused),
        Spelling("halves", _rope_lean_halves, ("b", "freq", "o")),
    ],
    "gemm_swiglu": [Spelling("halves", _swiglu_halves, ("b", "z"))],
    "gemm_swiglu_lean": [Spelling("halves", _swiglu_lean_halves, ("b",))],
    "gemm_residual_rmsnorm": [Spelling("addmm", gemm_residual_rmsnorm, narrow=True)],
    "gemm_swiglu_bwd": [
        Spelling("fused", _swiglu_bwd_fused),
        Spelling("halves", _swiglu_bwd_halves, ("z", "dz")),
    ],
}
for _plain in ("rope", "rope_lean", "swiglu", "swiglu_lean"):
    _SPELLINGS[f"gemm_rmsnorm_{_plain}"] = [
        replace(s, compute=_scaled(s.compute)) for s in _SPELLINGS[f"gemm_{_plain}"]
    ]
_SLOW_REFERENCE = ("gemm_rope_lean", "gemm_rmsnorm_rope_lean")  # fp64 angles: nobody would run it


def spellings(task: str, reference: Callable) -> list[Spelling]:
    """Formulations of a task to time in PyTorch; all compute the reference."""
    own = [] if task in _SLOW_REFERENCE else [Spelling("reference", reference)]
    return own + _SPELLINGS.get(task, [])
