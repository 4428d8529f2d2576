"""What a kernel is timed against, on the same inputs and clock: added to an open ``timing.Bench``.

A baseline offers ways to compute a task. Each is prepared for every operand set outside the
clock, judged against the fp64 truth, captured like a kernel and timed for a moment; the
fastest correct one stays. The bare GEMM and PyTorch are here. Other libraries are in a module
that the command names (``leaderboard.baselines``), because measuring imports nothing above it.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reference_kernels import references
from reference_kernels.references import Spelling
from reference_kernels.tasks import Task
from reference_kernels.truth import Tensors

from .timing import Bench, replay_us, warm

PYTORCH = ("eager", "torch.compile", "torch.compile:max-autotune")
# An honest baseline rounds the GEMM, and often more, to 16 bits: only gross errors count.
# Relative to the norm of the output; a logsumexp hardly varies, so it is held closer.
LIMIT, LIMITS = 0.02, {"OnlineLSEReduce": 0.005}


class Unavailable(Exception):
    """The baseline cannot be timed; the message says why (not installed, no such operation, wrong results)."""


@dataclass(frozen=True)
class Prepared:
    """One way to compute a task, bound to one operand set.

    call: what is timed, on the current stream, without waiting for the GPU; its results.
    read: results -> the outputs of the task that it computes, for the check (not timed).
    limit: relative error allowed, where it is not the usual one.
    instead: operands that the library computes for itself, as it computes them in fp64;
        the truth is evaluated with them.
    derived: quantities ``read`` also returns, and how they follow from the true outputs.
    """

    call: Callable[[], Any]
    read: Callable[[Any], Tensors]
    limit: float | None = None
    instead: Tensors = field(default_factory=dict)
    derived: Mapping[str, Callable[[Tensors], Tensor]] = field(default_factory=dict)


Prepare = Callable[[Tensor, Tensor, Tensors], Prepared]  # (a, b, operands) of one set; may permute and copy


def add_baseline(bench: Bench, name: str, adapters: str | None = None) -> dict:
    """Time ``name`` as a subject of ``bench``, by its fastest correct way.

    Args:
        adapters: module with ``load(name, task, act) -> (ways, version)``, for names that are not PyTorch's.

    Returns:
        ``passed`` and ``reason``; when passed also ``version``, ``covers`` (the outputs it computes, None for
        all), ``config`` (the way that won) and ``prepared_seconds`` (compiling, autotuning and choosing).
    """
    started = time.monotonic()
    if name == "gemm":
        out = torch.empty(bench.shape[0], bench.shape[1], device="cuda", dtype=bench.dtype)
        bench.keep.append(out)
        bench.capture(name, [partial(torch.mm, a, b, out=out) for a, b, _ in bench.sets])
        answer = {"version": f"torch {torch.__version__}", "covers": None, "config": None}
    else:
        try:
            ways, version = _ways(bench, name, adapters)
            answer = {"version": version, **_fastest(bench, name, ways)}
        except Unavailable as e:
            return {"passed": False, "reason": str(e)}
    return {"passed": True, "reason": "", **answer, "prepared_seconds": round(time.monotonic() - started, 1)}


def _ways(bench: Bench, name: str, adapters: str | None) -> tuple[dict[str, Prepare], str]:
    if name in PYTORCH:
        ways = pytorch_ways(name, bench.task, bench.dtype, bench.reference)
        default = bench.ways.get("torch.compile")
        if name.endswith(":max-autotune") and default:  # minutes each: only what won without it
            ways = {default: ways[default]}
        return ways, f"torch {torch.__version__}"
    if adapters is None:
        raise Unavailable(f"no baseline {name!r}; there are: gemm, {', '.join(PYTORCH)}")
    return importlib.import_module(adapters).load(name, bench.task, bench.dtype)


def _fastest(bench: Bench, name: str, ways: dict[str, Prepare]) -> dict:
    """Capture the fastest correct way as subject ``name``.

    Raises:
        Unavailable: none works; the message has a reason for each.
    """
    best, wrong = None, []
    for way, prepare in ways.items():
        try:
            timed = _timed(bench, name, prepare)
        except Unavailable as e:
            wrong.append(f"{way}: {e}")
            continue
        except Exception as e:  # a library may fail in any way: what is captured already must survive it
            torch.cuda.synchronize()  # raises in turn where the context is lost
            torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its own behind
            torch.cuda.empty_cache()
            wrong.append(f"{way}: {type(e).__name__}: {str(e)[:300]}")
            continue
        if best is None or timed["us"] < best["us"]:
            best = {**timed, "way": way}
        del timed  # frees the graph and outputs of the slower one
    if best is None:
        raise Unavailable("; ".join(wrong))
    bench.keep.append(best["held"])
    bench.graphs[name], bench.ways[name] = best["entry"], best["way"]
    return {"covers": best["covers"], "config": best["way"]}


def _timed(bench: Bench, name: str, prepare: Prepare) -> dict:
    """Check, capture and briefly time one way: microseconds of a call, the graph, and what must outlive it."""
    prepared = [prepare(*s) for s in bench.sets]
    outputs = prepared[0].read(prepared[0].call())
    problem = gross_error(bench.task, outputs, _exact(bench, prepared[0]), prepared[0].limit)
    if problem:
        raise Unavailable(problem)
    # every call keeps its outputs: memory used again at once would still be in L2
    held: list = [prepared]
    bench.capture(name, [partial(_keep_result, held, p.call) for p in prepared])
    graph, calls = entry = bench.graphs.pop(name)
    warm(graph)
    us = statistics.median(replay_us(graph) for _ in range(5)) / calls
    covers = None if set(outputs) == set(bench.task.outputs) else list(outputs)
    return {"us": us, "entry": entry, "held": held, "covers": covers}


def _keep_result(held: list, call: Callable[[], Any]) -> None:
    held.append(call())


def _exact(bench: Bench, prepared: Prepared) -> Tensors:
    """What the results on the first set must be, in fp64."""
    if prepared.instead:
        a, b, operands = bench.sets[0]
        up = {n: t.double() if t.is_floating_point() else t for n, t in (operands | prepared.instead).items()}
        exact = bench.reference(a.double() @ b.double(), **up)
    else:
        exact = bench.truth(0).exact
    return exact | {n: follows(exact) for n, follows in prepared.derived.items()}


def gross_error(task: Task, outputs: Tensors, exact: Tensors, limit: float | None = None) -> str:
    """Why ``outputs`` are not those of the task, or an empty string."""
    if not outputs:
        return "it computes no output of the task"
    for name, got in outputs.items():
        kind = task.outputs[name].kind if name in task.outputs else ""
        allowed = limit or LIMITS.get(kind, LIMIT)
        if got.shape != exact[name].shape:
            return f"{name} has shape {tuple(got.shape)}, must have {tuple(exact[name].shape)}"
        error = float((got.double() - exact[name]).norm() / exact[name].norm())
        if not error < allowed:
            return f"{name} is off by {error:.3g} (relative)"
    return ""


# --- PyTorch ---------------------------------------------------------------------------


def pytorch_ways(name: str, task: Task, act: torch.dtype, reference: Callable) -> dict[str, Prepare]:
    """The spellings of a task as PyTorch runs them: eagerly (in 16 bits, or fp32 after the GEMM) or compiled."""
    spellings = references.spellings(task.name, reference)
    dtypes = task.torch_dtypes(act)
    if name == "eager":
        # what is spelled for Inductor is only more passes, or the same again, eagerly
        spellings = [s for s in spellings if s.name not in ("fused", "addmm")]
        models = {f"{s.name}, {how}": (s, _model(s, dtypes, wide)) for s in spellings for how, wide in _WIDTHS}
    else:
        torch._dynamo.reset()  # all models share one code object, and its recompilations are limited
        mode = "max-autotune-no-cudagraphs" if name.endswith(":max-autotune") else None
        compile_ = partial(torch.compile, dynamic=False, fullgraph=True, mode=mode)
        models = {s.name: (s, compile_(_model(s, dtypes, not s.narrow))) for s in spellings}
    return {way: partial(_prepare, spelling, model) for way, (spelling, model) in models.items()}


_WIDTHS = (("16 bit", False), ("fp32", True))


def _model(spelling: Spelling, dtypes: dict[str, torch.dtype], wide: bool) -> Callable:
    """What a PyTorch user would write: a 16-bit matmul, then the maths, outputs in their dtypes.

    ``wide``: the maths in fp32 (Inductor fuses the conversions), else in the dtypes as they come.
    """

    def model(a, b, operands):
        gemm = acc = a @ b
        if wide:
            acc = gemm.float()
            operands = {n: t.float() if t.is_floating_point() else t for n, t in operands.items()}
        outputs = spelling.compute(acc, **operands)
        # the GEMM's own result needs no second write; Inductor would make one of the round trip through fp32
        return {n: gemm if t is acc and dtypes[n] == gemm.dtype else t.to(dtypes[n]) for n, t in outputs.items()}

    return model


def _prepare(spelling: Spelling, model: Callable, a: Tensor, b: Tensor, operands: Tensors) -> Prepared:
    def laid_out(name: str, t: Tensor) -> Tensor:
        return references.halves(t) if name in spelling.halves else t

    def read(outputs: Tensors) -> Tensors:
        return {n: references.pairs(t) if n in spelling.halves else t for n, t in outputs.items()}

    inputs = {n: laid_out(n, t) for n, t in operands.items()}
    return Prepared(partial(model, a, laid_out("b", b), inputs), read)
