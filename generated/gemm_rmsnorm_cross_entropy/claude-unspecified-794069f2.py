"""LM head + deferred RMSNorm + cross-entropy statistics.

z = (A B) * rstd[m];  lse[m] = log sum_n exp(z[m, n]);  logit[m] = z[m, target[m]]
"""

from primitives import ColVecLoad, ColVecSelect, epilogue, OnlineLSEReduce, TileStore


@epilogue(rstd=ColVecLoad(), z=TileStore(), logit=ColVecSelect(index="target"), lse=OnlineLSEReduce())
def gemm_rmsnorm_cross_entropy(acc, rstd):
    z = acc * rstd
    return {"z": z, "logit": z, "lse": z}
