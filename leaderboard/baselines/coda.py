"""coda-kernels 0.2 (the authors of CODA): its GEMMs with fused epilogues, autotuned by themselves.

The release has no epilogue with a row scale, a residual or a backward; the ten kernels of the
paper's 0.1 are not in it. It pins another quack than ours: both go into a folder of their own.
"""

from __future__ import annotations

import math
import os
from functools import partial
from types import ModuleType

from verifier.baselines import Prepared

from . import version_of

_QUACK = "0.6.1"
PACKAGE = "coda-kernels"
INSTALL = (
    f"pip install --no-deps --target DIR coda-kernels==0.2 quack-kernels=={_QUACK} ipdb, with CODA_BASELINES_PATH=DIR"
)
_TABLE = "its GEMM with RoPE computes angles from positions (the _lean task is timed)"
_NO_SCALE = "coda-kernels 0.2 has no epilogue that scales rows"
_NONE = "coda-kernels 0.2 has no such epilogue"
LEFT_OUT = {
    "gemm_rope": _TABLE,
    "gemm_rmsnorm": _NO_SCALE,
    "gemm_rmsnorm_swiglu": _NO_SCALE,
    "gemm_rmsnorm_swiglu_lean": _NO_SCALE,
    "gemm_rmsnorm_rope": _NO_SCALE,
    "gemm_rmsnorm_rope_lean": _NO_SCALE,
    "gemm_rmsnorm_cross_entropy": _NO_SCALE,
    "gemm_rmsnorm_cross_entropy_lean": _NO_SCALE,
    "gemm_residual_rmsnorm": _NONE,
    "gemm_residual_rmsnorm_bwd": _NONE,
    "gemm_residual_rmsnorm_bwd_lean": _NONE,
    "gemm_swiglu_bwd": _NONE,
}


def operations() -> ModuleType:
    found = version_of("quack-kernels")
    if found != _QUACK:
        raise ImportError(f"it needs quack-kernels {_QUACK}, found {found}")
    # 76 configurations compile on the first call of an operation, in processes of quack's
    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(os.cpu_count()))
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # they see no GPU and would build for another one
    from coda.core.gemm import functional

    return functional


def _swiglu(ops, a, b, operands, *, outputs: tuple[str, ...]) -> Prepared:
    def read(raw):
        return {n: t for n, t in zip(("z", "y"), raw, strict=True) if n in outputs}

    return Prepared(lambda: ops.gemm_swiglu(a, b), read)


def _rope(ops, a, b, operands) -> Prepared:
    turns = operands["freq"].double()
    # radians, the same for both columns of a pair
    freq = (2.0 * math.pi * (turns[0::2] + turns[1::2])).float().repeat_interleave(2)
    # fp32 angles by the fast sine: looser than the rounding of 16-bit outputs
    return Prepared(lambda: ops.gemm_rope(a, b, operands["position"], freq), lambda o: {"o": o}, limit=0.1)


def _cross_entropy(ops, a, b, operands) -> Prepared:
    target = operands["target"].long()[:, None]

    def call():
        z, lse = ops.gemm_lse(a, b)
        return {"z": z, "lse": lse, "logit": z.gather(1, target)[:, 0]}

    return Prepared(call, lambda raw: raw)


# its launches overlap and it has no switch for that (programmatic dependent launch): said beside each time
WAYS = {
    "gemm_swiglu": {"gemm_swiglu, overlapping launches": partial(_swiglu, outputs=("z", "y"))},
    "gemm_swiglu_lean": {"gemm_swiglu, which stores z too, overlapping launches": partial(_swiglu, outputs=("y",))},
    "gemm_rope_lean": {"gemm_rope, overlapping launches": _rope},
    "gemm_cross_entropy": {"gemm_lse, gather, overlapping launches": _cross_entropy},
}
