"""The vocabulary of kernel files: declarations, pairs and elementwise maths.

A kernel file imports from here and from nowhere else. Five families:
elementwise maps (``maths``), vector loads, tile loads/stores, tile reductions,
stateful transforms. ``primitives/docs`` has one page per primitive.
"""

from typing import Any

from .declare import (
    ColVecLoad,
    ColVecReduce,
    ColVecSelect,
    DeclarationError,
    HeadRstd,
    Kind,
    OnlineLSEReduce,
    Program,
    RowVecLoad,
    RowVecReduce,
    Scalar,
    TileLoad,
    TileStore,
    epilogue,
)
from .maths import (
    dgelu,
    dgelu_tanh,
    drelu,
    drelu_sq,
    dsigmoid,
    dsilu,
    dsoftplus,
    dtanh,
    erf,
    exp,
    exp2,
    fabs,
    fma,
    gelu,
    gelu_tanh,
    log,
    maximum,
    minimum,
    primitive,
    rcp,
    relu,
    relu_sq,
    rotary_cos_sin,
    rsqrt,
    sigmoid,
    sigmoid_approx,
    silu,
    silu_approx,
    softplus,
    sqrt,
    tanh,
    where,
)
from .pairs import Pair, pack, unpack

KINDS = (
    "RowVecLoad", "ColVecLoad", "Scalar", "TileLoad", "HeadRstd",
    "TileStore", "ColVecReduce", "RowVecReduce", "OnlineLSEReduce", "ColVecSelect",
)  # fmt: skip
MATHS = (
    "exp", "exp2", "log", "sqrt", "rsqrt", "rcp", "fabs", "tanh", "erf", "sigmoid",
    "sigmoid_approx", "silu", "silu_approx", "gelu", "gelu_tanh", "relu", "relu_sq", "softplus",
    "dtanh", "dsigmoid", "dsilu", "dgelu", "dgelu_tanh", "drelu", "drelu_sq", "dsoftplus",
    "minimum", "maximum", "fma", "where", "rotary_cos_sin",
)  # fmt: skip
VOCABULARY = frozenset(KINDS) | frozenset(MATHS) | {"epilogue", "pack", "unpack", "primitive", "cute"}

__all__ = sorted(VOCABULARY - {"cute"}) + ["DeclarationError", "Kind", "Pair", "Program"]


def __getattr__(name: str) -> Any:
    if name == "cute":
        from . import maths

        return maths.cute
    raise AttributeError(f"primitives has no {name!r}; kernel files may import {sorted(VOCABULARY)}")
