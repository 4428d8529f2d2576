"""GEMM + SwiGLU, pre-activation kept for the backward.

z = A B;  (g, u) = (z[2j], z[2j+1])
y[j] = silu(g) u
"""

from primitives import TileStore, epilogue, silu, unpack


@epilogue(z=TileStore(), y=TileStore(width=1 / 2), pairs="acc")
def gemm_swiglu(acc):
    gate, up = unpack(acc)
    return {"z": acc, "y": silu(gate) * up}
