"""Lower a :class:`Program` to a quack GEMM kernel and compile it to an object file.

The mainloop (wgmma + TMA, persistent, warp specialised) is quack's and is never
touched. This module declares the epilogue operations quack needs for the
program's operands and outputs, binds the traced function, and compiles for
sm_90a. Nothing here launches anything, so no GPU is needed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Optional

from . import arch  # noqa: F401  (pins the target before cutlass is imported)

import cutlass.cute as cute
import torch
from quack.cute_dsl_utils import mlir_namedtuple, torch2cute_dtype_map
from quack.epilogue import ops as quack_ops
from quack.epilogue.head_rmsnorm import HeadRstd as QuackHeadRstd
from quack.gemm_runtime import host
from quack.gemm_runtime.identity import static_gemm_class_ref
from quack.gemm_sm90 import GemmSm90
from quack.rounding import RoundingMode

from .. import declare
from ..declare import Program
from ..pairs import Pair
from .visit import (
    BoundedColVecReduce,
    BoundedRowVecReduce,
    ProgramVisitor,
    ZeroTailColVecLoad,
    ZeroTailRowVecLoad,
)

SYMBOL = "func"  # exported name inside every object file
# No programmatic dependent launch: back-to-back calls would overlap and look faster than one call.
LAUNCH = (("use_pdl", False),)


@dataclass(frozen=True)
class Config:
    """One mainloop configuration (CUTLASS terms); what autotuning chooses among."""

    tile_m: int = 128
    tile_n: int = 128
    cluster_m: int = 2
    cluster_n: int = 1
    pingpong: bool = True
    max_swizzle_size: int = 8


class LoweringError(ValueError):
    """The program is well formed but this configuration or dtype cannot run it."""


def d_output(program: Program) -> str | None:
    """Which TileStore becomes the GEMM's own D store: the first of the accumulator's width."""
    width = 2 if program.pairs == "tile" else 1
    return next((n for n, k in program.tile_stores.items() if k.width == width), None)


def c_operand(program: Program) -> str | None:
    """The width-2 TileLoad, which crosses as the GEMM's C operand."""
    return next(
        (n for n, k in program.operands.items() if isinstance(k, declare.TileLoad) and k.width == 2),
        None,
    )


def _operand_op(name: str, kind: declare.Kind, reduces: bool) -> tuple[str, quack_ops.EpiOp | None]:
    if isinstance(kind, declare.RowVecLoad):
        return "row", (ZeroTailRowVecLoad if reduces else quack_ops.RowVecLoad)(name)
    if isinstance(kind, declare.ColVecLoad):
        return "col", (ZeroTailColVecLoad if reduces else quack_ops.ColVecLoad)(name)
    if isinstance(kind, declare.Scalar):
        return "scalar", quack_ops.Scalar(name)
    if isinstance(kind, declare.HeadRstd):
        return "value", QuackHeadRstd(name, eps=kind.eps)
    return ("c", None) if kind.width == 2 else ("tile", quack_ops.TileLoad(name))


def zero_outside(program: Program, name: str) -> bool:
    """True when sink ``name`` gets exactly 0 from elements outside the matrix on its reduced axis.

    Outside, the accumulator, matrices and the vector along that axis are zero; the
    other vector and the scalars are not. The function is evaluated on CPU for many
    values of those. Zero is the identity of "add" and "max_abs", so no mask is needed.
    """
    along_n = isinstance(program.outputs[name], declare.ColVecReduce)
    some = torch.randn(512, 1, generator=torch.Generator().manual_seed(0))
    some = torch.cat([some, 100.0 * some, 1e-3 * some])
    zero = torch.zeros_like(some)
    paired = program.pairs == "acc"

    def argument(kind: declare.Kind):
        if isinstance(kind, declare.ColVecLoad):
            return some if along_n else zero
        if isinstance(kind, declare.RowVecLoad):
            value = zero if along_n else some
        elif isinstance(kind, declare.TileLoad):
            value = zero
        else:  # Scalar, HeadRstd
            value = some.abs()
        is_pair = not isinstance(kind, declare.Scalar) and (paired or getattr(kind, "width", 1) == 2)
        return Pair(value, value) if is_pair else value

    arguments = {n: argument(k) for n, k in program.operands.items()}
    value = program.result(program.fn(Pair(zero, zero) if paired else zero, **arguments))[name]
    if program.outputs[name].product:
        value = value[0] * value[1]
    return all(bool((torch.as_tensor(v) == 0).all()) for v in Pair.lanes(value))


