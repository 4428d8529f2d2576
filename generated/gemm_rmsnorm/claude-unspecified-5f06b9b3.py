"""GEMM + deferred RMSNorm row scale: y = (A B) * rstd[m]."""

from primitives import ColVecLoad, TileStore, epilogue


@epilogue(rstd=ColVecLoad(), y=TileStore())
def gemm_rmsnorm(acc, rstd):
    return {"y": acc * rstd}
