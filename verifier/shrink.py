"""Shrink a failing interpretation to the smallest shape and the plainest values that still fail.

What a person (and the next prompt) gets is one element with everything that went
into it, instead of a tensor statistic.
"""

from __future__ import annotations

from pathlib import Path

import torch

from primitives import declare
from reference_kernels.tasks import DTYPES, Task
from reference_kernels.truth import make_inputs, reference_of, truth_of

from .interpretation import dtype_names
from .numerics import judge_output
from .pool import Pool

# smallest first; N is a multiple of 16 so that every task admits it
SHAPES = ((1, 16, 8), (2, 16, 8), (2, 32, 8), (16, 16, 8), (16, 64, 8), (64, 64, 16), (130, 144, 16), (257, 272, 72))
STYLES = ("integers", "normal", "shifted", "tiny", "large")
_TILE = (128, 128)


def _admits(task: Task, shape: tuple[int, int, int]) -> bool:
    try:
        task.check_shape(*shape)
    except ValueError:
        return False
    return True


def shrink(task: Task, source: str, act: str, pool: Pool, seed: int, suite_path: Path | None = None) -> str:
    """One line about the smallest failing case, or an empty string when small cases all pass."""
    dtype, reference = DTYPES[act], reference_of(task, suite_path)
    plan = [(shape, style) for shape in SHAPES if _admits(task, shape) for style in STYLES]
    inputs = [make_inputs(task, shape, dtype, seed, style=style) for shape, style in plan]
    cases = [{"a": a, "b": b, "operands": o, "tile": list(_TILE)} for a, b, o in inputs]
    answer = pool.submit("interpret", source, inputs=cases, dtypes=dtype_names(task, act)).result()
    if not answer.ok:
        return ""
    outputs = torch.load(answer.directory / "outputs.pt", weights_only=True)
    for (shape, style), (a, b, operands), got in zip(plan, inputs, outputs):
        truth = truth_of(task, reference, a, b, operands, dtype)
        for name in task.outputs:
            if not judge_output(task, name, got[name], truth, style == "integers").passed:
                return _describe(task, name, shape, style, a, b, operands, got[name], truth.exact[name])
    return ""


def _describe(task, name, shape, style, a, b, operands, got, want) -> str:
    """The worst element with the accumulator and operand values it depends on."""
    error = (got.double() - want).abs().nan_to_num(torch.inf)
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    acc = a.double() @ b.double()
    kind = task.outputs[name].declared
    parts = [f"{name}{list(at)} is {float(got[at]):.6g}, must be {float(want[at]):.6g}"]
    if isinstance(kind, declare.TileStore):
        row, col = at[0], int(at[1] / kind.width)
        pair = kind.width != 1 or any(line.op.startswith("rope") for line in task.ops)
        first = (col // 2) * 2 if kind.width <= 1 and pair else col
        last = first + 2 if pair and kind.width <= 1 else col + 1
        parts.append(f"acc[{row}, {first}:{last}] = {_values(acc[row, first:last])}")
        for operand, spec in task.operands.items():
            value = operands[operand]
            if spec.dtype == "int32":
                continue
            if isinstance(spec.declared, declare.ColVecLoad):
                parts.append(f"{operand}[{row}] = {float(value[row]):.6g}")
            elif isinstance(spec.declared, declare.RowVecLoad):
                parts.append(f"{operand}[{first}:{last}] = {_values(value[first:last])}")
            elif isinstance(spec.declared, declare.TileLoad):
                lo, hi = (2 * col, 2 * col + 2) if spec.width == 2 else (first, last)
                parts.append(f"{operand}[{row}, {lo}:{hi}] = {_values(value[row, lo:hi])}")
    inputs = "whole numbers" if style == "integers" else f"{style} inputs"
    return f"smallest failing case M={shape[0]} N={shape[1]} K={shape[2]} ({inputs}): " + "; ".join(parts)


def _values(t: torch.Tensor) -> str:
    return "[" + ", ".join(f"{float(x):.6g}" for x in t) + "]"
