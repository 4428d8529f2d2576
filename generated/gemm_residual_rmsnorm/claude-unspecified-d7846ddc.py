"""GEMM + residual + RMSNorm statistic; the norm's row scale is deferred.

h = A B + residual;  sumsq[m] = sum_n h^2;  y = h * weight
"""

from primitives import ColVecReduce, RowVecLoad, TileLoad, TileStore, epilogue


@epilogue(
    residual=TileLoad(),
    weight=RowVecLoad(),
    h=TileStore(),
    sumsq=ColVecReduce(product=True),
    y=TileStore(),
)
def gemm_residual_rmsnorm(acc, residual, weight):
    h = acc + residual
    return {"h": h, "sumsq": (h, h), "y": h * weight}
