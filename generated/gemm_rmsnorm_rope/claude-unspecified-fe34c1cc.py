"""GEMM + deferred RMSNorm + RoPE, pre-rotation values kept.

d = (A B) * rstd[m]
o[2i]   =  d[2i] cos + d[2i+1] sin        (rotation by -theta)
o[2i+1] = -d[2i] sin + d[2i+1] cos        cos, sin = cos_sin[2i], cos_sin[2i+1]
"""

from primitives import ColVecLoad, epilogue, pack, TileLoad, TileStore, unpack


@epilogue(rstd=ColVecLoad(), cos_sin=TileLoad(), d=TileStore(), o=TileStore(), pairs="acc")
def gemm_rmsnorm_rope(acc, rstd, cos_sin):
    d = acc * rstd
    x, y = unpack(d)
    cos, sin = unpack(cos_sin)
    o = pack(x * cos + y * sin, y * cos - x * sin)
    return {"d": d, "o": o}
