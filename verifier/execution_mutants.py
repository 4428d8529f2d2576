"""Execution mutants: the right program, run by a machine that makes one mistake.

These are the faults of kernels that read correctly: a tile that is skipped, a
statistic that is stale or kept in 16 bits, a vector read along the wrong axis,
partial sums that are lost. Each runs the known-good program through the
interpreter with one wrong input, one wrong value on the way or one wrong output.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from primitives import declare
from primitives.declare import Program
from primitives.interpret import interpret
from primitives.shapes import finish, partial_shape
from reference_kernels.tasks import DTYPES, Task

Outputs = dict[str, Tensor]
_REDUCES = (declare.ColVecReduce, declare.RowVecReduce)


class _Given:
    """Stands for A or B where the product is already known, with whatever fault it has."""

    device = torch.device("cpu")

    def __init__(self, shape: tuple[int, int], product: Tensor | None = None):
        self.shape, self.product = shape, product

    def to(self, dtype: torch.dtype) -> _Given:
        return self

    def __matmul__(self, other: _Given) -> Tensor:
        return self.product


@dataclass
class Execution:
    """One case of one program: what a fault may look at and change."""

    task: Task
    program: Program
    act: str
    case: dict

    def __post_init__(self) -> None:
        self.a, self.b, self.operands = self.case["a"], self.case["b"], self.case["operands"]
        self.tile = tuple(self.case["tile"])
        self.m, self.n = self.a.shape[0], self.b.shape[1]
        self.half = DTYPES[self.act]
        self.dtypes = self.task.torch_dtypes(self.half)

    @property
    def square(self) -> bool:
        return self.m == self.n

    def run(self, a=None, b=None, operands=None, product=None, program=None, dtypes=None) -> Outputs:
        """The interpreter's outputs, with what is given in place of the case's own."""
        a, b = self.a if a is None else a, self.b if b is None else b
        if product is not None:
            a, b = _Given(self.a.shape, product), _Given(self.b.shape)
        return interpret(
            program or self.program, a, b, {**self.operands, **(operands or {})}, dtypes or self.dtypes, tile=self.tile
        )

    def product(self) -> Tensor:
        return self.a.float() @ self.b.float()

    def unrounded(self) -> Outputs:
        """Outputs before they are rounded to their declared dtype."""
        return self.run(dtypes=dict.fromkeys(self.dtypes, torch.float32))

    def reduced_values(self, name: str) -> Tensor:
        """The (M, N) values that reduction or selection ``name`` folds, in fp32."""
        program, extra = self.program, f"{name}__values"

        def fn(acc, **operands):
            result = program.fn(acc, **operands)
            value = result[name]
            product = getattr(program.outputs[name], "product", False)
            return {**result, extra: value[0] * value[1] if product else value}

        traced = dataclasses.replace(program, fn=fn, outputs={**program.outputs, extra: declare.TileStore()})
        return self.run(program=traced, dtypes={**self.dtypes, extra: torch.float32})[extra]

    def fold(self, name: str, values: Tensor, change: Callable[[Tensor], Tensor] = lambda p: p) -> Tensor:
        """Reduce ``values`` tile by tile as the interpreter does, with a fault in the partials."""
        kind, (tm, tn) = self.program.outputs[name], self.tile
        partials = values.new_empty(partial_shape(kind, self.m, self.n, tm, tn))
        if isinstance(kind, declare.RowVecReduce):
            for i in range(partials.shape[0]):
                partials[i] = _combine(kind, values[i * tm : (i + 1) * tm], 0)
        else:
            for j in range(partials.shape[1]):
                partials[:, j] = _combine(kind, values[:, j * tn : (j + 1) * tn], 1)
        return finish(kind, change(partials))


def _combine(kind, values: Tensor, axis: int) -> Tensor:
    if isinstance(kind, declare.OnlineLSEReduce):
        return torch.logsumexp(values, axis)
    if kind.combine == "add":
        return values.sum(axis)
    return (values.abs() if kind.combine == "max_abs" else values).amax(axis)


@dataclass(frozen=True)
class ExecutionMutant:
    """``run`` gives the outputs of the faulty execution of one case."""

    operator: str
    name: str
    run: Callable[[Execution], Outputs]


def execution_mutants(task: Task, program: Program) -> list[ExecutionMutant]:
    """Every execution fault that this program's operands and outputs make possible."""
    found: list[ExecutionMutant] = []

    def add(operator: str, what: str, run: Callable, *arguments) -> None:
        found.append(ExecutionMutant(operator, f"{operator}: {what}", functools.partial(run, *arguments)))

    for what, change in _K_FAULTS.items():
        add("accumulation", what, _accumulation, change)
    if program.pairs == "acc":
        add("pairing", "pairs start at the second column", _offset_pairs)
        add("pairing", "column j paired with column j + N/2", _half_pairs)
    for name, kind in program.operands.items():
        if isinstance(kind, (declare.RowVecLoad, declare.ColVecLoad)):
            _vector_faults(add, task, name, kind)
        elif isinstance(kind, declare.TileLoad):
            for what, change in _TILE_LOAD_FAULTS.items():
                if change is _tile_transposed and kind.width != 1:
                    continue  # never square where the accumulator is
                add("tile-load", f"{name} {what}", _operand, name, change)
        elif isinstance(kind, declare.HeadRstd):
            add("statistic", f"{name} kept in 16 bits", _rounded_argument, name)
            add("statistic", f"{name} of the next head", _rolled_argument, name, kind.head_dim)
    for index, output in program.index_operands.items():
        for what, change in _INDEX_FAULTS.items():
            add("select", f"{output} {what}", _operand, index, change)
        add("select", f"{output} from the rounded values", _selected_from_rounded, output, index)
    for name, kind in program.outputs.items():
        if isinstance(kind, declare.TileStore):
            for what, change in _STORE_FAULTS.items():
                if change is _transposed and kind.width != 1:
                    continue  # never square where the accumulator is
                add("store", f"{name} {what}", _output, name, change)
            add("store", f"{name} truncated instead of rounded", _truncated, name)
            for what, change in _UNROUNDED_FAULTS.items():
                if change is _other_format and len(task.dtypes) == 1:
                    continue  # bf16 through fp16 loses nothing; fp16 through bf16 does
                add("store", f"{name} {what}", _unrounded_output, name, change)
        else:
            for what, change in _VECTOR_OUTPUT_FAULTS.items():
                add("result", f"{name} {what}", _output, name, change)
        if isinstance(kind, (*_REDUCES, declare.OnlineLSEReduce)):
            for what, run in _reduction_faults(kind):
                add("reduction", f"{name} {what}", run, name)
    for first, second in _alike(task, program):
        add("outputs", f"{first} and {second} exchanged", _exchanged, first, second)
    return found


