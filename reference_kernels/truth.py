"""Inputs of a task and the three evaluations they are judged by.

fp64 truth, the same-precision reference (fp32 arithmetic on the 16-bit inputs,
rounded once at each output), and the low-precision error that scales tolerances.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from primitives.shapes import shape_of

from . import references
from .tasks import SuiteError, Task

Tensors = dict[str, Tensor]


STYLES = ("normal", "integers", "tiny", "large", "shifted", "row_scaled", "outliers", "one_hot", "nan", "inf")


def make_inputs(
    task: Task,
    shape: tuple[int, int, int],
    act: torch.dtype,
    seed: int,
    device: str = "cpu",
    style: str = "normal",
) -> tuple[Tensor, Tensor, Tensors]:
    """A ``(M, K)``, B ``(K, N)`` (a transposed view when the task stores ``(N, K)``) and operands.

    ``normal`` is the paper's test distribution: A ~ N(0, 1), B ~ N(0, 1/K), other
    operands by the task's ``fill``. The other styles change A and the matrix and vector
    operands filled with normal numbers:

    * ``integers``: small whole numbers, for which fp32 accumulation is exact
    * ``tiny``: scaled by 0.02 (absolute tolerances must not hide errors)
    * ``large``: scaled by 8 (saturating activations, large statistics)
    * ``shifted``: mean 1 (sums that are near zero otherwise)
    * ``row_scaled``: rows scaled by powers of two from 2^-6 to 2^6
    * ``outliers``: one element in a hundred is 30 times larger, one target in eight lies outside the columns
    * ``one_hot``: one 1 per row of A, so each output row is a row of B
    * ``nan``: one NaN in A; the same row of every output must be NaN, no other
    * ``inf``: one +inf and one -inf in A, in different rows where there are two; see ``Task.special_values``
    """
    if style not in STYLES:
        raise ValueError(f"no input style {style!r}; there are {STYLES}")
    m, n, k = shape
    gen = torch.Generator(device=device).manual_seed(seed)
    integers = style == "integers"

    def normal(*size: int) -> Tensor:
        if integers:
            return torch.randint(-2, 3, size, generator=gen, device=device).float()
        return torch.randn(size, generator=gen, device=device)

    def styled(t: Tensor) -> Tensor:
        if style == "tiny":
            return t * 0.02
        if style == "large":
            return t * 8.0
        if style == "shifted":
            return t + 1.0
        if style == "row_scaled" and t.ndim == 2:
            return t * 2.0 ** torch.randint(-6, 7, (t.shape[0], 1), generator=gen, device=device)
        if style == "outliers":
            return t * torch.where(torch.rand(t.shape, generator=gen, device=device) < 0.01, 30.0, 1.0)
        return t

    raw = normal(m, k)
    a = styled(raw)
    # a statistic of the scaled rows would scale every output back to unit size
    # and one of a row that holds no number would leave nothing of the row
    seen = raw if style in ("tiny", "large", "nan", "inf") else None
    if style == "one_hot":
        a = torch.nn.functional.one_hot(torch.randint(0, k, (m,), generator=gen, device=device), k).float()
    if style in ("nan", "inf"):
        a = a.clone()  # the statistics are those of the numbers
        a[m // 2, k // 2] = torch.nan if style == "nan" else torch.inf
    if style == "inf":
        a[m // 3, k // 3] = -torch.inf
    a = a.to(act)
    b = normal(*((k, n) if task.b == "kn" else (n, k)))
    b = (b if integers or style == "one_hot" else b / math.sqrt(k)).to(act)
    operands: Tensors = {}
    for name, spec in task.operands.items():
        size = shape_of(spec.declared, m, n)
        value = _fill(spec.fill, size, a if seen is None else seen, n, normal, gen, integers)
        if spec.fill == "target" and style == "outliers":
            outside = torch.tensor([-1, -100, n, n + 7], device=device)
            value[::8] = outside.repeat(m)[: value[::8].shape[0]]
        if spec.fill == "normal" and not integers:
            value = styled(value)
        operands[name] = value.to(spec.torch_dtype(act))
    return a, (b if task.b == "kn" else b.mT), operands


def _fill(fill: str, size, a: Tensor, n: int, normal, gen, integers: bool) -> Tensor:
    device = a.device
    if fill == "rstd":
        if integers:  # powers of two keep products exact
            return 2.0 ** torch.randint(-1, 2, size, generator=gen, device=device)
        return torch.rsqrt(a.float().square().mean(-1) + 1e-6)
    if fill == "target":
        return torch.randint(0, n, size, generator=gen, device=device)
    if fill == "position":
        return torch.randint(0, 131072, size, generator=gen, device=device).float()
    if fill == "frequency":
        return frequency_row(size[0], device=device)
    if fill == "cos_sin":
        angle = torch.rand((size[0], size[1] // 2), generator=gen, device=device) * 2.0 * math.pi
        if integers:
            angle = torch.randint(0, 4, angle.shape, generator=gen, device=device) * (math.pi / 2)
            return torch.stack((angle.cos().round(), angle.sin().round()), -1).flatten(-2)
        return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)
    return normal(*size)


def frequency_row(n: int, base: float = 500000.0, head_dim: int = 128, device: str = "cpu") -> Tensor:
    """Row ``(N,)`` of rotary frequencies in turns, ``(hi, lo)`` per pair, heads of ``head_dim`` columns.

    ``inv_freq = base^(-2i/head_dim)`` (RoFormer, arXiv 2104.09864); base as in Llama 3.
    """
    i = torch.arange(n // 2, dtype=torch.float64, device=device) % (head_dim // 2)
    turns = base ** (-2.0 * i / head_dim) / (2.0 * math.pi)
    hi = turns.float()
    return torch.stack((hi, (turns - hi.double()).float()), -1).flatten(-2)


def reference_of(task: Task, suite_path: Path | None = None) -> Callable[..., Tensors]:
    """The task's reference function ``(acc, **operands) -> outputs``.

    A user's task names it ``reference: file.py:function`` (beside the suite file).

    Raises:
        SuiteError: the task names none, or the file or function is missing.
    """
    if task.reference is None:
        found = getattr(references, task.name, None)
        if found is None:
            raise SuiteError(f"task {task.name}: no built-in reference; add 'reference: file.py:function'")
        return found
    file, _, function = task.reference.partition(":")
    path = (suite_path.parent if suite_path else Path.cwd()) / file
    if not function or not path.is_file():
        raise SuiteError(f"task {task.name}: reference {task.reference!r} is not an existing file.py:function")
    module_spec = importlib.util.spec_from_file_location(f"coda_reference_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not hasattr(module, function):
        raise SuiteError(f"task {task.name}: {path} has no function {function!r}")
    return getattr(module, function)


@dataclass
class Truth:
    """What an output must be, and how exactly it can be computed at all."""

    exact: Tensors  # fp64
    same: Tensors  # fp32 arithmetic on the same inputs, unrounded
    low: Tensors  # ``same`` rounded once to the declared dtypes: the paper's reference
    noise: Tensors  # fp32 outputs: rms change of each element when the accumulator carries fp32 rounding errors


# The tensor cores' fp32 accumulation is off by a few 2^-24 of the accumulator's
# spread; an output that sums many such values inherits it, however small the sum.
_ACCUMULATION = 2.0**-22
_DRAWS = 3


def truth_of(
    task: Task, reference: Callable[..., Tensors], a: Tensor, b: Tensor, operands: Tensors, act: torch.dtype
) -> Truth:
    """Evaluate the reference in fp64 and in the candidate's precision on the same inputs."""
    # fp32 means fp32, whatever the calling process switched on: autocast multiplies in 16 bits (pytorch #188955)
    torch.set_float32_matmul_precision("highest")
    with torch.autocast(a.device.type, enabled=False):
        return _truth_of(task, reference, a, b, operands, act)


