"""GEMM + deferred RMSNorm row scale.

y = (A B) * rstd[m]
"""

from primitives import ColVecLoad, epilogue, TileStore


@epilogue(rstd=ColVecLoad(), y=TileStore())
def gemm_rmsnorm(acc, rstd):
    y = acc * rstd
    return {"y": y}
