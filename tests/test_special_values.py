"""NaN and infinities: what the policy of each output demands, and that honest kernels meet it."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from agent.composer import compose
from primitives.interpret import interpret
from reference_kernels.tasks import ACT_DTYPES, DEFAULT_SUITE, SuiteError, load_suite
from reference_kernels.truth import make_inputs, reference_of, truth_of
from verifier.check import DEFAULT_CONFIG
from verifier.numerics import judge, judge_output
from verifier.resources import _dump, cubin_of

ROOT = Path(__file__).resolve().parent.parent
SUITE = load_suite()
INF = math.inf


def one_row(*values: float, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def judged(got: torch.Tensor, truth: torch.Tensor, special: str):
    return judge("y", got, truth.double(), truth.to(got.dtype), special=special)


# --- the rule ------------------------------------------------------------------------------


def test_propagate_wants_the_same_value_and_nonfinite_any():
    truth = one_row(INF, -INF, math.nan, 1.0)
    for value in (INF, -INF, math.nan):
        for at in range(3):
            got = truth.clone()
            got[0, at] = value
            same = bool(got[0, at] == truth[0, at]) or (math.isnan(value) and at == 2)
            assert judged(got, truth, "propagate").passed == same
            assert judged(got, truth, "nonfinite").passed


@pytest.mark.parametrize("special", ["propagate", "nonfinite"])
def test_a_number_in_place_of_an_infinity_is_refused_either_way(special):
    truth = one_row(INF, math.nan, 1.0)
    for at in (0, 1):
        got = truth.clone()
        got[0, at] = 3e38
        assert not judged(got, truth, special).passed


@pytest.mark.parametrize("special", ["propagate", "nonfinite"])
@pytest.mark.parametrize("value", [INF, -INF, math.nan])
def test_nothing_may_leak_into_finite_elements(special, value):
    truth = one_row(INF, 2.0, 1.0)
    got = truth.clone()
    got[0, 2] = value
    assert not judged(got, truth, special).passed


@pytest.mark.parametrize("value", [-INF, math.nan, 65504.0])
def test_overflow_of_the_dtype_is_no_licence(value):
    """Where the fp64 truth is a number that only the dtype cannot hold, the output must be that infinity."""
    truth = torch.tensor([[1e6, 1.0]], dtype=torch.float64)
    reference = truth.to(torch.float16)
    assert judge("y", reference.clone(), truth, reference, special="nonfinite").passed
    got = reference.clone()
    got[0, 0] = value
    assert not judge("y", got, truth, reference, special="nonfinite").passed


# --- the inputs ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SUITE.tasks))
@pytest.mark.parametrize("act", list(ACT_DTYPES))
def test_two_rows_hold_one_infinity_each_and_every_statistic_is_a_number(name, act):
    task = SUITE[name]
    a, b, operands = make_inputs(task, task.ragged[0], ACT_DTYPES[act], 3, style="inf")
    assert int((a == INF).sum()) == int((a == -INF).sum()) == 1 and int((~a.isfinite()).any(1).sum()) == 2
    assert bool(b.isfinite().all())
    for n, t in operands.items():
        assert bool(t.isfinite().all()), n
        assert task.operands[n].fill != "rstd" or bool((t > 0).all())


@pytest.mark.parametrize("shape", [(1, 144, 264), (2, 16, 8)])
def test_few_rows_hold_both(shape):
    a, _, _ = make_inputs(SUITE["gemm_rmsnorm"], shape, torch.bfloat16, 0, style="inf")
    assert int((a == INF).sum()) == int((a == -INF).sum()) == 1


# --- honest kernels, and kernels that are not -------------------------------------------------


def outputs_of(name: str, act: str, seed: int, style: str, shape):
    task, dtype = SUITE[name], ACT_DTYPES[act]
    scope: dict = {}
    exec(compose(task), scope)
    a, b, operands = make_inputs(task, shape, dtype, seed, style=style)
    truth = truth_of(task, reference_of(task), a, b, operands, dtype)
    return task, truth, interpret(scope[name], a, b, operands, task.torch_dtypes(dtype))


@pytest.mark.parametrize("act", list(ACT_DTYPES))
@pytest.mark.parametrize("name", list(SUITE.tasks))
def test_the_composers_kernels_meet_their_policy(name, act):
    for seed in range(3):
        for style in ("nan", "inf"):
            for shape in (SUITE[name].ragged[0], SUITE[name].ragged[2]):
                task, truth, got = outputs_of(name, act, seed, style, shape)
                for output in task.outputs:
                    found = judge_output(task, output, got[output], truth, False)
                    assert found.passed, (style, shape, seed, found.reason)


@pytest.mark.parametrize("name", list(SUITE.tasks))
def test_a_kernel_that_saturates_is_refused(name):
    """Every output that the infinities reach has a finite value in its place where the truth is infinite."""
    task, truth, got = outputs_of(name, "bf16", 0, "inf", SUITE[name].ragged[0])
    reached = [n for n in task.outputs if not bool(truth.exact[n].isfinite().all())]
    assert reached
    for output in reached:
        saturated = got[output].nan_to_num(0.0, 3e4, -3e4)
        assert not judge_output(task, output, saturated, truth, False).passed, output


@pytest.mark.parametrize("name", list(SUITE.tasks))
def test_an_infinity_that_leaks_into_the_next_row_is_refused(name):
    task, truth, got = outputs_of(name, "bf16", 0, "inf", SUITE[name].ragged[0])
    for output in (n for n in task.outputs if task.outputs[n].kind != "RowVecReduce"):
        leaked = got[output].clone()
        finite = leaked.isfinite().reshape(len(leaked), -1).all(1).nonzero()
        leaked[int(finite[0])] = INF
        assert not judge_output(task, output, leaked, truth, False).passed, output


# --- the policy is said ------------------------------------------------------------------------


def test_the_policy_in_one_line():
    assert SUITE["gemm_rmsnorm"].special_values == (
        "NaN and infinities exactly where the fp64 reference has them, and nowhere else"
    )
    line = SUITE["gemm_cross_entropy"].special_values
    assert "in logit, lse any of them counts there" in line and "logit is NaN where target is outside the columns" in line


def edited(tmp_path, change) -> None:
    content = yaml.safe_load(DEFAULT_SUITE.read_text())
    change(content["tasks"]["gemm_rmsnorm"])
    path = tmp_path / "tasks.yaml"
    path.write_text(yaml.safe_dump(content))
    load_suite(path)


def test_an_unknown_policy_is_an_error_with_its_line(tmp_path):
    with pytest.raises(SuiteError, match=r"tasks.yaml:\d+: field 'tasks.gemm_rmsnorm.outputs.y.special'"):
        edited(tmp_path, lambda task: task["outputs"]["y"].update(special="ignore"))


def test_operands_have_no_policy(tmp_path):
    with pytest.raises(SuiteError, match="operand 'rstd': 'special' is a rule for outputs"):
        edited(tmp_path, lambda task: task["operands"]["rstd"].update(special="nonfinite"))


# --- maxima on the device ------------------------------------------------------------------------------

MAXIMA = """
from primitives import ColVecReduce, RowVecReduce, TileStore, epilogue
@epilogue(
    y=TileStore(), top=ColVecReduce(combine="max"), peak=ColVecReduce(combine="max_abs"),
    best=RowVecReduce(combine="max"), most=RowVecReduce(combine="max_abs"),
)
def maxima(acc):
    return {"y": acc, "top": acc, "peak": acc, "best": acc, "most": acc}
