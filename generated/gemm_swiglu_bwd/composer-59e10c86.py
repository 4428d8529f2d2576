"""Backward of SwiGLU around the input-gradient GEMM; the activation is recomputed.

dy = A B^T;  (g, u) = (z[2j], z[2j+1]);  s = sigmoid(g)
dz[2j] = dy u s (1 + g (1 - s));  dz[2j+1] = dy silu(g)
y = silu(g) u;  zdz[m] = sum over both lanes of z dz
"""

from primitives import ColVecReduce, dsilu, epilogue, pack, silu, TileLoad, TileStore, unpack


@epilogue(
    z=TileLoad(width=2),
    dz=TileStore(width=2),
    y=TileStore(),
    zdz=ColVecReduce(),
    pairs="tile",
)
def gemm_swiglu_bwd(acc, z):
    gate, up = unpack(z)
    dgate = acc * up * dsilu(gate)
    dup = acc * silu(gate)
    dz_ = pack(dgate, dup)
    y = silu(gate) * up
    zdz = gate * dgate + up * dup
    return {"dz": dz_, "y": y, "zdz": zdz}
