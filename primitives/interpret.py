"""The interpreter: run a program on CPU tensors the way the device runs it.

Tile by tile, fp32 accumulation, one rounding at each declared store, per-tile
partials of every reduction. Ragged tiles are padded as the hardware pads them:
the accumulator and TMA-loaded tiles with zeros, vectors with NaN (the device
leaves stale shared memory there), so a result that leans on the padding shows.
"""

from __future__ import annotations

from typing import Any, Mapping

import torch

from . import declare
from .declare import Kind, Program
from .pairs import Pair
from .shapes import finish, partial_shape, shape_of


class OperandError(ValueError):
    """An operand is missing or has the wrong shape."""


def interpret(
    program: Program,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype],
    tile: tuple[int, int] = (128, 128),
    compute: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Outputs of the program for ``a (M, K) @ b (K, N)``.

    Args:
        operands: tensors (and floats for ``Scalar``) by name; index operands of
            a ``ColVecSelect`` included.
        dtypes: dtype of each output; reductions are fp32.
        tile: CTA tile ``(tile_m, tile_n)``, which decides the order of partial sums.
        compute: fp32 as on the device; fp64 shows how much of an error is rounding.

    Raises:
        OperandError: an operand is missing or has the wrong shape.
        DeclarationError: the function returns other outputs than declared.
    """
    m, n = a.shape[0], b.shape[1]
    _check_operands(program, operands, m, n)
    # fp32 means fp32, whatever the calling process switched on: with "medium" PyTorch multiplies
    # fp32 matrices in bf16 on CPUs that can, and autocast does so on every CPU
    torch.set_float32_matmul_precision("highest")
    with torch.autocast(a.device.type, enabled=False):
        return _interpret(program, a, b, operands, dtypes, tile, compute)


def _interpret(program, a, b, operands, dtypes, tile, compute) -> dict[str, torch.Tensor]:
    m, n = a.shape[0], b.shape[1]
    tile_m, tile_n = tile
    acc = a.to(compute) @ b.to(compute)
    stores = {
        name: torch.empty(shape_of(kind, m, n), dtype=dtypes[name])
        for name, kind in program.tile_stores.items()
    }
    partials = {
        name: torch.full(partial_shape(kind, m, n, tile_m, tile_n), float("nan"), dtype=compute)
        for name, kind in program.sinks.items()
    }
    for i, row in enumerate(range(0, m, tile_m)):
        for j, col in enumerate(range(0, n, tile_n)):
            box = (row, min(row + tile_m, m), col, min(col + tile_n, n))
            _run_tile(program, acc, operands, box, tile, (i, j), compute, stores, partials)
    return {**stores, **{name: finish(program.outputs[name], p) for name, p in partials.items()}}


def _check_operands(program: Program, operands: Mapping[str, Any], m: int, n: int) -> None:
    for name, kind in program.operands.items():
        if isinstance(kind, declare.HeadRstd):
            continue
        if name not in operands:
            raise OperandError(f"operand {name!r} ({kind.label}) is missing")
        want = shape_of(kind, m, n)
        got = tuple(getattr(operands[name], "shape", ()))
        if got != want:
            raise OperandError(f"operand {name!r} ({kind.label}) must have shape {want}, got {got}")
    for name in program.index_operands:
        got = tuple(getattr(operands.get(name), "shape", ()))
        if got != (m,):
            raise OperandError(f"index operand {name!r} must have shape {(m,)}, got {got}")


def _run_tile(program, acc, operands, box, tile, ij, compute, stores, partials) -> None:
    r0, r1, c0, c1 = box
    (tile_m, tile_n), (i, j) = tile, ij
    acc_tile = _pad(acc[r0:r1, c0:c1], tile_m, tile_n)
    paired = program.pairs == "acc"
    arguments = {
        name: _operand_tile(kind, operands.get(name), acc_tile, box, tile, paired, compute)
        for name, kind in program.operands.items()
    }
    value = program.result(program.fn(_paired(acc_tile) if paired else acc_tile, **arguments))
    rows, cols = r1 - r0, c1 - c0
    for name, out in stores.items():
        width = program.outputs[name].width
        full = _spread(value[name], tile_m, tile_n, width, program.pairs)
        a, b = int(c0 * width), int(c1 * width)
        out[r0:r1, a:b] = full[:rows, : b - a].to(out.dtype)
    for name, kind in program.sinks.items():
        inside = _sink_values(value[name], kind, tile, program.pairs)[:rows, :cols]
        if isinstance(kind, declare.ColVecSelect):
            hit = operands[kind.index][r0:r1].long() - c0
            ok = (hit >= 0) & (hit < cols)
            partials[name][r0:r1][ok] = inside[ok, hit[ok]]
        elif isinstance(kind, declare.OnlineLSEReduce):
            partials[name][r0:r1, j] = torch.logsumexp(inside, dim=1)
        elif isinstance(kind, declare.ColVecReduce):
            partials[name][r0:r1, j] = _fold(inside, kind.combine, 1)
        else:
            partials[name][i, c0:c1] = _fold(inside, kind.combine, 0)


def _pad(t: torch.Tensor, rows: int, cols: int, fill: float = 0.0) -> torch.Tensor:
    out = t.new_full((rows, cols), fill)
    out[: t.shape[0], : t.shape[1]] = t
    return out


def _paired(t: torch.Tensor) -> Pair:
    return Pair(t[:, 0::2], t[:, 1::2])


def _operand_tile(kind: Kind, value, acc_tile, box, tile, paired: bool, compute):
    r0, r1, c0, c1 = box
    tile_m, tile_n = tile
    if isinstance(kind, declare.Scalar):
        return torch.tensor(float(value), dtype=compute)
    if isinstance(kind, declare.HeadRstd):
        heads = acc_tile.reshape(tile_m, -1, kind.head_dim)
        rstd = torch.rsqrt(heads.square().mean(-1, keepdim=True) + kind.eps)
        t = rstd.expand_as(heads).reshape(tile_m, tile_n)
        return _paired(t) if paired else t
    if isinstance(kind, declare.ColVecLoad):
        return _pad(value[r0:r1, None].to(compute), tile_m, 1, float("nan"))
    if isinstance(kind, declare.RowVecLoad):
        t = _pad(value[None, c0:c1].to(compute), 1, tile_n, float("nan"))
        return _paired(t) if paired else t
    w = kind.width
    t = _pad(value[r0:r1, c0 * w : c1 * w].to(compute), tile_m, tile_n * w)
    return _paired(t) if paired or w == 2 else t


def _spread(value, tile_m: int, tile_n: int, width: float, pairs: str | None) -> torch.Tensor:
    """A returned value as a dense ``(tile_m, tile_n * width)`` tensor."""
    if isinstance(value, Pair):
        if pairs is None or width == 0.5 or (pairs == "tile" and width == 1):
            per = "pair" if width == 0.5 else "element"
            raise declare.DeclarationError(f"a store of one value per {per} got a pair; unpack() it first")
        half = tile_n if width == 2 else tile_n // 2
        lanes = [_dense(v, tile_m, half) for v in value]
        return torch.stack(lanes, dim=-1).reshape(tile_m, 2 * half)
    if isinstance(value, tuple):
        raise declare.DeclarationError("a store got a tuple; return one value, or pack(a, b) for a pair")
    if (pairs == "acc" and width == 1) or width == 2:
        raise declare.DeclarationError("a store of pairs got a single value; return pack(a, b)")
    return _dense(value, tile_m, int(tile_n * width))


def _dense(value, rows: int, cols: int) -> torch.Tensor:
    t = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    return t.expand(rows, cols)


def _sink_values(value, kind: Kind, tile, pairs: str | None) -> torch.Tensor:
    tile_m, tile_n = tile
    if isinstance(value, Pair) != (pairs == "acc"):
        need = "a pair (one value per column)" if pairs == "acc" else "one value, not a pair"
        raise declare.DeclarationError(f"{kind.label} needs {need}")
    if getattr(kind, "product", False):
        if not (isinstance(value, tuple) and len(value) == 2):
            raise declare.DeclarationError(f"{kind.label}(product=True) needs two factors (a, b)")
        return _dense(value[0], tile_m, tile_n) * _dense(value[1], tile_m, tile_n)
    if isinstance(value, tuple) and not isinstance(value, Pair):
        raise declare.DeclarationError(f"{kind.label}: return one value, or declare product=True")
    return _spread(value, tile_m, tile_n, 1, pairs)


def _fold(t: torch.Tensor, combine: str, axis: int) -> torch.Tensor:
    if combine == "add":
        return t.sum(axis)
    return (t.abs() if combine == "max_abs" else t).amax(axis)
