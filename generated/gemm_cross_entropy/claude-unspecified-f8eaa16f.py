"""LM head + cross-entropy statistics.

z = A B;  lse[m] = log sum_n exp(z[m, n]);  logit[m] = z[m, target[m]]
"""

from primitives import ColVecSelect, epilogue, OnlineLSEReduce, TileStore


@epilogue(z=TileStore(), logit=ColVecSelect(index="target"), lse=OnlineLSEReduce())
def gemm_cross_entropy(acc):
    return {"z": acc, "logit": acc, "lse": acc}
