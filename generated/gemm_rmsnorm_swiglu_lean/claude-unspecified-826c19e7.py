"""GEMM + deferred RMSNorm + SwiGLU without the pre-activation (inference).

z = (A B) * rstd[m];  (g, u) = (z[2j], z[2j+1])
y[j] = silu(g) u
"""

from primitives import ColVecLoad, epilogue, silu, TileStore, unpack


@epilogue(rstd=ColVecLoad(), y=TileStore(width=1 / 2), pairs="acc")
def gemm_rmsnorm_swiglu_lean(acc, rstd):
    gate, up = unpack(acc * rstd)
    return {"y": silu(gate) * up}
