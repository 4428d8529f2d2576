"""Optional stage: NVIDIA compute-sanitizer over one launch of a kernel, with a positive control per tool.

A tool that does not find its planted fault on this machine proves nothing by finding
none in a kernel, so its result is then "inconclusive", never "clean".
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from reference_kernels.tasks import Task

from .measure import Bundle
from .sandbox import ROOT
from .verdict import HarnessError

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 77  # exit code we ask compute-sanitizer to use when a tool reports an error
SECONDS = 300

# planted faults, two warps each: a global write out of bounds, a race of the warps over shared memory,
# a barrier that half a warp skips, a read of memory nobody wrote
CONTROLS = {
    tool: f'extern "C" __global__ void fault(float* p, int n) {{ int i = threadIdx.x; {body} }}'
    for tool, body in {
        "memcheck": "p[n + i] = 1.0f;",
        "racecheck": "__shared__ volatile float s[32]; s[i % 32] = (float)i; p[i % n] = s[(i + 1) % 32];",
        "synccheck": "if (i < 16) __syncthreads(); p[0] = 1.0f;",
        "initcheck": "p[i % n] = p[(i + 1) % n] + 1.0f;",
    }.items()
}


def sanitizer() -> str:
    """Path of compute-sanitizer.

    Raises:
        HarnessError: it is not installed.
    """
    path = shutil.which("compute-sanitizer")
    if not path:
        raise HarnessError("compute-sanitizer is not on the PATH; install the CUDA toolkit's compute-sanitizer package")
    return path


class _NoAnswer(Exception):
    """The tool did not get to the end, so it says nothing about its target."""


def _run(tool: str, arguments: list[str]) -> tuple[bool, str]:
    """``(fault found, report)`` of one target under one tool.

    Raises:
        _NoAnswer: it did not come to an end, or its target failed without a finding.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # every tensor its own allocation: an overrun leaves it
    }
    command = [sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-W", "ignore", "-m",
               "verifier.sanitize", *arguments]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        raise _NoAnswer(f"not done within {SECONDS} s") from None
    if done.returncode not in (0, FOUND):
        raise _NoAnswer(f"ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-500:]}")
    report = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    return done.returncode == FOUND, "\n".join(report[:12])


@functools.cache
def control(tool: str) -> str:
    """Why the tool proves nothing on this machine, or an empty string when it finds its planted fault."""
    try:
        return "" if _run(tool, ["control", tool])[0] else "the planted fault was not found here"
    except _NoAnswer as e:
        return f"the planted fault could not be run: {e}"


def sanitize(task: Task, manifest: Path, shape: tuple[int, int, int], tools: tuple[str, ...] = TOOLS) -> list[dict]:
    """Run one launch at ``shape`` under each tool.

    Returns:
        Per tool ``{"tool", "result": "clean" | "fault" | "inconclusive", "report"}``.

    Raises:
        HarnessError: compute-sanitizer is not installed.
    """
    out = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        f.write(json.dumps({"task": task.model_dump(mode="json"), "manifest": str(manifest), "shape": shape}))
        f.flush()
        for tool in tools:
            result, report = "inconclusive", control(tool)
            if not report:
                try:
                    found, report = _run(tool, ["launch", f.name])
                    result = "fault" if found else "clean"
                except _NoAnswer as e:
                    report = str(e)
            out.append({"tool": tool, "result": result, "report": report})
    return out


def sanitize_bundle(
    bundle: Bundle,
    names: list[str] | None = None,
    tools: tuple[str, ...] = TOOLS,
    shape: tuple[int, int, int] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict]:
    """``sanitize`` for each kernel of a bundle in its first bf16 configuration; equal objects run once.

    Args:
        names: tasks, all of the bundle by default.
        shape: instead of each task's first ragged one.

    Returns:
        Per kernel ``{"task", "author", "config", "shape", "tools"}``.

    Raises:
        HarnessError: a task or its object is not in the bundle, or a size is not one of the task's.
    """
    unknown = [n for n in names or () if n not in bundle.tasks]
    if unknown:
        raise HarnessError(f"{bundle.directory} has no task {unknown[0]!r}; it has: {', '.join(bundle.tasks)}")
    done: dict[tuple, list[dict]] = {}
    out = []
    for kernel in (k for k in bundle.content["kernels"] if k["task"] in (names or bundle.tasks)):
        task, who = bundle.tasks[kernel["task"]], (kernel["task"], kernel["author"], kernel["source_sha256"])
        at = shape or task.ragged[0]
        try:
            task.check_shape(*at)
        except ValueError as e:
            raise HarnessError(f"{task.name}: {e}") from e
        objects = [
            (p, a) for p, a in bundle.artefacts if a.act == "bf16" and (a.task, a.author, a.source_sha256) == who
        ]
        if not objects:
            raise HarnessError(f"{bundle.directory} holds no bf16 object of {who[1]} for {task.name}")
        path, artefact = objects[0]
        key = (task.name, artefact.object_sha256)
        if key not in done:
            progress(f"{task.name} {artefact.author}: {', '.join(tools)}")
            done[key] = sanitize(task, Path(path), at, tools)
        about = {"task": task.name, "author": artefact.author, "config": artefact.config_key, "shape": list(at)}
        out.append({**about, "tools": done[key]})
    if not out:
        raise HarnessError(f"{bundle.directory} holds no kernel of {', '.join(names or bundle.tasks)}")
    return out


def _control_target(tool: str) -> None:
    import torch

    kernel = torch.cuda._compile_kernel(CONTROLS[tool], "fault")
    buffer = torch.empty(32, device="cuda")
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[buffer, 32])
    torch.cuda.synchronize()


def _launch_target(file: str) -> None:
    import torch

    from reference_kernels.tasks import ACT_DTYPES
    from reference_kernels.truth import make_inputs

    from .launch import Buffers, Kernel
    from .manifest import Artefact

    request = json.loads(Path(file).read_text())
    task, path = Task.model_validate(request["task"]), Path(request["manifest"])
    artefact = Artefact.model_validate_json(path.read_text())
    a, b, operands = make_inputs(task, tuple(request["shape"]), ACT_DTYPES[artefact.act], 1, "cuda")
    buffers = Buffers(task, artefact, a, b, operands)  # no guard bands: memcheck sees what leaves an allocation
    Kernel(artefact, path.parent).bind(buffers)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    {"control": _control_target, "launch": _launch_target}[sys.argv[1]](sys.argv[2])
