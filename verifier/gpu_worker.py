"""The process that touches the GPU: objects and manifests in, JSON lines out.

It never imports a candidate. One command per line on stdin; every answer is one
line on stdout. The parent (``verifier.gpu``) kills the process group when an
answer does not come, so a hang or a crash costs one candidate.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch

from reference_kernels.tasks import ACT_DTYPES, Task
from reference_kernels.truth import make_inputs, reference_of, truth_of
from verifier.baselines import add_baseline
from verifier.driver import installed_driver, why_no_device
from verifier.launch import Buffers, Kernel
from verifier.manifest import Artefact
from verifier.numerics import judge_output
from verifier.timing import Bench, ceilings, device_facts

MIN_CAPABILITY = (9, 0)


class Worker:
    """State kept between commands: loaded kernels, the last truth, the open benchmark."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.truth_key: tuple | None = None
        self.truth = None
        self.bench: Bench | None = None

    def kernel(self, manifest: str) -> Kernel:
        if manifest not in self.kernels:
            path = Path(manifest)
            self.kernels[manifest] = Kernel(Artefact.model_validate_json(path.read_text()), path.parent)
        return self.kernels[manifest]

    # --- commands ---

    def hello(self, command: dict) -> dict:
        return device_facts()

    def ceilings(self, command: dict) -> dict:
        return ceilings()

    def numerics(self, command: dict) -> dict:
        """Judge one artefact at one shape: poisoned outputs, guard bands, twice, inputs unchanged."""
        task = Task.model_validate(command["task"])
        kernel = self.kernel(command["manifest"])
        a, b, operands = self._inputs(task, command)
        buffers = Buffers(task, kernel.artefact, a, b, operands, guard="all")
        inputs = [buffers.a, buffers.b, *buffers.operands.values()]
        before = [t.clone() for t in inputs]
        launch = kernel.bind(buffers)
        launch()
        torch.cuda.synchronize()
        first = buffers.finished()
        findings = []
        for name in buffers.outputs:
            findings.append(judge_output(task, name, first[name], self.truth, command["style"] == "integers").as_dict())
        problem = None
        raw = {n: t.clone() for n, t in buffers.outputs.items()}
        buffers.poison()
        launch()
        torch.cuda.synchronize()
        for name, t in buffers.outputs.items():
            if not torch.equal(_bits(t), _bits(raw[name])):
                problem = f"{name}: two runs on the same inputs differ"
        # bit by bit: a sum would not notice two elements that were exchanged (KernelBench #82)
        if not all(torch.equal(_bits(t), _bits(kept)) for t, kept in zip(inputs, before, strict=True)):
            problem = "an input was changed by the kernel"
        damage = buffers.damage()
        failed = next((f for f in findings if not f["passed"]), None)
        reason = damage or problem or (failed["reason"] if failed else "")
        # whatever else lies in this process may have been written too
        return {"passed": not reason, "reason": reason, "findings": findings, "lost": bool(damage)}

    def open_bench(self, command: dict) -> dict:
        """Prepare baselines and operand sets for one task and shape."""
        self.bench = Bench(Task.model_validate(command["task"]), command, self._reference)
        return self.bench.facts

    def add(self, command: dict) -> dict:
        """Add one artefact to the open benchmark: verified first, then captured."""
        return self.bench.add_kernel(command["subject"], self.kernel(command["manifest"]))

    def add_baseline(self, command: dict) -> dict:
        return add_baseline(self.bench, command["subject"], command.get("adapters"))

    def run(self, command: dict) -> dict:
        """Time every subject of the open benchmark, interleaved."""
        return self.bench.run(command["rounds"], command.get("subjects"))

    # --- helpers ---

    def _reference(self, task: Task, suite: str | None):
        return reference_of(task, Path(suite) if suite else None)

    def _inputs(self, task: Task, command: dict):
        """Inputs of the command and their truth, kept while the same inputs are asked for again."""
        shape, act, seed = tuple(command["shape"]), command["act"], command["seed"]
        key = (task.name, shape, act, seed, command["style"])
        if key != self.truth_key:
            self.truth_key = self.truth = None
            dtype = ACT_DTYPES[act]
            self.inputs = make_inputs(task, shape, dtype, seed, "cuda", style=command["style"])
            self.truth = truth_of(task, self._reference(task, command.get("suite")), *self.inputs, dtype)
            self.truth_key = key
        return self.inputs


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int16 if t.element_size() == 2 else torch.int32)


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # libraries may print; the channel is ours alone

    def send(message: dict) -> None:
        os.write(out, json.dumps(message).encode() + b"\n")

    if not torch.cuda.is_available():
        send({"ok": False, "fault": why_no_device(installed_driver())})
        return
    capability = torch.cuda.get_device_capability()
    if capability[0] != MIN_CAPABILITY[0]:
        found = f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
        send({"ok": False, "fault": f"{found}; kernels are built for Hopper (9.0)"})
        return
    worker = Worker()
    send({"ok": True, "ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            send({"ok": True, "result": getattr(worker, command["cmd"])(command)})
        except Exception as e:
            trace = traceback.format_exc(limit=-3)
            # after a CUDA error the context is gone; the parent starts a fresh process
            fatal = isinstance(e, getattr(torch, "AcceleratorError", RuntimeError))
            send({"ok": False, "error": f"{type(e).__name__}: {str(e)[:800]}", "trace": trace, "fatal": fatal})
            if fatal:
                os._exit(1)


if __name__ == "__main__":
    main()