"""


def test_maxima_of_tiles_keep_nan_on_the_device(pool):
    """As torch.amax and the interpreter do: every maximum in the machine code is of the kind that keeps NaN."""
    dtypes = {"y": "bf16", "top": "fp32", "peak": "fp32", "best": "fp32", "most": "fp32"}
    job = pool.submit("compile", MAXIMA, act="bf16", dtypes=dtypes, config=DEFAULT_CONFIG, b_major="n")
    answer = job.result(timeout=120)
    assert answer.ok, answer.describe()
    cubin = answer.directory / "k.cubin"
    cubin.write_bytes(cubin_of(answer.directory / "kernel.o"))
    found = Counter(re.findall(r"\bFMNMX\S*", _dump("-sass", cubin)))
    assert set(found) == {"FMNMX.NAN", "FMNMX.NAN.XORSIGN"} and min(found.values()) >= 2 * 128, found


FINALISER = """
import torch
from primitives.device.finish import reduce_columns, reduce_rows
nan = float("nan")
small = torch.tensor([[1, nan, 3], [1, 2, 3]])
print(reduce_rows(small, True).tolist(), reduce_columns(small, True).tolist())
partials = torch.randn(40, 300)
assert torch.equal(reduce_rows(partials, True), partials.amax(1))
assert torch.equal(reduce_columns(partials, True), partials.amax(0))
partials[3, 0] = partials[5, 299] = nan  # the first block of tiles and the last
assert reduce_rows(partials, True).isnan().nonzero().flatten().tolist() == [3, 5]
assert reduce_columns(partials, True).isnan().nonzero().flatten().tolist() == [0, 299]
"""


def test_the_gpu_finaliser_of_a_maximum_keeps_nan():
    """As torch.amax does; run by Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", FINALISER], capture_output=True, text=True, timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
    assert done.stdout.split("\n")[0] == "[nan, 3.0] [1.0, nan, 3.0]"
