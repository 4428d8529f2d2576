"""The worker's numerics on CPU tensors: the launch is a Python function that does what kernels do, right or wrong."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from agent.composer import compose
from primitives.interpret import interpret
from reference_kernels.tasks import ACT_DTYPES, load_suite
from reference_kernels.truth import STYLES, make_inputs
from verifier import gpu_worker
from verifier.bundle import CONFIGS
from verifier.manifest import Artefact

TASK = load_suite()["gemm_rmsnorm_swiglu"]
SHAPE = (200, 272, 136)


class Launched:
    """Stands for ``launch.Kernel``; ``after`` may change what a launch did to the buffers."""

    def __init__(self, act: str, after=lambda buffers: None):
        scope: dict = {}
        exec(compose(TASK), scope)
        self.program, self.after = scope[TASK.name], after
        self.artefact = Artefact(
            kernel=TASK.name, task=TASK.name, author="me", act=act, b=TASK.b, source_sha256="", object="",
            object_sha256="", symbol="", fields=[], d=None, c=None, config=CONFIGS[0], program={}, toolchain={},
            isolation="",
        )  # fmt: skip

    def bind(self, buffers):
        def launch():
            dtypes = TASK.torch_dtypes(ACT_DTYPES[self.artefact.act])
            found = interpret(self.program, buffers.a, buffers.b, buffers.operands, dtypes)
            for name, t in buffers.outputs.items():
                t.copy_(found[name])
            self.after(buffers)

        return launch


@pytest.fixture
def answer(monkeypatch):
    """Numerics of one launch, with the inputs and the clock of a GPU replaced."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    on_cpu = lambda task, shape, dtype, seed, device, style: make_inputs(task, shape, dtype, seed, "cpu", style)
    monkeypatch.setattr(gpu_worker, "make_inputs", on_cpu)

    def run(after=lambda buffers: None, act="bf16", style="normal") -> dict:
        worker = gpu_worker.Worker()
        worker.kernels["m"] = Launched(act, after)
        about = {"task": TASK.model_dump(mode="json"), "manifest": "m", "shape": SHAPE, "act": act, "seed": 7}
        return worker.numerics({**about, "style": style})

    return run


@pytest.mark.parametrize("act", list(ACT_DTYPES))
@pytest.mark.parametrize("style", STYLES)
def test_a_right_kernel_passes_on_every_distribution(answer, act, style):
    found = answer(act=act, style=style)
    assert found["passed"] and not found["lost"], found["reason"]
    assert [f["output"] for f in found["findings"]] == list(TASK.outputs)


def outside(tensor: str, where: int, buffers) -> None:
    every = {"A": buffers.a, "B": buffers.b, **buffers.operands, **buffers.outputs}
    t = every[tensor]
    offset = t.numel() if where > 0 else -1
    torch.as_strided(t, (1,), (1,), t.storage_offset() + offset).fill_(3.0)


@pytest.mark.parametrize("tensor", ["A", "B", "rstd", "z", "y"])
@pytest.mark.parametrize("where", [-1, 1])
def test_a_write_outside_names_the_tensor_and_condemns_the_process(answer, tensor, where):
    found = answer(partial(outside, tensor, where))
    assert not found["passed"] and found["lost"]
    side = "after its end, first at byte offset 0" if where > 0 else "before its start"
    assert found["reason"].startswith(f"{tensor}: written outside the tensor ({side}")


def test_a_read_outside_shows_as_nan(answer):
    """A kernel that takes the element after the last one of a vector for its neighbour."""

    def shifted(buffers):
        rstd = buffers.operands["rstd"]
        beyond = torch.as_strided(rstd, (1,), (1,), rstd.storage_offset() + len(rstd))
        buffers.outputs["z"][-1] *= beyond.to(buffers.outputs["z"].dtype)

    found = answer(shifted)
    assert not found["passed"] and not found["lost"] and "z: 272 elements are NaN" in found["reason"]


@pytest.mark.parametrize("name", ["a", "rstd"])
def test_a_changed_input_is_noticed(answer, name):
    def change(buffers):
        t = buffers.a if name == "a" else buffers.operands[name]
        t.view(-1)[5] = 1.25

    assert answer(change)["reason"] == "an input was changed by the kernel"


@pytest.mark.parametrize("name", ["a", "b", "rstd"])
def test_two_exchanged_elements_of_an_input_are_noticed(answer, name):
    """ScalingIntelligence/KernelBench #82: every element is still there, so no sum over them changes."""

    def exchange(buffers):
        if next(runs) == 1:  # after everything was read
            t = buffers.operands["rstd"] if name == "rstd" else getattr(buffers, name)
            rows = t.view(len(t), -1)
            rows[[0, 1]] = rows[[1, 0]]

    runs = itertools.count()
    assert answer(exchange)["reason"] == "an input was changed by the kernel"


def test_the_callers_inputs_are_copies(answer, monkeypatch):
    """A kernel that ruins its inputs must not ruin those of the next one, which are kept with their truth."""
    monkeypatch.setattr(gpu_worker.Worker, "_inputs", remembered := Remember(gpu_worker.Worker._inputs))
    answer(lambda buffers: buffers.a.zero_())
    assert bool((remembered.inputs[0] != 0).any())


class Remember:
    def __init__(self, method):
        self.method = method

    def __get__(self, worker, _):
        def call(*arguments):
            self.inputs = self.method(worker, *arguments)
            return self.inputs

        return call


def test_another_answer_the_second_time_is_noticed(answer):
    runs = itertools.count()

    def drift(buffers):
        if next(runs):
            buffers.outputs["y"][0, 0] += 1

    assert answer(drift)["reason"] == "y: two runs on the same inputs differ"


def test_an_element_left_unwritten_is_nan(answer):
    found = answer(lambda buffers: buffers.outputs["y"][-1, -1:].fill_(float("nan")))
    assert "y: 1 elements are NaN" in found["reason"] and "[199, 135]" in found["reason"]