def _sink_op(program: Program, name: str, kind: declare.Kind, index_ops: dict) -> quack_ops.EpiOp:
    if isinstance(kind, declare.OnlineLSEReduce):
        return quack_ops.OnlineLSEReduce(name)
    if isinstance(kind, declare.ColVecSelect):
        return quack_ops.ColVecSelect(name, idx_op=index_ops[kind.index])
    column = isinstance(kind, declare.ColVecReduce)
    if kind.combine == "max" or zero_outside(program, name):  # quack masks max itself
        cls = quack_ops.ColVecReduce if column else quack_ops.RowVecReduce
    else:
        cls = BoundedColVecReduce if column else BoundedRowVecReduce
    return cls(name, combine=kind.combine, scaled=kind.product)


def _traced_function(program: Program, d_name: str | None):
    """Adapt the author's function to quack's contract: our pairs in, ``"D"`` out."""

    def traced(acc, **operands):
        ours = {n: Pair(*v) if type(v).__name__ == "Pair" else v for n, v in operands.items()}
        result = dict(program.result(program.fn(acc, **ours)))
        if d_name is not None:
            result["D"] = result.pop(d_name)
        return result

    return traced


def _sample(op: quack_ops.EpiOp, kind: declare.Kind | None, dtype: torch.dtype):
    """A tiny value with the dtype and rank that the launch will pass for this operation."""
    if isinstance(kind, declare.Scalar):
        return 1.0
    if isinstance(kind, declare.HeadRstd):
        return kind.head_dim
    if isinstance(kind, (declare.TileLoad, declare.TileStore)):
        return torch.empty(8, 16, dtype=dtype)
    if isinstance(kind, (declare.ColVecReduce, declare.RowVecReduce, declare.OnlineLSEReduce)):
        return torch.empty(8, 2, dtype=torch.float32)
    return torch.empty(8, dtype=dtype)


class Lowered(NamedTuple):
    """A program bound to dtypes: the GEMM class and how its arguments are ordered."""

    gemm_class: type
    fields: tuple[str, ...]  # epilogue argument names in call order (two trailing split-K slots follow)
    epi_keys: tuple
    d: str | None
    c: str | None


def lower(program: Program, dtypes: dict[str, torch.dtype]) -> Lowered:
    """Bind ``program`` to the dtypes of its operands and outputs.

    Args:
        dtypes: torch dtype of every operand and output by name.

    Raises:
        LoweringError: a dtype the hardware path cannot take.
    """
    d_name, c_name = d_output(program), c_operand(program)
    kinds = {**program.operands, **program.outputs}
    operand_sig, ops = [], []
    reduces = any(isinstance(k, (declare.ColVecReduce, declare.RowVecReduce)) for k in program.sinks.values())
    for name, kind in program.operands.items():
        visit_kind, op = _operand_op(name, kind, reduces)
        operand_sig.append((name, visit_kind))
        if op is not None:
            ops.append(op)
    aux = [n for n in program.tile_stores if n != d_name]
    for name in aux:
        half = program.tile_stores[name].width == 0.5
        if half and dtypes[name].itemsize != 2:
            raise LoweringError(f"output {name!r}: a half-width store must be 16-bit, got {dtypes[name]}")
        ops.append(quack_ops.TileStore(name, gated=half))
    index_ops = {n: quack_ops.ColVecLoad(n) for n in program.index_operands}
    sinks = [_sink_op(program, n, k, index_ops) for n, k in program.sinks.items()]
    ops += sinks + list(index_ops.values())

    samples = {op.name: _sample(op, kinds.get(op.name), dtypes.get(op.name, torch.float32)) for op in ops}
    specs = [
        (op.name, op.arg_spec_type(const=op.host_arg_form(samples[op.name]) == "Const")) for op in ops
    ]
    specs += [("split_k_semaphore", Optional[cute.Tensor]), ("split_k_workspace", Optional[cute.Tensor])]
    arguments = NamedTuple("EpilogueArguments", specs)
    arguments.__new__.__defaults__ = (None,) * len(specs)
    arguments = mlir_namedtuple(arguments)
    arguments.add_to_output = False

    heads = [n for n, k in program.operands.items() if isinstance(k, declare.HeadRstd)]
    prepass = (lambda acc: {n: acc * acc for n in heads}) if heads else None
    name = f"Gemm_{program.name}"
    gemm_class = type(
        name,
        (ProgramVisitor, GemmSm90),
        {
            "_epi_ops": tuple(ops),
            "_epi_mod_fn": staticmethod(_traced_function(program, d_name)),
            "_epi_mod_operands": tuple(operand_sig),
            "_epi_mod_outputs": tuple(aux),
            "_full_width_outputs": tuple(n for n in aux if program.tile_stores[n].width == 1),
            "_epi_mod_sinks": tuple(op.name for op in sinks),
            "_index_operands": tuple(index_ops),
            "_epi_mod_group_n": 2 if program.pairs == "acc" else 1,
            "_epi_mod_packed_cd": program.pairs == "tile",
            "_epi_mod_prepass_fn": staticmethod(prepass) if prepass else None,
            "_epi_mod_prepass_operands": (),
            "_epi_mod_prepass_outs": tuple(heads),
            "_epi_mod_rounding": RoundingMode.RN,
            "_epi_mod_vectorize": None,
            "_extra_param_fields": (
                ("split_k_semaphore", Optional[cute.Tensor], None),
                ("split_k_workspace", Optional[cute.Tensor], None),
            ),
            "EpilogueArguments": arguments,
            "__module__": __name__,
            "__qualname__": name,
        },
    )
    globals()[name] = gemm_class  # quack resolves the class by module and name
    keys = [(op.name, op.host_arg_key(samples[op.name])) for op in ops]
    return Lowered(gemm_class, tuple(op.name for op in ops), tuple(sorted(keys, key=lambda k: k[0])), d_name, c_name)


