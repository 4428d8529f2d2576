"""On a Hopper GPU: compile here, launch from the manifest, judge, time, serve. Skipped elsewhere.

Needs nothing of ``conftest.py``, so that it runs where only the GPU's own software is installed:
``python3 -m pytest --noconftest tests/test_gpu.py`` in the root of the repository.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from agent.composer import compose
from agent.generate import keep_measurement
from generated import runtime
from generated.library import Library
from generated.passport import Decision
from reference_kernels.tasks import DEFAULT_SUITE, load_suite
from reference_kernels.truth import STYLES, make_inputs, reference_of, truth_of
from verifier.bundle import CONFIGS, build
from verifier.gpu import CommandFailed, GpuWorker, WorkerLost
from verifier.launch import Buffers, Kernel
from verifier.measure import FINAL_ROUNDS, Session, read_bundle
from verifier.numerics import judge_output
from verifier.pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
ROOT = Path(__file__).resolve().parent.parent
TASK = load_suite()["gemm_residual_rmsnorm"]
SHAPE = (2048, 2048, 2048)


@pytest.fixture(scope="module")
def pool():
    with Pool() as shared:
        yield shared


@pytest.fixture(scope="module")
def bundle(pool, tmp_path_factory):
    """A right kernel and one that forgets the residual, each in two configurations, and the expert's."""
    right = compose(TASK)
    wrong = right.replace("h = acc + residual", "h = acc + acc - acc")
    assert wrong != right
    directory = tmp_path_factory.mktemp("bundle")
    build([(TASK, right, "right"), (TASK, wrong, "wrong")], directory, pool, configs=CONFIGS[:2])
    return read_bundle(directory)


@pytest.fixture(scope="module")
def measured(bundle):
    """The session, and what was measured by author; one baseline that there is nowhere."""
    with GpuWorker() as worker:
        session = Session(worker, bundle)
        return session, {m.author: m for m in session.measure_task(TASK.name, ("no-such-baseline",), [SHAPE])}


def command(path: str, act: str, **fields) -> dict:
    """Fields of the worker's ``numerics`` for ``TASK``."""
    task = TASK.model_dump(mode="json")
    return {
        "manifest": path,
        "task": task,
        "shape": (200, 272, 136),
        "act": act,
        "seed": 1,
        "style": "normal",
        **fields,
    }


# --- numerics --------------------------------------------------------------------------------


def test_the_right_kernel_is_measured_and_the_wrong_one_ends_as_a_verdict(measured):
    _, by_author = measured
    right, wrong = by_author["right"], by_author["wrong"]
    assert right.passed and [v.stage for v in right.verdicts] == ["numerics", "timing"], right.verdicts[-1].reason
    assert not wrong.passed and not wrong.rows
    assert wrong.verdicts[0].stage == "numerics" and wrong.verdicts[0].reason.startswith("h: ")


@pytest.mark.parametrize("act", TASK.dtypes)
def test_no_distribution_of_inputs_refuses_the_right_kernel(bundle, act):
    path = next(p for p, a in bundle.artefacts if (a.author, a.act) == ("right", act))
    with GpuWorker() as worker:
        for seed in range(3):
            for style in STYLES:
                answer = worker.call("numerics", 60.0, **command(path, act, seed=seed, style=style))
                assert answer["passed"], (style, seed, answer["reason"])


def test_a_failed_command_costs_only_itself(bundle):
    path, artefact = next((p, a) for p, a in bundle.artefacts if a.author == "right")
    with GpuWorker() as worker:
        with pytest.raises((CommandFailed, WorkerLost)):
            worker.call(
                "numerics", 60.0, **command(path, artefact.act, shape=(200, 271, 136))
            )  # rows TMA cannot address
        assert worker.call("numerics", 60.0, **command(path, artefact.act))["passed"]


def test_a_write_past_the_end_is_seen_in_the_guard_band(bundle):
    """Our kernels cannot write there (stores are bounded by the tensors they get), so the test does."""
    path, artefact = bundle.artefacts[0]
    a, b, operands = make_inputs(TASK, (200, 272, 136), torch.bfloat16, 1, "cuda")
    buffers = Buffers(TASK, artefact, a, b, operands, guard="all")
    Kernel(artefact, Path(path).parent).bind(buffers)()
    torch.cuda.synchronize()
    assert buffers.damage() == ""
    y = buffers.outputs["y"]
    y.as_strided((y.numel() + 3,), (1,))[-1] = 1.0
    assert buffers.damage() == "y: written outside the tensor (after its end, first at byte offset 4)"
    w = buffers.operands["weight"]
    assert torch.isnan(w.as_strided((w.numel() + 1,), (1,))[-1])