def _alike(task: Task, program: Program) -> Iterator[tuple[str, str]]:
    names = list(program.outputs)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            a, b = task.outputs[first], task.outputs[second]
            vectors = isinstance(a.declared, declare.ROW_RESULTS) and isinstance(b.declared, declare.ROW_RESULTS)
            if vectors or (type(a.declared) is type(b.declared) and a.width == b.width and a.dtype == b.dtype):
                yield first, second


def _exchanged(first: str, second: str, x: Execution) -> Outputs:
    out = x.run()
    return {**out, first: out[second], second: out[first]}


# --- the accumulator -------------------------------------------------------------------


def _k_tail_dropped(x: Execution) -> Tensor:
    return x.a[:, :-8].float() @ x.b[:-8].float()


def _k_last_dropped(x: Execution) -> Tensor:
    return x.a[:, :-1].float() @ x.b[:-1].float()


def _k_tail_stale(x: Execution) -> Tensor:
    a = x.a.float().clone()
    a[:, -8:] = a[:, :8]
    return a @ x.b.float()


def _k_tile_twice(x: Execution) -> Tensor:
    return x.product() + x.a[:, :64].float() @ x.b[:64].float()


def _k_in_16_bits(x: Execution) -> Tensor:
    total = torch.zeros(x.m, x.n)
    for k in range(0, x.a.shape[1], 64):
        part = x.a[:, k : k + 64].float() @ x.b[k : k + 64].float()
        total = (total + part.to(x.half).float()).to(x.half).float()
    return total


