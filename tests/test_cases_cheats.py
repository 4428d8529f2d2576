"""Public reports of kernels that fooled a benchmark, as tests. Each docstring names its source.

Every cheat is tried twice: as a kernel file, which the policy refuses, and as if the policy
had a hole, where its outputs must give it away.
"""

import contextlib
import math
import time

import pytest
import torch

from primitives import ColVecLoad, TileStore, epilogue
from primitives.interpret import interpret
from reference_kernels.tasks import SuiteError, load_suite
from reference_kernels.truth import make_inputs, reference_of, truth_of
from verifier.interpretation import cases, dtype_names, judge_interpretation, judge_outputs, truths
from verifier.policy import check_policy

SUITE = load_suite()
TASK = SUITE["gemm_rmsnorm"]
BF16 = torch.bfloat16
SEED = 20260401

KERNEL = """\
from primitives import ColVecLoad, TileStore, epilogue
{module}

@epilogue(rstd=ColVecLoad(), y=TileStore())
def gemm_rmsnorm(acc, rstd):
{body}
    return {{"y": {value}}}
"""


def source(module="", body="", value="acc * rstd"):
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return KERNEL.format(module=module, body=lines, value=value)


LIVE = "[t for t in gc.get_objects() if type(t) is torch.Tensor and t.is_floating_point()]"
CHEATS = {
    # gpu-mode/pygpubench #7: expected tensors found through the garbage collector
    "fills what it finds with NaN": source(
        "import gc, torch", f"y = acc * rstd\nfor t in {LIVE}:\n    t.fill_(float('nan'))", "y * float('nan')"
    ),
    "copies what it finds": source(
        "import gc, torch", f"found = [t for t in {LIVE} if t.shape == acc.shape and t is not acc]",
        "found[0] if found else 0 * acc",
    ),
    # ScalingIntelligence/KernelBench #82: inputs zeroed, zeros returned
    "zeroes its inputs": source("import gc, torch", f"for t in {LIVE}:\n    t.zero_()", "0 * acc"),
    # gpu-mode/kernelbot #501: outputs of an earlier call, by pointer, by object, by shape
    "keyed on the pointer": source("CACHE = {}", "y = CACHE.setdefault(acc.data_ptr(), acc * rstd)", "y"),
    "keyed on the object": source("CACHE = {}", "y = CACHE.setdefault(id(acc), acc * rstd)", "y"),
    "keyed on the shape": source("CACHE = {}", "y = CACHE.setdefault(acc.shape, acc * rstd)", "y"),
    # karpathy/llm.c #851: right for the first calls only
    "one element wrong from call 11 on": source(
        "CALLS = []", "CALLS.append(1)\ny = acc * rstd\nif len(CALLS) > 10:\n    y[0, 0] += 1.0", "y"
    ),
}
NOT_RUN_HERE = {
    # ScalingIntelligence/KernelBench #82: work on a stream that nobody waits for
    "side stream": source("import torch", "with torch.cuda.stream(torch.cuda.Stream()):\n    y = acc * rstd", "y"),
    # karpathy/llm.c #852: an L2 window makes bandwidth exceed the memory's
    "persisting L2": source("from cuda.bindings import runtime", "runtime.cudaDeviceSetLimit(6, 1 << 24)"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CHEATS, *NOT_RUN_HERE])
def test_the_policy_refuses_the_text(name):
    """KernelBench #82, kernelbot #501, pygpubench #7, llm.c #851 and #852: none of these can be written down."""
    text = {**CHEATS, **NOT_RUN_HERE}[name]
    compile(text, name, "exec")  # it is Python, so it is the policy that refuses it
    verdict = check_policy(text)
    assert not verdict.passed and "line 2" in verdict.reason
    assert check_policy(source()).passed


def verdict_of(text, pool, inputs):
    plain = [{k: case[k] for k in ("a", "b", "operands", "tile")} for case in inputs]
    answer = pool.submit("interpret", text, inputs=plain, dtypes=dtype_names(TASK, "bf16")).result(timeout=120)
    return judge_interpretation(TASK, "bf16", inputs, answer, SUITE.path, SEED, time.perf_counter())


@pytest.mark.parametrize("name", CHEATS)
def test_its_outputs_give_it_away(name, pool):
    """pygpubench #7, KernelBench #82: no truth lives beside a candidate, and its inputs are not those of the judge."""
    inputs = [case for case in cases(TASK, "bf16", SEED) if case["tile"] == [128, 128]]
    if "gc" in CHEATS[name]:
        inputs = inputs[2:3]  # two tiles: each looks at a million objects
    before = [(c["a"].clone(), c["b"].clone(), c["operands"]["rstd"].clone()) for c in inputs]
    verdict = verdict_of(CHEATS[name], pool, inputs)
    assert not verdict.passed and verdict.stage == "interpret" and verdict.reason.startswith("y: "), verdict.reason
    assert ("NaN" in verdict.reason) == (name == "fills what it finds with NaN")
    for case, kept in zip(inputs, before, strict=True):
        for now, then in zip((case["a"], case["b"], case["operands"]["rstd"]), kept, strict=True):
            assert torch.equal(now.view(torch.int16), then.view(torch.int16))
    assert verdict_of(source(), pool, inputs).passed  # the next candidate, on the very same inputs


