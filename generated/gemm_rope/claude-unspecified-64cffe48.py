"""GEMM + RoPE, pre-rotation values kept.

d = A B
o[2i]   =  d[2i] cos + d[2i+1] sin
o[2i+1] = -d[2i] sin + d[2i+1] cos
"""

from primitives import TileLoad, TileStore, epilogue, pack, unpack


@epilogue(cos_sin=TileLoad(), d=TileStore(), o=TileStore(), pairs="acc")
def gemm_rope(acc, cos_sin):
    x, y = unpack(acc)
    cos, sin = unpack(cos_sin)
    return {"d": acc, "o": pack(x * cos + y * sin, y * cos - x * sin)}
