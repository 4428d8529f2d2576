"""Liger-Kernel (Triton): cuBLAS GEMM, then Liger's operation, through the functions its autograd classes call.

Tasks with a deferred norm are computed as a user of Liger would: RMSNorm of A, then the GEMM.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from reference_kernels.references import halves, pairs
from verifier.baselines import Prepared

from .layouts import EPS, HEAD, cos_sin, head_halves, head_pairs, heads, ones_for

PACKAGE, INSTALL = "liger-kernel", "pip install liger-kernel"
_TABLE = "one angle per column and row; Liger's rotary table is shared by all heads (the _lean task is timed)"
LEFT_OUT = {
    "gemm_rope": _TABLE,
    "gemm_rmsnorm_rope": _TABLE,
    "gemm_residual_rmsnorm_bwd_lean": "A carries rstd here; Liger's backward starts from the unscaled gradient",
}


def operations() -> SimpleNamespace:
    from liger_kernel.ops import cross_entropy, fused_add_rms_norm, rms_norm, rope, swiglu

    return SimpleNamespace(
        cross_entropy=cross_entropy, fused_add_rms_norm=fused_add_rms_norm, rms_norm=rms_norm, rope=rope, swiglu=swiglu
    )


def _rows(ops, a: Tensor, normed: bool):
    """The GEMM's left operand at each call: ``a``, or Liger's RMSNorm of it."""
    if not normed:
        return lambda: a
    weight = ones_for(a)
    return lambda: ops.rms_norm.rms_norm_forward(a, weight, EPS, 0.0, "llama", None)[0]


def _rmsnorm(ops, a, b, operands) -> Prepared:
    rows = _rows(ops, a, True)
    return Prepared(lambda: torch.mm(rows(), b), lambda y: {"y": y})


def _swiglu(ops, a, b, operands, *, normed: bool, outputs: tuple[str, ...]) -> Prepared:
    rows, b = _rows(ops, a, normed), halves(b)

    def read(raw):
        z, y = raw
        return {n: t for n, t in (("z", pairs(z)), ("y", y)) if n in outputs}

    return Prepared(lambda: ops.swiglu.swiglu_fused_gate_up_forward(torch.mm(rows(), b)), read)


def _swiglu_bwd(ops, a, b, operands) -> Prepared:
    z = halves(operands["z"])
    return Prepared(lambda: ops.swiglu.swiglu_fused_gate_up_backward(z, torch.mm(a, b)), lambda dz: {"dz": pairs(dz)})


def _residual_rmsnorm(ops, a, b, operands) -> Prepared:
    def call():
        return ops.fused_add_rms_norm.fused_add_rms_norm_forward(
            torch.mm(a, b), operands["residual"], operands["weight"], EPS, 0.0, "llama"
        )

    def read(raw):  # Liger normalises y; the task leaves that to the next GEMM
        y, h, rstd = raw[:3]
        return {"h": h, "sumsq": (rstd.double() ** -2 - EPS) * h.shape[1], "y": y.double() / rstd[:, None]}

    return Prepared(call, read)


def _residual_rmsnorm_bwd(ops, a, b, operands) -> Prepared:
    norm = ops.fused_add_rms_norm
    block, warps = norm.calculate_settings(b.shape[1])
    x, weight, rstd = operands["x"], operands["weight"], operands["rstd"]

    def call():
        dn = torch.mm(a, b)
        dx, _, dweight = norm.fused_add_rms_norm_backward(
            dn, operands["dx_in"], x, weight, rstd, 0.0, norm._str_to_casting_mode["llama"], block, warps, 2, True
        )
        return {"dx": dx, "dweight": dweight}

    # the statistic that the task takes from one GEMM earlier, Liger computes for itself
    n = x.double() * rstd[:, None] * weight
    return Prepared(call, lambda raw: raw, instead={"zdz": (n * (a.double() @ b.double())).mean(-1)})


def _rope(ops, a, b, operands, *, normed: bool, gemms: int) -> Prepared:
    """``gemms``: 1 (all heads are queries, and one idle key head) or 2 (queries and keys by a GEMM each)."""
    rows, m = _rows(ops, a, normed), a.shape[0]
    split = heads(b.shape[1], least=gemms) // 2 * HEAD
    weights = [head_halves(b)] if gemms == 1 else [w.contiguous() for w in head_halves(b).tensor_split([split], 1)]
    tables = [torch.cat((t, t), -1)[None] for t in cos_sin(operands["position"], operands["freq"])]
    idle = torch.zeros(m, HEAD, dtype=a.dtype, device=a.device)

    def by_head(t: Tensor) -> Tensor:
        return t.view(1, m, -1, HEAD).transpose(1, 2)

    def call():
        left = rows()
        turned = [torch.mm(left, w) for w in weights]
        return ops.rope.rope_forward(*(by_head(t) for t in (*turned, idle)[:2]), *tables)[:gemms]

    def read(raw):
        return {"o": head_pairs(torch.cat([t.transpose(1, 2).reshape(m, -1) for t in raw], -1))}

    return Prepared(call, read)


def _cross_entropy(ops, a, b, operands, *, normed: bool, stored: bool) -> Prepared:
    rows, (m, n) = _rows(ops, a, normed), (a.shape[0], b.shape[1])
    target = operands["target"].long()
    kernel = ops.cross_entropy.liger_cross_entropy_kernel
    block = min(ops.cross_entropy.MAX_FUSED_SIZE, 1 << (n - 1).bit_length())

    def call():
        z = torch.mm(rows(), b)
        loss = torch.zeros(m, dtype=z.dtype, device=z.device)
        # the kernel as ``cross_entropy_forward`` launches it on Hopper for a forward pass: that
        # function waits for the GPU to count ignored rows, which a CUDA graph cannot hold
        kernel[(m,)](
            X_ptr=z, X_stride=z.stride(0), Y_ptr=target, Y_stride=1, weight_ptr=None, loss_ptr=loss, z_loss_ptr=None,
            loss_stride=1, token_accuracy_ptr=None, token_accuracy_stride=0, predicted_tokens_ptr=None,
            predicted_tokens_stride=0, n_cols=n, n_non_ignore=m, sum_non_ignore_weight=m, weight_sum=0.0,
            ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="none", softcap=None,
            RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False, RETURN_PREDICTED_TOKENS=False, BLOCK_SIZE=block,
            HAS_WEIGHT=False, HAS_SOFTCAPPING=False, HAS_GRADIENTS=False, num_warps=32,
        )  # fmt: skip
        return z, loss

    def read(raw):
        return {**({"z": raw[0]} if stored else {}), "lse - logit": raw[1]}

    return Prepared(call, read, derived={"lse - logit": lambda exact: exact["lse"] - exact["logit"]})


WAYS = {
    "gemm_swiglu": {"swiglu": partial(_swiglu, normed=False, outputs=("z", "y"))},
    "gemm_swiglu_lean": {"swiglu": partial(_swiglu, normed=False, outputs=("y",))},
    "gemm_rmsnorm_swiglu": {"rms_norm, swiglu": partial(_swiglu, normed=True, outputs=("z", "y"))},
    "gemm_rmsnorm_swiglu_lean": {"rms_norm, swiglu": partial(_swiglu, normed=True, outputs=("y",))},
    "gemm_swiglu_bwd": {"swiglu backward": _swiglu_bwd},
    "gemm_rmsnorm": {"rms_norm": _rmsnorm},
    "gemm_residual_rmsnorm": {"fused_add_rms_norm": _residual_rmsnorm},
    "gemm_residual_rmsnorm_bwd": {"fused_add_rms_norm backward": _residual_rmsnorm_bwd},
    "gemm_rope_lean": {
        "rope, one GEMM": partial(_rope, normed=False, gemms=1),
        "rope, two GEMMs": partial(_rope, normed=False, gemms=2),
    },
    "gemm_rmsnorm_rope_lean": {
        "rms_norm, rope, one GEMM": partial(_rope, normed=True, gemms=1),
        "rms_norm, rope, two GEMMs": partial(_rope, normed=True, gemms=2),
    },
    "gemm_cross_entropy": {"cross_entropy": partial(_cross_entropy, normed=False, stored=True)},
    "gemm_rmsnorm_cross_entropy": {"rms_norm, cross_entropy": partial(_cross_entropy, normed=True, stored=True)},
    "gemm_rmsnorm_cross_entropy_lean": {"rms_norm, cross_entropy": partial(_cross_entropy, normed=True, stored=False)},
}
