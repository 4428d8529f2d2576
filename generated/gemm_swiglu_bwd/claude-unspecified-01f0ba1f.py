"""Backward of SwiGLU around the input-gradient GEMM; the activation is recomputed.

dy = A B^T;  (g, u) = (z[2j], z[2j+1])
dz = (dy u silu'(g), dy silu(g));  y = silu(g) u
zdz[m] = sum z dz = sum dy u (g silu'(g) + silu(g))
"""

from primitives import ColVecReduce, TileLoad, TileStore, dsilu, epilogue, fma, pack, silu, unpack


@epilogue(
    z=TileLoad(width=2),
    dz=TileStore(width=2),
    y=TileStore(),
    zdz=ColVecReduce(product=True),
    pairs="tile",
)
def gemm_swiglu_bwd(acc, z):
    g, u = unpack(z)
    s = silu(g)
    d = dsilu(g)
    dyu = acc * u
    return {"dz": pack(dyu * d, acc * s), "y": s * u, "zdz": (dyu, fma(g, d, s))}
