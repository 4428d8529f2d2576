"""Backward of residual + RMSNorm around the input-gradient GEMM.

dn = A B^T;  xhat = x * rstd[m]
dx = dx_in + (dn * weight - xhat * zdz[m]) * rstd[m]     (zdz[m] = mean_n n dn, from one GEMM earlier)
n = xhat * weight;  dweight[n] = sum_m dn * xhat
"""

from primitives import ColVecLoad, epilogue, RowVecLoad, RowVecReduce, TileLoad, TileStore


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
    t = acc * weight
    c = xhat * zdz
    e = t - c
    g = e * rstd
    dx = g + dx_in
    n = xhat * weight
    return {"dx": dx, "n": n, "dweight": (acc, xhat)}
