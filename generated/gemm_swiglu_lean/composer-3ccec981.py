"""GEMM + SwiGLU without the pre-activation (inference).

z = A B;  (g, u) = (z[2j], z[2j+1])
y[j] = silu(g) u
"""

from primitives import epilogue, silu, TileStore, unpack


@epilogue(y=TileStore(width=1 / 2), pairs="acc")
def gemm_swiglu_lean(acc):
    gate, up = unpack(acc)
    y = silu(gate) * up
    return {"y": y}
