"""GEMM + deferred RMSNorm + RoPE from positions; no table, no pre-rotation store.

d = (A B) * rstd[m];  theta = 2 pi position[m] freq[n]       freq = (hi, lo) per pair, in turns
o[2i]   =  d[2i] cos(theta) + d[2i+1] sin(theta)
o[2i+1] = -d[2i] sin(theta) + d[2i+1] cos(theta)
"""

from primitives import ColVecLoad, epilogue, pack, rotary_cos_sin, RowVecLoad, TileStore, unpack


@epilogue(rstd=ColVecLoad(), position=ColVecLoad(), freq=RowVecLoad(), o=TileStore(), pairs="acc")
def gemm_rmsnorm_rope_lean(acc, rstd, position, freq):
    x, y = unpack(acc * rstd)
    cos, sin = rotary_cos_sin(position, freq)
    o = pack(x * cos + y * sin, y * cos - x * sin)
    return {"o": o}