# --- timing ----------------------------------------------------------------------------------


def test_times_are_possible(measured):
    session, by_author = measured
    [row] = by_author["right"].rows
    assert row["floor_us"] < row["kernel_us"] < row["total_us"] < 10 * row["floor_us"]
    assert row["kernel_us"] - row["gemm_us"] == pytest.approx(row["tax_us"], abs=0.1 * row["gemm_us"])
    assert 0.9 < row["wall_over_events"] < 1.1
    assert session.ceilings["copy_bytes"] > 1e12 and session.ceilings["matmul_flops"] > 3e14


def test_a_row_holds_every_sample_and_what_is_missing(measured):
    _, by_author = measured
    [row] = by_author["right"].rows
    assert set(row["baselines"]) == set(row["ratios"]) == set(row["wins"]) == {"gemm", "expert"}
    assert set(row["samples_us"]) == {"kernel", "total", "gemm", "expert"}
    assert {len(v) for v in row["samples_us"].values()} == {FINAL_ROUNDS}
    assert set(row["left_out"]) == {"no-such-baseline"} and row["left_out"]["no-such-baseline"]
    assert row["finalists"][row["config"]] == row["total_us"] == min(row["finalists"].values())
    assert row["baselines"]["expert"]["version"].startswith("quack-kernels ")
    assert row["flops"] == 2 * math.prod(SHAPE) and row["bytes"] > 5 * 2 * 2048**2


def test_a_kernel_against_itself_is_within_one_percent(bundle):
    with GpuWorker() as worker:
        found = Session(worker, bundle).resolution(TASK.name)
    assert found["low"] <= found["median"] <= found["high"]
    assert abs(math.log(found["median"])) < 0.01


# --- the library and the whole way ---------------------------------------------------------------


def test_the_library_serves_a_kernel_that_is_right(measured, bundle, tmp_path, monkeypatch):
    session, by_author = measured
    library = Library(tmp_path / "library")
    keep_measurement(by_author["right"], session, bundle.content, library)
    [passport] = library.passports(TASK.name)
    library.decide(passport, Decision(verb="accept", reviewer="test", reason="measured above"), library.seen(passport))
    monkeypatch.setattr(runtime, "CACHE", tmp_path / "cache")
    for _ in range(2):  # compiled, then from the cache
        kernel = runtime.load(TASK.name, SHAPE, library=library)
        for shape in ((200, 272, 136), (1, 144, 264)):
            a, b, operands = make_inputs(TASK, shape, torch.bfloat16, 5, "cuda")
            got = kernel(a, b, **operands)
            truth = truth_of(TASK, reference_of(TASK), a, b, operands, torch.bfloat16)
            assert set(got) == set(TASK.outputs)
            for name in TASK.outputs:
                found = judge_output(TASK, name, got[name], truth, False)
                assert found.passed, found.reason
    assert len(list((tmp_path / "cache").glob("*/*.o"))) == 1


def test_generate_measures_what_it_keeps(tmp_path):
    """One command from a task to a measured kernel in a library, in a process of its own."""
    name = "gemm_rmsnorm_swiglu"
    suite = yaml.safe_load(DEFAULT_SUITE.read_text())
    suite["tasks"] = {name: {**suite["tasks"][name], "timed": [list(SHAPE)]}}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(suite))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    verb = [sys.executable, "-m", "agent.cli", "generate", name]
    where = ["--tasks", "tasks.yaml", "--library", "kernels", "--json"]
    done = subprocess.run([*verb, *where], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["measured"] and answer["tasks"][name]["ending"] == "kept", answer
    [passport] = Library(tmp_path / "kernels").passports(name)
    assert passport.status == "measured" and passport.state == "proposed"
    [row] = passport.timings
    assert row["shape"] == list(SHAPE) and row["device"] == torch.cuda.get_device_name()
    assert {"gemm", "expert"} <= set(row["baselines"])
    assert "torch.compile" in {**row["baselines"], **row["left_out"]}