def _truth_of(task, reference, a, b, operands, act) -> Truth:
    exact_acc = a.double() @ b.double()
    exact = reference(exact_acc, **_upcast(operands, torch.float64))
    if a.is_cuda:
        acc = torch.mm(a, b, out_dtype=torch.float32)  # 16-bit tensor cores, fp32 result
    else:
        acc = a.float() @ b.float()
    same = reference(acc, **_upcast(operands, torch.float32))
    low = {n: t.to(task.outputs[n].torch_dtype(act)) for n, t in same.items()}
    wide = [n for n in task.outputs if low[n].dtype == torch.float32]
    # per row: an outlier in A makes its whole row of the accumulator, and its errors, larger
    spread = exact_acc.nan_to_num(0.0, 0.0, 0.0).square().mean(-1, keepdim=True).sqrt() * _ACCUMULATION
    squares = {n: torch.zeros_like(exact[n]) for n in wide}
    gen = torch.Generator(device=a.device).manual_seed(0)
    for _ in range(_DRAWS if wide else 0):
        jitter = torch.randn(exact_acc.shape, generator=gen, device=a.device, dtype=torch.float64)
        moved = reference(exact_acc + jitter * spread, **_upcast(operands, torch.float64))
        for n in wide:
            squares[n] += (moved[n] - exact[n]).nan_to_num(0.0, 0.0, 0.0).square() / _DRAWS
    # a few draws can be small by chance; the rms over all elements is a floor for each
    noise = {n: torch.maximum(v, v.mean()).sqrt() for n, v in squares.items()}
    return Truth(exact, same, low, noise)


def _upcast(operands: Tensors, compute: torch.dtype) -> Tensors:
    return {n: t.to(compute) if t.is_floating_point() else t for n, t in operands.items()}