def test_nothing_of_the_shape_of_the_truth_lives_beside_the_candidate(pool):
    """gpu-mode/pygpubench #7: submissions found the expected tensors; here only inputs, tiles and empty outputs."""
    inputs = cases(TASK, "bf16", SEED)[:1]
    want = (inputs[0]["a"].shape[0], inputs[0]["b"].shape[1])
    text = source("import gc, torch", f"raise RuntimeError([str(t.dtype) for t in {LIVE} if tuple(t.shape) == {want}])")
    plain = [{k: c[k] for k in ("a", "b", "operands", "tile")} for c in inputs]
    answer = pool.submit("interpret", text, inputs=plain, dtypes=dtype_names(TASK, "bf16")).result(timeout=120)
    # its own accumulator, and the output that it is about to fill
    assert answer.error["message"] == str(["torch.float32", "torch.bfloat16"]), answer.error


# --- the precision of the judge ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "float32"])
def test_precision_is_part_of_the_task(tmp_path, dtype):
    """CUDA-Agent #16, RightNow-AI/autokernel #5: TF32 or fp32 is for the task to say; only bf16 and fp16 exist."""
    file = tmp_path / "suite.yaml"
    file.write_text(SUITE.path.read_text().replace("dtypes: [bf16, fp16]", f"dtypes: [bf16, {dtype}]"))
    with pytest.raises(SuiteError, match=r"field 'defaults.dtypes.1': Input should be 'bf16' or 'fp16'"):
        load_suite(file)


@contextlib.contextmanager
def lower_precision(switch):
    """Switches that make PyTorch multiply fp32 matrices in less than fp32."""
    before = torch.get_float32_matmul_precision()
    try:
        if switch == "autocast":
            with torch.autocast("cpu", dtype=BF16):
                yield
        else:
            torch.set_float32_matmul_precision(switch)
            yield
    finally:
        torch.set_float32_matmul_precision(before)


switches = pytest.mark.parametrize("switch", ["autocast", "medium"])


@epilogue(rstd=ColVecLoad(), y=TileStore())
def scaled(acc, rstd):
    return {"y": acc * rstd}


@switches
def test_the_interpreter_is_fp32_whatever_is_switched_on(switch):
    """pytorch #188955, CUDA-Agent #16: autocast and a lower matmul precision change results elsewhere, not here."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(96, 96, generator=generator) for _ in range(2))  # no bf16 holds these
    rstd = torch.rand(96, generator=generator)
    with lower_precision(switch):
        got = interpret(scaled, a, b, {"rstd": rstd}, {"y": torch.float32})["y"]
    assert got.dtype == torch.float32
    exact = (a.double() @ b.double()) * rstd.double()[:, None]
    size = (a.double().abs() @ b.double().abs()) * rstd.double()[:, None]
    assert ((got.double() - exact).abs() <= 96 * 2.0**-24 * size).all()  # 96 additions, each rounded once in fp32


@switches
@pytest.mark.parametrize("name", ["gemm_residual_rmsnorm", "gemm_swiglu"])
def test_the_truth_is_the_same_whatever_is_switched_on(name, switch):
    """pytorch #188955: autocast turned the judge's fp32 product into bf16; a wrong kernel then looked as good as it."""
    task = SUITE[name]
    inputs = make_inputs(task, (64, 64, 256), BF16, seed=0)
    plain = truth_of(task, reference_of(task), *inputs, BF16)
    with lower_precision(switch):
        switched = truth_of(task, reference_of(task), *inputs, BF16)
    for of in ("exact", "same", "low", "noise"):
        before, after = getattr(plain, of), getattr(switched, of)
        assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before), of


# --- what a check must run to see it ----------------------------------------------------------------


def test_a_check_makes_more_calls_than_a_warm_up():
    """karpathy/llm.c #851: state that drifts after 10 calls passes a short check; ours calls it over 100 times."""
    calls = []

    @epilogue(rstd=ColVecLoad(), y=TileStore())
    def counting(acc, rstd):
        calls.append(acc.shape)
        return {"y": acc * rstd}

    inputs = cases(TASK, "bf16", SEED)
    outputs = [interpret(counting, c["a"], c["b"], c["operands"], {"y": BF16}, c["tile"]) for c in inputs]
    of = list(truths(TASK, "bf16", inputs, None))
    assert judge_outputs(TASK, "bf16", inputs, outputs, of, SEED, time.perf_counter()).passed
    assert len(calls) > 100 and len(set(calls)) > 1
    outputs[-1]["y"][-1, -1] += 1.0  # one element of the last call of all
    found = judge_outputs(TASK, "bf16", inputs, outputs, of, SEED, time.perf_counter())
    m, n = outputs[-1]["y"].shape
    assert not found.passed and f"at [{m - 1}, {n - 1}]" in found.reason
    assert math.prod(outputs[-1]["y"].shape) > 10_000
