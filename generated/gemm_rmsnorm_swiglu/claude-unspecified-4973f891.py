"""GEMM + deferred RMSNorm + SwiGLU, pre-activation kept.

z = (A B) * rstd[m];  (g, u) = (z[2j], z[2j+1])
y[j] = silu(g) u
"""

from primitives import ColVecLoad, TileStore, epilogue, silu, unpack


@epilogue(rstd=ColVecLoad(), z=TileStore(), y=TileStore(width=1 / 2), pairs="acc")
def gemm_rmsnorm_swiglu(acc, rstd):
    z = acc * rstd
    gate, up = unpack(z)
    return {"z": z, "y": silu(gate) * up}
