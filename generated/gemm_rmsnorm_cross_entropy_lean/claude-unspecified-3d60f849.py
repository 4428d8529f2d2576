"""LM head + deferred RMSNorm + cross-entropy statistics, logits never stored (evaluation).

z = (A B) * rstd[m];  lse[m] = log sum_n exp(z[m, n]);  logit[m] = z[m, target[m]]
"""

from primitives import ColVecLoad, ColVecSelect, epilogue, OnlineLSEReduce


@epilogue(rstd=ColVecLoad(), logit=ColVecSelect(index="target"), lse=OnlineLSEReduce())
def gemm_rmsnorm_cross_entropy_lean(acc, rstd):
    z = acc * rstd
    return {"logit": z, "lse": z}