def _b_transposed(x: Execution) -> Tensor:
    if x.b.shape[0] != x.b.shape[1]:
        return x.product()
    return x.a.float() @ x.b.float().mT


_K_FAULTS = {
    "the last 8 of K dropped": _k_tail_dropped,
    "the last one of K dropped": _k_last_dropped,
    "the last 8 of K stale": _k_tail_stale,
    "the first 64 of K added twice": _k_tile_twice,
    "16-bit sums every 64 of K": _k_in_16_bits,
    "B transposed when K == N": _b_transposed,
}


def _accumulation(change: Callable[[Execution], Tensor], x: Execution) -> Outputs:
    return x.run(product=change(x))


def _rolled_outputs(x: Execution, out: Outputs, columns: int) -> Outputs:
    full = [n for n, k in x.program.outputs.items() if isinstance(k, declare.TileStore) and k.width == 1]
    return {**out, **{n: out[n].roll(columns, 1) for n in full}}


def _offset_pairs(x: Execution) -> Outputs:
    return _rolled_outputs(x, x.run(product=x.product().roll(-1, 1)), 1)


def _half_pairs(x: Execution) -> Outputs:
    n = x.n // 2
    order = torch.stack((torch.arange(n), torch.arange(n) + n), 1).flatten()
    out = x.run(product=x.product()[:, order])
    for name, kind in x.program.outputs.items():
        if isinstance(kind, declare.TileStore) and kind.width == 1:
            placed = torch.empty_like(out[name])
            placed[:, order] = out[name]
            out[name] = placed
    return out


# --- operands ----------------------------------------------------------------------------


def _operand(name: str, change: Callable[[Execution, Tensor], Tensor], x: Execution) -> Outputs:
    return x.run(operands={name: change(x, x.operands[name].clone())})


def _vector_faults(add: Callable, task: Task, name: str, kind) -> None:
    along_m = isinstance(kind, declare.ColVecLoad)
    step = 2 if task.operands[name].fill == "frequency" else 1  # (hi, lo) pairs stay together
    add("vector", f"{name} read along the other axis when M == N", _other_axis, name)
    add("vector", f"{name} shifted by {step}", _operand, name, lambda x, v: v.roll(step))
    add("vector", f"{name} of the previous tile", _operand, name, functools.partial(_stale_tile, along_m))
    add("vector", f"{name} of the first tile in every tile", _operand, name, functools.partial(_first_tile, along_m))
    add("vector", f"the last of {name} lost", _operand, name, functools.partial(_last_lost, step))
    if task.operands[name].dtype == "fp32":
        add("statistic", f"{name} kept in 16 bits", _operand, name, lambda x, v: v.to(x.half).float())
    add("vector", f"{name} averaged over the tile", _operand, name, functools.partial(_tile_mean, along_m))


def _other_axis(name: str, x: Execution) -> Outputs:
    if not x.square:
        return x.run()
    kind = x.program.operands[name]
    twin = declare.RowVecLoad() if isinstance(kind, declare.ColVecLoad) else declare.ColVecLoad()
    return x.run(program=dataclasses.replace(x.program, operands={**x.program.operands, name: twin}))


def _stale_tile(along_m: bool, x: Execution, v: Tensor) -> Tensor:
    size = x.tile[0 if along_m else 1]
    stale = v.clone()
    stale[size:] = v[: max(0, v.shape[0] - size)]
    return stale


def _first_tile(along_m: bool, x: Execution, v: Tensor) -> Tensor:
    return v[torch.arange(v.shape[0]) % x.tile[0 if along_m else 1]]


def _tile_mean(along_m: bool, x: Execution, v: Tensor) -> Tensor:
    size = x.tile[0 if along_m else 1]
    return torch.cat([part.float().mean().to(v.dtype).expand(part.shape[0]) for part in v.split(size)])


