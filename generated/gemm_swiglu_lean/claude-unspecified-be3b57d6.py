"""GEMM + SwiGLU without the pre-activation: (g, u) = adjacent pairs of acc, y = silu(g) * u."""
from primitives import TileStore, epilogue, silu, unpack

@epilogue(y=TileStore(width=1 / 2), pairs="acc")
def gemm_swiglu_lean(acc):
    gate, up = unpack(acc)
    return {"y": silu(gate) * up}
