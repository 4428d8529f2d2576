"""Optional stage: NVIDIA compute-sanitizer over one launch of a kernel, with a positive control per tool.

A tool that does not find its planted fault on this machine proves nothing by finding
none in a kernel, so its result is then "inconclusive", never "clean".
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from reference_kernels.tasks import Task

from .sandbox import ROOT
from .verdict import HarnessError

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 77  # exit code we ask compute-sanitizer to use when a tool reports an error
SECONDS = 300

# planted faults: one global write out of bounds, one shared-memory race, one divergent barrier,
# one read of memory nobody wrote
CONTROLS = {
    "memcheck": "extern \"C\" __global__ void fault(float* p, int n) { p[n + threadIdx.x] = 1.0f; }",
    "racecheck": (
        "extern \"C\" __global__ void fault(float* p, int n) { __shared__ float s[2];"
        " s[threadIdx.x % 2] = (float)threadIdx.x; p[threadIdx.x % n] = s[(threadIdx.x + 1) % 2]; }"
    ),
    "synccheck": "extern \"C\" __global__ void fault(float* p, int n) { if (threadIdx.x < 16) __syncthreads(); p[0] = 1.0f; }",
    "initcheck": "extern \"C\" __global__ void fault(float* p, int n) { p[threadIdx.x % n] = p[(threadIdx.x + 1) % n] + 1.0f; }",
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


def _run(tool: str, arguments: list[str]) -> tuple[bool, str]:
    """``(fault found, report)`` of one target under one tool."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # every tensor its own allocation: an overrun leaves it
    }
    command = [sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-W", "ignore", "-m",
               "verifier.sanitize", *arguments]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    if done.returncode not in (0, FOUND):
        raise HarnessError(f"compute-sanitizer {tool} ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    report = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    return done.returncode == FOUND, "\n".join(report[:12])


def control(tool: str) -> bool:
    """True when the tool finds its planted fault on this machine."""
    return _run(tool, ["control", tool])[0]


def sanitize(task: Task, manifest: Path, shape: tuple[int, int, int], tools: tuple[str, ...] = TOOLS) -> list[dict]:
    """Run one launch at ``shape`` under each tool.

    Returns:
        Per tool ``{"tool", "result": "clean" | "fault" | "inconclusive", "report"}``.
    """
    out = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        f.write(json.dumps({"task": task.model_dump(mode="json"), "manifest": str(manifest), "shape": shape}))
        f.flush()
        for tool in tools:
            if not control(tool):
                out.append({"tool": tool, "result": "inconclusive", "report": "the planted fault was not found here"})
                continue
            found, report = _run(tool, ["launch", f.name])
            out.append({"tool": tool, "result": "fault" if found else "clean", "report": report})
    return out


def _control_target(tool: str) -> None:
    import torch

    kernel = torch.cuda._compile_kernel(CONTROLS[tool], "fault")
    buffer = torch.empty(32, device="cuda")
    kernel(grid=(1, 1, 1), block=(32, 1, 1), args=[buffer, 32])
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
    buffers = Buffers(task, artefact, a, b, operands)
    Kernel(artefact, path.parent).bind(buffers)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    {"control": _control_target, "launch": _launch_target}[sys.argv[1]](sys.argv[2])