def check_config(program: Program, config: Config) -> None:
    """Reject configurations this program cannot run on Hopper.

    Raises:
        LoweringError: with the reason.
    """
    if program.pairs == "acc" and config.tile_n % 32:
        raise LoweringError(f"tile_n={config.tile_n}: paired columns need a multiple of 32")
    if config.tile_m == 192 and config.tile_n >= 192 and not config.pingpong and program.sinks:
        raise LoweringError("tile 192xN>=192 without ping-pong splits warps along N; row reductions assume whole rows")
    for name, kind in program.operands.items():
        if isinstance(kind, declare.HeadRstd) and config.tile_n % kind.head_dim:
            raise LoweringError(f"{name}: tile_n={config.tile_n} is not a multiple of head_dim={kind.head_dim}")


def compile_object(
    program: Program,
    dtypes: dict[str, torch.dtype],
    act: torch.dtype,
    config: Config,
    path: Path,
    b_major: str = "n",
) -> dict:
    """Compile ``program`` for sm_90a and write the object file to ``path``.

    Args:
        dtypes: dtype of every operand and output; ``act`` is the dtype of A and B.
        b_major: ``"n"`` when B is stored ``(K, N)``, ``"k"`` when stored ``(N, K)``.

    Returns:
        The launch part of the manifest: argument order and configuration. Sizes
        are not part of it, one object serves every M, N and K.
    """
    check_config(program, config)
    low = lower(program, dtypes)
    packed = program.pairs == "tile"
    d_dtype = torch2cute_dtype_map[dtypes[low.d]] if low.d else None
    c_dtype = torch2cute_dtype_map[dtypes[low.c]] if low.c else None
    compiled = host._compile_gemm_epi.__wrapped__(
        static_gemm_class_ref(low.gemm_class),
        (9, 0),
        torch2cute_dtype_map[act],
        torch2cute_dtype_map[act],
        d_dtype,
        c_dtype,
        "k",
        b_major,
        "n" if low.d else None,
        "n" if low.c else None,
        (config.tile_m, config.tile_n),
        (config.cluster_m, config.cluster_n, 1),
        config.pingpong,
        True,  # persistent
        False,  # static scheduler
        False,
        False,
        False,  # 2-D operands
        True,  # B crosses as (K, N)
        low.epi_keys,
        packed_cd="n" if packed else None,
        post_init_attrs=LAUNCH + ((("implicit_dtype", torch2cute_dtype_map[act]),) if packed else ()),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    compiled.export_to_c(object_file_path=str(path), function_name=SYMBOL)
    storage = low.gemm_class.traced.shared_storage
    return {
        "symbol": SYMBOL,
        "fields": list(low.fields),
        "d": low.d,
        "c": low.c,
        "config": asdict(config),
        "shared_bytes": storage.size_in_bytes(),
    }