def _last_lost(step: int, x: Execution, v: Tensor) -> Tensor:
    v[-step:] = 0
    return v


def _tile_rows_shifted(x: Execution, t: Tensor) -> Tensor:
    return t.roll(1, 0)


def _tile_stale_columns(x: Execution, t: Tensor) -> Tensor:
    size = x.tile[1] * t.shape[1] // x.n
    stale = t.clone()
    stale[:, size:] = t[:, : max(0, t.shape[1] - size)]
    return stale


def _tile_tail_zero(x: Execution, t: Tensor) -> Tensor:
    size = x.tile[1] * t.shape[1] // x.n
    t[:, t.shape[1] // size * size :] = 0
    return t


def _tile_transposed(x: Execution, t: Tensor) -> Tensor:
    return t.mT.contiguous() if t.shape[0] == t.shape[1] else t


def _tile_pairs_shifted(x: Execution, t: Tensor) -> Tensor:
    return t.roll(2, 1)


_TILE_LOAD_FAULTS = {
    "shifted by one row": _tile_rows_shifted,
    "shifted by one pair of columns": _tile_pairs_shifted,
    "of the previous column tile": _tile_stale_columns,
    "zero in the ragged column tile": _tile_tail_zero,
    "transposed when square": _tile_transposed,
}


def _changed_argument(x: Execution, change: Callable[[dict], dict]) -> Outputs:
    def fn(acc, **operands):
        return x.program.fn(acc, **change(operands))

    return x.run(program=dataclasses.replace(x.program, fn=fn))


def _lanes(value, change: Callable[[Tensor], Tensor]):
    return type(value)(*map(change, value)) if isinstance(value, tuple) else change(value)


def _rounded_argument(name: str, x: Execution) -> Outputs:
    return _changed_argument(x, lambda ops: {**ops, name: _lanes(ops[name], lambda t: t.to(x.half).float())})


def _rolled_argument(name: str, by: int, x: Execution) -> Outputs:
    return _changed_argument(x, lambda ops: {**ops, name: _lanes(ops[name], lambda t: t.roll(by, 1))})


# --- selection ---------------------------------------------------------------------------


def _index_clamped(x: Execution, v: Tensor) -> Tensor:
    return v.clamp(0, x.n - 1)


def _index_wrapped(x: Execution, v: Tensor) -> Tensor:
    return torch.where(v < 0, v + x.n, v)


def _index_misses_tail(x: Execution, v: Tensor) -> Tensor:
    whole = x.n // x.tile[1] * x.tile[1]
    return torch.where(v >= whole, -1, v) if whole else v


_INDEX_FAULTS = {
    "one column too far": lambda x, v: v + 1,
    "of the row above": lambda x, v: v.roll(1),
    "out of range takes the nearest column": _index_clamped,
    "a negative index counts from the end": _index_wrapped,
    "missed in the ragged column tile": _index_misses_tail,
}


def _selected_from_rounded(name: str, index: str, x: Execution) -> Outputs:
    out = x.run()
    target = x.operands[index].long()
    inside = (target >= 0) & (target < x.n)
    rounded = x.reduced_values(name).to(x.half).float()
    picked = rounded.gather(1, torch.where(inside, target, 0)[:, None])[:, 0]
    return {**out, name: torch.where(inside, picked, out[name])}


# --- stores ------------------------------------------------------------------------------


def _output(name: str, change: Callable[[Execution, Tensor], Tensor], x: Execution) -> Outputs:
    out = x.run()
    return {**out, name: change(x, out[name].clone())}


def _unrounded_output(name: str, change: Callable[[Execution, Tensor], Tensor], x: Execution) -> Outputs:
    return {**x.run(), name: change(x, x.unrounded()[name]).to(x.dtypes[name])}


def _tail(x: Execution, t: Tensor, axis: int) -> slice:
    """The last, possibly ragged, tile of a stored matrix."""
    size = x.tile[axis] * t.shape[axis] // (x.m, x.n)[axis]
    return slice((t.shape[axis] - 1) // size * size, None)


def _fill_tail(axis: int, value: float, x: Execution, t: Tensor) -> Tensor:
    t[(slice(None), _tail(x, t, axis)) if axis else (_tail(x, t, axis),)] = value
    return t


def _row_duplicated(x: Execution, t: Tensor) -> Tensor:
    t[-1] = t[-2] if t.shape[0] > 1 else t[-1]
    return t


def _strips(x: Execution, t: Tensor) -> Tensor:
    for column in range(16, t.shape[1], 32):
        width = min(16, t.shape[1] - column)
        t[:, column : column + width] = t[:, column - 16 : column - 16 + width]
    return t


def _one(value: float, x: Execution, t: Tensor) -> Tensor:
    t.reshape(-1)[-1] = value
    return t


def _tiles_exchanged(x: Execution, t: Tensor) -> Tensor:
    size = x.tile[1] * t.shape[1] // x.n
    if t.shape[1] >= 2 * size:
        t[:, : 2 * size] = t[:, : 2 * size].roll(size, 1)
    return t


def _transposed(x: Execution, t: Tensor) -> Tensor:
    return t.mT.contiguous() if t.shape[0] == t.shape[1] else t


def _other_format(x: Execution, t: Tensor) -> Tensor:
    return t.to(torch.bfloat16 if x.half == torch.float16 else torch.float16).float()


_STORE_FAULTS = {
    "left unwritten in the last row tile": functools.partial(_fill_tail, 0, float("nan")),
    "left unwritten in the last column tile": functools.partial(_fill_tail, 1, float("nan")),
    "zero in the last row tile": functools.partial(_fill_tail, 0, 0.0),
    "zero in the last column tile": functools.partial(_fill_tail, 1, 0.0),
    "repeats a row": _row_duplicated,
    "repeats every other strip of 16 columns": _strips,
    "unwritten in one element": functools.partial(_one, float("nan")),
    "zero in one element": functools.partial(_one, 0.0),
    "with its first two column tiles exchanged": _tiles_exchanged,
    "transposed when square": _transposed,
    "all zero": lambda x, t: torch.zeros_like(t),
    "its mean everywhere": lambda x, t: t.float().mean().to(t.dtype).expand_as(t).contiguous(),
}
_UNROUNDED_FAULTS = {
    "through an 8-bit format": lambda x, t: t.to(torch.float8_e5m2).float(),
    "flushed to zero below 1e-3": lambda x, t: torch.where(t.abs() < 1e-3, 0.0, t),
    "clamped to +-16": lambda x, t: t.clamp(-16, 16),
    "through the other 16-bit format": _other_format,
}


def _truncated(name: str, x: Execution) -> Outputs:
    wide = x.unrounded()[name]
    near = wide.to(x.dtypes[name])
    bits = near.view(torch.int16)
    # one step towards zero wherever rounding went away from zero
    return {**x.run(), name: torch.where(near.float().abs() > wide.abs(), bits - 1, bits).view(near.dtype)}


# --- reductions --------------------------------------------------------------------------


_VECTOR_OUTPUT_FAULTS = {
    "unwritten in one element": functools.partial(_one, float("nan")),
    "shifted by one": lambda x, t: t.roll(1),
    "rounded to 16 bits": lambda x, t: t.to(x.half).float(),
    "all zero": lambda x, t: torch.zeros_like(t),
    "wrong in its last element": lambda x, t: torch.cat((t[:-1], t[-1:] * 1.01 + 0.01)),
}


def _partials(change: Callable[[Tensor], Tensor], name: str, x: Execution) -> Outputs:
    """A fault in the per-tile partials, tiles along the last axis."""
    rows = isinstance(x.program.outputs[name], declare.RowVecReduce)

    def changed(p: Tensor) -> Tensor:
        return change(p.mT if rows else p).mT if rows else change(p)

    return {**x.run(), name: x.fold(name, x.reduced_values(name), changed)}


def _first_only(p: Tensor) -> Tensor:
    return p[:, :1]


def _last_only(p: Tensor) -> Tensor:
    return p[:, -1:]


def _last_twice(p: Tensor) -> Tensor:
    return torch.cat((p, p[:, -1:]), 1)


def _last_missing(p: Tensor) -> Tensor:
    return p[:, :-1] if p.shape[1] > 1 else p


def _values(change: Callable[[Execution, Tensor], Tensor], name: str, x: Execution) -> Outputs:
    return {**x.run(), name: x.fold(name, change(x, x.reduced_values(name)))}


def _one_column_lost(x: Execution, v: Tensor, axis: int) -> Tensor:
    v = v.clone()
    v.select(axis, -1).zero_()
    return v


def _wrong_axis(name: str, x: Execution) -> Outputs:
    if not x.square:
        return x.run()
    return {**x.run(), name: x.fold(name, x.reduced_values(name).mT)}


def _in_16_bits(name: str, x: Execution) -> Outputs:
    values = x.reduced_values(name)
    values = values.mT if isinstance(x.program.outputs[name], declare.RowVecReduce) else values
    total = torch.zeros(values.shape[0])
    for part in values.split(16, 1):
        total = (total + part.sum(1)).to(x.half).float()
    return {**x.run(), name: total}


def _other_combine(combine: str, name: str, x: Execution) -> Outputs:
    kind = x.program.outputs[name]
    values, axis = x.reduced_values(name), 0 if isinstance(kind, declare.RowVecReduce) else 1
    return {**x.run(), name: _combine(declare.ColVecReduce(combine=combine), values, axis)}


def _scaled(name: str, x: Execution) -> Outputs:
    out = x.run()
    along = x.m if isinstance(x.program.outputs[name], declare.RowVecReduce) else x.n
    return {**out, name: out[name] / along}


def _lse_unshifted(name: str, x: Execution) -> Outputs:
    return {**x.run(), name: x.reduced_values(name).exp().sum(1).log()}


def _lse_padding(name: str, x: Execution) -> Outputs:
    values = x.reduced_values(name)
    padded = torch.nn.functional.pad(values, (0, -x.n % x.tile[1]))
    return {**x.run(), name: torch.logsumexp(padded, 1)}


def _lse_stale_maximum(name: str, x: Execution) -> Outputs:
    """The running sum is not rescaled when a later tile raises the maximum."""
    values = x.reduced_values(name)
    top = torch.full((x.m,), -torch.inf)
    total = torch.zeros(x.m)
    for part in values.split(x.tile[1], 1):
        top = torch.maximum(top, part.amax(1))
        total = total + (part - top[:, None]).exp().sum(1)
    return {**x.run(), name: top + total.log()}


def _reduction_faults(kind) -> Iterator[tuple[str, Callable]]:
    axis = 0 if isinstance(kind, declare.RowVecReduce) else 1
    yield "of the first tile only", functools.partial(_partials, _first_only)
    yield "of the last tile only", functools.partial(_partials, _last_only)
    yield "without the last tile", functools.partial(_partials, _last_missing)
    yield "over the wrong axis when M == N", _wrong_axis
    yield "of values rounded to 16 bits", functools.partial(_values, lambda x, v: v.to(x.half).float())
    if isinstance(kind, declare.OnlineLSEReduce):
        yield "with the last tile counted twice", functools.partial(_partials, _last_twice)
        yield "without subtracting the maximum", _lse_unshifted
        yield "with the padding of the ragged tile counted", _lse_padding
        yield "with sums not rescaled to the new maximum", _lse_stale_maximum
        yield "the maximum only", functools.partial(_other_combine, "max")
        return
    if kind.combine == "add":
        yield "with the last tile counted twice", functools.partial(_partials, _last_twice)
        yield "accumulated in 16 bits", _in_16_bits
        yield "as a mean", _scaled
        yield "as a maximum", functools.partial(_other_combine, "max")
        yield "of magnitudes", functools.partial(_values, lambda x, v: v.abs())
        yield "without the last column or row", functools.partial(_values, lambda x, v: _one_column_lost(x, v, axis))
    else:
        yield "as a sum", functools.partial(_other_combine, "add")
        other = "max" if kind.combine == "max_abs" else "max_abs"
        yield f"as {other}", functools.partial(_other_combine, other)
