"""Residual RMSNorm backward, rstd folded into A, correction column finished; dn = acc.

dx = dx_in + dn * weight + x * correction[m];  dweight[n] = sum_m dn * x
"""

from primitives import ColVecLoad, epilogue, RowVecLoad, RowVecReduce, TileLoad, TileStore


@epilogue(
    x=TileLoad(),
    dx_in=TileLoad(),
    weight=RowVecLoad(),
    correction=ColVecLoad(),
    dx=TileStore(),
    dweight=RowVecReduce(product=True),
)
def gemm_residual_rmsnorm_bwd_lean(acc, x, dx_in, weight, correction):
    return {"dx": dx_in + acc * weight + x * correction, "dweight": (acc, x)}
