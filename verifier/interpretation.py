"""Interpret stage: run the candidate on CPU in the worker and judge its outputs here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from reference_kernels.tasks import DTYPES, Task
from reference_kernels.truth import STYLES, Truth, make_inputs, reference_of, truth_of

from .numerics import judge_output
from .pool import Answer
from .verdict import Verdict

SQUARE = (256, 256, 256)  # M == N: swapped row and column vectors must show
EDGE_TILE = (64, 192)  # a second tile shape: results must not depend on the tiling
# Also run with fp32 tensors, which shows the bare mathematics: a tanh GELU is 4.7e-4 off the exact one,
# and one rounding to bf16 hides that (linkedin/Liger-Kernel #959).
PLAIN = "fp32"


def precisions(task: Task) -> tuple[str, ...]:
    """What a task is interpreted in."""
    return (*task.dtypes, PLAIN)


def cases(task: Task, act: str, seed: int) -> list[dict]:
    """Inputs to interpret, each ``{"a", "b", "operands", "tile", "style"}``.

    Every ragged shape, a square one and another tile shape with the paper's
    distribution; every other distribution on one ragged shape; and each operand
    changed alone, so that nothing may ignore it. In fp32, which no kernel is compiled
    for, two distributions on one ragged shape.
    """
    dtype, tile, small = DTYPES[act], (128, 128), task.ragged[min(1, len(task.ragged) - 1)]
    plan = [(shape, tile, "normal") for shape in (*task.ragged, SQUARE)]
    plan += [(task.ragged[0], EDGE_TILE, "normal"), (task.ragged[0], tile, "integers")]
    plan += [(small, tile, style) for style in STYLES if style not in ("normal", "integers")]
    if act == PLAIN:
        plan = [(small, tile, "normal"), (small, tile, "shifted")]
    out = []
    for i, (shape, case_tile, style) in enumerate(plan):
        a, b, operands = make_inputs(task, shape, dtype, seed + i, style=style)
        out.append({"a": a, "b": b, "operands": operands, "tile": _whole_heads(task, case_tile), "style": style})
    if act == PLAIN:
        return out
    a, b, operands = make_inputs(task, small, dtype, seed)
    other = make_inputs(task, small, dtype, seed + len(plan))
    for name in ("a", "b", *operands):
        changed = {"a": a, "b": b, "operands": dict(operands), "tile": _whole_heads(task, tile), "style": f"only {name} changed"}
        if name in ("a", "b"):
            changed[name] = other[0] if name == "a" else other[1]
        else:
            changed["operands"][name] = other[2][name]
        out.append(changed)
    return out


def _whole_heads(task: Task, tile: tuple[int, int]) -> list[int]:
    """``tile``, widened so that it cuts no head of a per-head statistic."""
    step = math.lcm(*(s.head_dim for s in task.operands.values() if s.kind == "HeadRstd"))
    return [tile[0], -(-tile[1] // step) * step]


def dtype_names(task: Task, act: str) -> dict[str, str]:
    """Declared dtype of every tensor as the worker spells it."""
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "int32"}
    return {n: short[d] for n, d in task.torch_dtypes(DTYPES[act]).items()}


def judge_interpretation(
    task: Task, act: str, inputs: list[dict], answer: Answer, suite_path: Path | None, seed: int, start: float
) -> Verdict:
    """Verdict on what the worker answered."""

    def failed(reason: str, **evidence) -> Verdict:
        seconds = time.perf_counter() - start
        return Verdict(stage="interpret", passed=False, reason=reason, evidence={"act": act, "seed": seed, **evidence}, seconds=seconds)

    if not answer.ok:
        return failed(f"does not run on CPU tensors: {answer.describe()}", error=answer.error)
    try:
        outputs = torch.load(answer.directory / "outputs.pt", weights_only=True)
    except Exception as e:  # the file is the worker's, so it may hold anything
        return failed(f"its outputs cannot be read: {type(e).__name__}")
    if not (isinstance(outputs, list) and all(isinstance(o, dict) for o in outputs)):
        return failed("its outputs cannot be read: not a dict of outputs per case")
    if len(outputs) != len(inputs):
        return failed(f"outputs of {len(outputs)} cases came back, {len(inputs)} were asked for")
    return judge_outputs(task, act, inputs, outputs, truths(task, act, inputs, suite_path), seed, start)


def truths(task: Task, act: str, inputs: list[dict], suite_path: Path | None) -> Iterator[Truth]:
    """The truth of each case, computed when it is asked for."""
    reference = reference_of(task, suite_path)
    for case in inputs:
        yield truth_of(task, reference, case["a"], case["b"], case["operands"], DTYPES[act])


def judge_outputs(
    task: Task, act: str, inputs: list[dict], outputs: list[dict], truth_per_case: Iterable[Truth], seed: int, start: float
) -> Verdict:
    """Verdict over all cases; the first wrong output decides the reason."""

    def verdict(passed: bool, reason: str, **evidence) -> Verdict:
        return Verdict(
            stage="interpret",
            passed=passed,
            reason=reason,
            evidence={"act": act, "seed": seed, **evidence},
            seconds=time.perf_counter() - start,
        )

    worst: dict[str, dict] = {}
    for case, got, truth in zip(inputs, outputs, truth_per_case, strict=True):
        a, b = case["a"], case["b"]
        for name in task.outputs:
            if not isinstance(got.get(name), torch.Tensor):
                return verdict(False, f"{name}: no tensor came back")
            finding = judge_output(task, name, got[name], truth, case["style"] == "integers")
            exact = finding.reason.endswith("bit-exact")
            shape = [a.shape[0], b.shape[1], a.shape[1]]
            if not finding.passed:
                where = f"M={shape[0]} N={shape[1]} K={shape[2]} {act} tile {case['tile']}"
                kind = "" if case["style"] == "normal" else f", inputs: {case['style']}"
                return verdict(
                    False, f"{finding.reason} [{where}{kind}]", finding=finding.as_dict(), shape=shape, style=case["style"]
                )
            if not exact and finding.relative_error >= worst.get(name, {}).get("relative_error", -1.0):
                worst[name] = {**finding.as_dict(), "shape": shape}
    return verdict(True, f"{len(inputs)} cases in {act} match the fp64 reference", worst=worst)
