"""GEMM + RoPE from positions and frequencies; no table, no pre-rotation store.

d = A B;  theta = 2 pi position[m] freq[n]
o[2i]   =  d[2i] cos(theta) + d[2i+1] sin(theta)
o[2i+1] = -d[2i] sin(theta) + d[2i+1] cos(theta)
"""

from primitives import ColVecLoad, RowVecLoad, TileStore, epilogue, pack, rotary_cos_sin, unpack


@epilogue(position=ColVecLoad(), freq=RowVecLoad(), o=TileStore(), pairs="acc")
def gemm_rope_lean(acc, position, freq):
    x, y = unpack(acc)
    cos, sin = rotary_cos_sin(position, freq)
    return {"o": pack(x * cos + y * sin, y * cos - x * sin)}
