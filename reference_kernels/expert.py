"""The expert-written ("human") kernels: which epilogue of quack's library computes which task.

``quack.epilogue`` is written by the authors of quack-kernels (Han Guo, Tri Dao). A task is listed when one of its epilogues computes it, or computes part of it
(then ``covers`` says which outputs). gemm_rmsnorm, gemm_rmsnorm_rope and
gemm_residual_rmsnorm_bwd have no counterpart there with the same contract.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Expert:
    """How a library epilogue maps onto a task.

    ``epilogue`` is ``module:name`` below ``quack.epilogue``; ``tensors`` maps quack's argument names (``D``, ``C``, operands, outputs, sinks) to
    the task's tensors; ``arguments`` are those of a factory function in the library;
    ``signs`` names operands that must be negated first (quack rotates by +theta).
    """

    epilogue: str
    tensors: dict[str, str]
    arguments: dict = field(default_factory=dict)
    signs: dict[str, str] = field(default_factory=dict)

    def covers(self, outputs) -> list[str]:
        return [o for o in outputs if o in self.tensors.values()]


EXPERTS: dict[str, Expert] = {
    "gemm_rope": Expert("library:rope_epi", {"table": "cos_sin", "D": "o"}, signs={"cos_sin": "odd"}),
    "gemm_rope_lean": Expert("rotary:rope_posfreq_epi", {"pos": "position", "freq": "freq", "D": "o"}, signs={"position": "all"}
    ),
    "gemm_swiglu": Expert("library:swiglu_mod", {"D": "z", "postact": "y"}),
    "gemm_swiglu_lean": Expert("library:swiglu_mod", {"postact": "y"}),
    "gemm_cross_entropy": Expert("library:lse_target_epi", {"D": "z", "lse": "lse", "target_logit": "logit", "target": "target"}
    ),
    "gemm_residual_rmsnorm": Expert("library:rms_partial_epi", {"C": "residual", "weight": "weight", "D": "y", "resid_out": "h", "sqsum": "sumsq"}
    ),
    "gemm_rmsnorm_swiglu": Expert("library:norm_act_mod",
        {"mColVecBroadcast": "rstd", "D": "z", "mAuxOut": "y"},
        arguments={"activation": "swiglu", "gated": True, "has_c": False, "has_rowvec": False, "has_colvec": True},
    ),
    "gemm_rmsnorm_swiglu_lean": Expert("library:rstd_swiglu_epi", {"rstd": "rstd", "postact": "y"}),
    "gemm_rmsnorm_rope_lean": Expert("rotary:rstd_rope_posfreq_epi",
        {"pos": "position", "freq": "freq", "rstd": "rstd", "D": "o"},
        signs={"position": "all"},
    ),
    "gemm_rmsnorm_cross_entropy": Expert("library:rstd_lse_epi", {"rstd": "rstd", "D": "z", "lse": "lse"}),
    "gemm_rmsnorm_cross_entropy_lean": Expert("library:rstd_lse_epi", {"rstd": "rstd", "lse": "lse"}),
    "gemm_residual_rmsnorm_bwd_lean": Expert("library:rms_bwd_apply_epi",
        {"C": "dx_in", "y": "x", "w": "weight", "corr": "correction", "D": "dx", "dw": "dweight"},
    ),
    "gemm_swiglu_bwd": Expert("library:dswiglu_dpreact_mod", {"C": "z", "D": "dz", "postact": "y", "dsum": "zdz"}),
}


def signed(operand: Tensor, which: str | None) -> Tensor:
    """Apply an expert's sign convention: negate ``"all"`` elements or the ``"odd"`` columns."""
    if which is None:
        return operand
    if which == "all":
        return -operand
    flipped = operand.clone()
    flipped[..., 1::2] = -flipped[..., 1::2]
    return torch.as_tensor(flipped)
