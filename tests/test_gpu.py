"""On a Hopper GPU: compile here, launch from the manifest, judge, time. Skipped elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from agent.composer import compose
from reference_kernels.tasks import load_suite
from verifier.bundle import CONFIGS, build
from verifier.gpu import GpuWorker
from verifier.measure import Session, read_bundle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
SHAPE = (2048, 2048, 2048)


@pytest.fixture(scope="module")
def bundle(pool, tmp_path_factory):
    """A right kernel and one that forgets the residual, each in two configurations."""
    task = load_suite()["gemm_residual_rmsnorm"]
    right = compose(task)
    wrong = right.replace("h = acc + residual", "h = acc + acc - acc")
    directory = tmp_path_factory.mktemp("bundle")
    build([(task, right, "right"), (task, wrong, "wrong")], directory, pool, configs=CONFIGS[:2])
    return read_bundle(directory)


@pytest.fixture(scope="module")
def measured(bundle):
    with GpuWorker() as worker:
        session = Session(worker, bundle)
        return session, {m.author: m for m in session.measure_task("gemm_residual_rmsnorm", (), [SHAPE])}


def test_the_right_kernel_is_measured_and_the_wrong_one_ends_as_a_verdict(measured):
    _, by_author = measured
    right, wrong = by_author["right"], by_author["wrong"]
    assert right.passed and [v.stage for v in right.verdicts] == ["numerics", "timing"]
    assert not wrong.passed and not wrong.rows
    assert wrong.verdicts[0].stage == "numerics" and wrong.verdicts[0].reason.startswith("h: ")


def test_times_are_possible(measured):
    session, by_author = measured
    row = by_author["right"].rows[0]
    assert row["floor_us"] < row["kernel_us"] < row["total_us"] < 10 * row["floor_us"]
    assert row["kernel_us"] - row["gemm_us"] == pytest.approx(row["tax_us"], abs=0.1 * row["gemm_us"])
    assert set(row["ratios"]) == {"gemm", "expert"}
    assert 0.9 < row["wall_over_events"] < 1.1
    assert session.ceilings["copy_bytes"] > 1e12 and session.ceilings["matmul_flops"] > 3e14


def test_a_kernel_against_itself_is_within_one_percent(bundle):
    with GpuWorker() as worker:
        found = Session(worker, bundle).resolution("gemm_residual_rmsnorm")
    assert found["low"] <= found["median"] <= found["high"]
    assert abs(math.log(found["median"])) < 0.01


def test_a_dead_worker_costs_one_command(bundle):
    from verifier.gpu import CommandFailed, WorkerLost

    path, artefact = bundle.artefacts[0]
    task = bundle.tasks["gemm_residual_rmsnorm"]
    command = {"manifest": path, "task": task.model_dump(mode="json"), "shape": [200, 272, 136], "act": artefact.act,
               "seed": 1, "style": "normal"}  # fmt: skip
    with GpuWorker() as worker:
        with pytest.raises((CommandFailed, WorkerLost)):
            worker.call("numerics", 60.0, **{**command, "shape": [200, 271, 136]})  # rows TMA cannot address
        assert worker.call("numerics", 60.0, **command)["passed"] is (artefact.author == "right")
