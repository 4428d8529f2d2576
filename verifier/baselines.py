"""What a kernel is timed against, on the same inputs and clock: added to an open ``timing.Bench``."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from reference_kernels import references
from reference_kernels.tasks import Task

from .timing import Bench, replay_us, warm


def add_baseline(bench: Bench, name: str) -> dict:
    """Check the baseline against the truth on the first set, then capture it as subject ``name``."""
    if name == "gemm":
        out = torch.empty(bench.shape[0], bench.shape[1], device="cuda", dtype=bench.dtype)
        bench.keep.append(out)
        bench.capture(name, [(lambda a=a, b=b: torch.mm(a, b, out=out)) for a, b, _ in bench.sets])
        return {"passed": True, "reason": ""}
    mode = name.partition(":")[2]
    options = {"mode": "max-autotune-no-cudagraphs"} if mode == "max-autotune" else {}
    best, reasons = None, []
    torch._dynamo.reset()
    for written in references.spellings(bench.task.name, bench.reference):
        model = _pytorch(bench.task, written, bench.dtype)
        compiled = torch.compile(model, dynamic=False, fullgraph=True, **options)
        bench.keep.append(compiled)  # a captured graph needs its kernels loaded
        problem = _gross_error(bench, compiled(*bench.sets[0]))
        if problem:
            reasons.append(f"{name}: {problem}")
            continue
        bench.capture(name, [(lambda s=s, c=compiled: bench.keep.append(c(*s))) for s in bench.sets])
        graph, calls = bench.graphs.pop(name)
        warm(graph)
        us = statistics.median(replay_us(graph) for _ in range(5)) / calls
        if best is None or us < best[0]:
            best = (us, graph, calls)
    if best is None:
        return {"passed": False, "reason": "; ".join(reasons)}
    bench.graphs[name] = best[1:]
    return {"passed": True, "reason": ""}


def _gross_error(bench: Bench, got: dict) -> str:
    """An honest baseline rounds the GEMM to 16 bits first, so only gross errors count."""
    limit = 0.5 if bench.task.name in references.APPROXIMATE_BASELINE else 0.05
    truth = bench.truth(0)
    for out in bench.task.outputs:
        error = float((got[out].double() - truth.exact[out]).norm() / truth.exact[out].norm())
        if not error < limit:
            return f"{out} is off by {error:.3g} (relative)"
    return ""


def _pytorch(task: Task, reference: Callable, act: torch.dtype) -> Callable:
    """What a PyTorch user would write: a 16-bit matmul, fp32 maths, outputs in their dtypes."""
    dtypes = task.torch_dtypes(act)

    def model(a, b, operands):
        acc = (a @ b).float()
        up = {n: t.float() if t.is_floating_point() else t for n, t in operands.items()}
        return {n: t.to(dtypes[n]) for n, t in reference(acc, **up).items()}

    return model
