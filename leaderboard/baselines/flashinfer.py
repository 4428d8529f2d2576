"""FlashInfer (CUDA and CuTeDSL, for inference): cuBLAS GEMM, then FlashInfer's operation.

Tasks with a deferred norm are computed as its users do: RMSNorm of A, then the GEMM.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from reference_kernels.references import halves, pairs
from verifier.baselines import Prepared

from .layouts import EPS, HEAD, cos_sin, heads, ones_for

PACKAGE, INSTALL = "flashinfer-python", "pip install flashinfer-python"
_TABLE = "one angle per column and row; FlashInfer's rotary table is shared by all heads (the _lean task is timed)"
_FORWARD = "FlashInfer is for inference: it has no backward of this"
_LOSS = "FlashInfer has no cross-entropy"
LEFT_OUT = {
    "gemm_rope": _TABLE,
    "gemm_rmsnorm_rope": _TABLE,
    "gemm_swiglu_bwd": _FORWARD,
    "gemm_residual_rmsnorm_bwd": _FORWARD,
    "gemm_residual_rmsnorm_bwd_lean": _FORWARD,
    "gemm_cross_entropy": _LOSS,
    "gemm_rmsnorm_cross_entropy": _LOSS,
    "gemm_rmsnorm_cross_entropy_lean": _LOSS,
}


def operations() -> SimpleNamespace:
    import flashinfer

    # as everybody else's here, its launches must not overlap (programmatic dependent launch)
    switched = ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul")
    return SimpleNamespace(
        **{n: partial(getattr(flashinfer, n), enable_pdl=False) for n in switched},
        apply_rope_with_cos_sin_cache_inplace=flashinfer.apply_rope_with_cos_sin_cache_inplace,
    )


def _rows(ops, a: Tensor, normed: bool):
    """The GEMM's left operand at each call: ``a``, or FlashInfer's RMSNorm of it."""
    if not normed:
        return lambda: a
    weight = ones_for(a)
    return lambda: ops.rmsnorm(a, weight, EPS)


def _rmsnorm(ops, a, b, operands) -> Prepared:
    rows = _rows(ops, a, True)
    return Prepared(lambda: torch.mm(rows(), b), lambda y: {"y": y})


def _swiglu(ops, a, b, operands, *, normed: bool, outputs: tuple[str, ...]) -> Prepared:
    rows, b = _rows(ops, a, normed), halves(b)

    def call():
        z = torch.mm(rows(), b)
        return z, ops.silu_and_mul(z)

    def read(raw):
        z, y = raw
        return {n: t for n, t in (("z", pairs(z)), ("y", y)) if n in outputs}

    return Prepared(call, read)


def _unnormed(raw) -> dict[str, Tensor]:
    """FlashInfer normalises y; the task leaves that to the next GEMM. The statistic is not among its outputs."""
    y, h = raw
    return {"h": h, "y": y.double() * (h.double().square().mean(-1, keepdim=True) + EPS).sqrt()}


def _fused_add(ops, a, b, operands) -> Prepared:
    # in place: from the second call on it adds to its own result, which costs the same
    residual, weight = operands["residual"].clone(), operands["weight"]

    def call():
        y = torch.mm(a, b)
        ops.fused_add_rmsnorm(y, residual, weight, EPS)
        return y, residual

    return Prepared(call, _unnormed)


def _add_in_gemm(ops, a, b, operands) -> Prepared:
    def call():
        h = torch.addmm(operands["residual"], a, b)
        return ops.rmsnorm(h, operands["weight"], EPS), h

    return Prepared(call, _unnormed)


def _rope(ops, a, b, operands, *, normed: bool) -> Prepared:
    rows, split = _rows(ops, a, normed), heads(b.shape[1], least=2) // 2 * HEAD
    position = operands["position"]
    # a cache of every position up to the largest one, as models keep it
    cache = torch.cat(cos_sin(torch.arange(int(position.max()) + 1, device=a.device), operands["freq"]), -1)
    index = position.int()

    def call():
        z = torch.mm(rows(), b)
        query, key = z[:, :split], z[:, split:]
        ops.apply_rope_with_cos_sin_cache_inplace(index, query, key, HEAD, cache, is_neox=False)
        return z

    return Prepared(call, lambda z: {"o": z})


WAYS = {
    "gemm_swiglu": {"silu_and_mul": partial(_swiglu, normed=False, outputs=("z", "y"))},
    "gemm_swiglu_lean": {"silu_and_mul": partial(_swiglu, normed=False, outputs=("y",))},
    "gemm_rmsnorm_swiglu": {"rmsnorm, silu_and_mul": partial(_swiglu, normed=True, outputs=("z", "y"))},
    "gemm_rmsnorm_swiglu_lean": {"rmsnorm, silu_and_mul": partial(_swiglu, normed=True, outputs=("y",))},
    "gemm_rmsnorm": {"rmsnorm": _rmsnorm},
    "gemm_residual_rmsnorm": {"fused_add_rmsnorm": _fused_add, "addmm, rmsnorm": _add_in_gemm},
    "gemm_rope_lean": {"rope with cos_sin cache": partial(_rope, normed=False)},
    "gemm_rmsnorm_rope_lean": {"rmsnorm, rope with cos_sin cache": partial(_rope, normed=True)},
}
