"""Backward of residual + RMSNorm around the input-gradient GEMM.

dn = A B^T;  xhat = x * rstd[m]
dx = dx_in + (dn * weight - xhat * zdz[m]) * rstd[m]
n = xhat * weight;  dweight[n] = sum_m dn * xhat
"""

from primitives import ColVecLoad, RowVecLoad, RowVecReduce, TileLoad, TileStore, epilogue


@epilogue(
    x=TileLoad(),
    dx_in=TileLoad(),
    weight=RowVecLoad(),
    rstd=ColVecLoad(),
    zdz=ColVecLoad(),
    dx=TileStore(),
    n=TileStore(),
    dweight=RowVecReduce(product=True),
)
def gemm_residual_rmsnorm_bwd(acc, x, dx_in, weight, rstd, zdz):
    xhat = x * rstd
    dx = dx_in + (acc * weight - xhat * zdz) * rstd
    return {"dx": dx, "n": xhat * weight, "dweight": (acc, xhat)}
