"""What the adapters share: layouts of rotary heads, and the norm that libraries compute before the GEMM."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference_kernels.references import halves, pairs
from verifier.baselines import Unavailable

EPS = 1e-6  # of RMSNorm, as in the inputs (``reference_kernels.truth``)
HEAD = 128  # columns that share one row of rotary frequencies there


def heads(n: int, least: int = 1) -> int:
    """How many rotary heads ``n`` columns are.

    Raises:
        Unavailable: not whole heads, or fewer than ``least``.
    """
    if n % HEAD or n < least * HEAD:
        raise Unavailable(f"N must be a multiple of {HEAD} and at least {least * HEAD}: rotary tables are per head")
    return n // HEAD


def head_halves(t: Tensor) -> Tensor:
    """The columns of every head as ``[even | odd]`` halves."""
    return halves(t.unflatten(-1, (-1, HEAD))).flatten(-2)


def head_pairs(t: Tensor) -> Tensor:
    """The inverse of ``head_halves``."""
    return pairs(t.unflatten(-1, (-1, HEAD))).flatten(-2)


def cos_sin(position: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 tables ``(len(position), HEAD / 2)`` of the angles of one head, for a rotation by -theta.

    ``freq``: row of ``(hi, lo)`` pairs in turns. Tasks rotate by -theta and libraries by +theta,
    so the sine is negative. Angles in fp64: they are no part of what is timed.
    """
    turns = (freq[0:HEAD:2].double() + freq[1:HEAD:2].double()) * position.double()[:, None]
    theta = 2.0 * math.pi * turns
    return theta.cos().float(), -theta.sin().float()


def ones_for(a: Tensor) -> Tensor:
    """The weight of a norm whose weight is already in ``a``."""
    return torch.ones(a.shape[1], dtype=a.dtype, device=a.device)
