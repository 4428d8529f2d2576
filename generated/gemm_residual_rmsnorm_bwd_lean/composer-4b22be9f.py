"""The same backward with rstd already folded into A and a finished correction column.

dn = A B^T
dx = dx_in + dn * weight + x * correction[m]     (A carries rstd; correction = -(rstd^2 / N) sum_n dn weight x)
dweight[n] = sum_m dn * x
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
    t = acc * weight
    r = t + dx_in
    c = x * correction
    dx = r + c
    return {"dx": dx, "dweight": (acc, x)}
