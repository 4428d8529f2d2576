"""The comparator: correct kernels are never refused, wrong ones never slip through.

Truths are synthetic so that every error is known exactly; the last part runs whole
kernels through the interpreter.
"""

import math

import pytest
import torch

from primitives import ColVecReduce, RowVecLoad, TileLoad, TileStore, epilogue
from primitives.interpret import interpret
from reference_kernels.tasks import load_suite
from reference_kernels.truth import make_inputs, reference_of, truth_of
from verifier.numerics import judge, judge_output

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCALES = [1e-3, 3e-2, 1.0, 30.0, 1e3]


def gen(seed):
    return torch.Generator().manual_seed(seed)


def normal(shape, seed, scale=1.0):
    return torch.randn(shape, generator=gen(seed), dtype=torch.float64) * scale


def fp32_like(truth, seed):
    """``truth`` as an honest fp32 accumulation would give it: off by a few 2^-24 of its spread."""
    spread = float(truth.square().mean().sqrt())
    return truth + normal(truth.shape, seed, spread * 2.0**-23)


def verdict(got, truth, reference=None, **options):
    """Judge with a reference that rounds another fp32-like evaluation."""
    low = (fp32_like(truth, 1) if reference is None else reference).to(got.dtype)
    return judge("y", got, truth, low, **options)


# --- correct kernels are accepted -------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_correct_rounding_is_accepted_for_every_seed(dtype, scale):
    refused = []
    for seed in range(200):
        shape = [(1,), (2,), (3,), (5,), (8,), (1, 8), (8, 1), (3, 7)][seed % 8] if seed % 2 else (37, 144)
        truth = normal(shape, seed, scale)
        reference = fp32_like(truth, seed + 1).float() if seed % 3 else truth.float()
        found = judge("y", truth.to(dtype), truth, reference.to(dtype))
        if not found.passed:
            refused.append((seed, shape, found.reason))
    assert refused == []


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_correct_rounding_at_sixteen_to_thirty_two(dtype):
    """sgl-project/sglang #35795: half a bf16 ulp is 0.0625 here; no absolute tolerance may refuse that."""
    for seed in range(200):
        shape = [(64, 128), (1, 16), (16,), (1,)][seed % 4]
        truth = (16 + 16 * torch.rand(shape, generator=gen(seed), dtype=torch.float64)) * (-1.0) ** seed
        for got in (truth.to(dtype), fp32_like(truth, seed).to(dtype)):
            found = verdict(got, truth)
            assert found.passed, (seed, found.reason)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_exact_ties_and_a_reference_without_error(dtype):
    """Values half way between two numbers may go either way; a reference that happens to be exact raises no bar."""
    ulp = 2.0**-7 if dtype == BF16 else 2.0**-10
    truth = torch.full((1, 8), 1.0 + ulp / 2, dtype=torch.float64)
    for got in (torch.full((1, 8), 1.0, dtype=dtype), torch.full((1, 8), 1.0 + ulp, dtype=dtype)):
        assert judge("y", got, truth, torch.full((1, 8), 1.0, dtype=dtype)).passed
    exact = torch.tensor([[1.0, 2.0, -4.0, 0.5]], dtype=torch.float64)
    assert judge("y", exact.to(dtype), exact, exact.to(dtype)).passed


def test_fp32_statistics_in_another_order_of_sums_are_accepted():
    for seed in range(200):
        rows, cols = [(1, 144), (5, 272), (129, 400)][seed % 3]
        x = normal((rows, cols), seed).float()
        truth = x.double().square().sum(-1)
        blocks = torch.stack([c.square().sum(-1) for c in x.split(128, dim=-1)], -1).sum(-1)
        found = judge("s", blocks, truth, x.square().sum(-1), noise=float(truth.mean()) * 2.0**-24)
        assert found.passed, (seed, found.reason)


def test_zeros_and_signed_zeros_are_right_where_the_truth_is_zero():
    truth = torch.zeros(4, 16, dtype=torch.float64)
    assert verdict(torch.full((4, 16), -0.0, dtype=BF16), truth).passed
    assert not verdict(torch.full((4, 16), 1e-3, dtype=BF16), truth).passed


# --- wrong kernels are refused -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(1, 16), (8,), (129, 400)], ids=str)
def test_zeros_are_refused(dtype, scale, shape):
    truth = normal(shape, 0, scale)
    found = verdict(torch.zeros(shape, dtype=dtype), truth)
    assert not found.passed and found.reason.startswith("y: ")


def swiglu(scale, seed=0, m=256, n=512, k=1024):
    x, w = normal((m, k), seed, scale).to(BF16), normal((k, n), seed + 1, scale).to(BF16)

    def of(z):
        return torch.nn.functional.silu(z[:, 0::2]) * z[:, 1::2]

    return of(x.double() @ w.double()), of(x.float() @ w.float()).to(BF16)


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.02, 0.005])
@pytest.mark.parametrize("how", ["zeros", "neighbours", "doubled"])
def test_every_other_strip_of_sixteen_columns_is_refused_at_every_scale(scale, how):
    """Dao-AILab/sonic-moe #63: corrupt strips passed an absolute tolerance at scale 0.02."""
    truth, reference = swiglu(scale)
    assert judge("y", truth.to(BF16), truth, reference).passed
    got = truth.to(BF16).reshape(256, -1, 2, 16)
    got[:, :, 1] = {"zeros": torch.zeros(()), "neighbours": got[:, :, 0], "doubled": got[:, :, 1] * 2}[how]
    found = judge("y", got.reshape(256, -1), truth, reference)
    assert not found.passed
    if scale >= 0.1:
        assert "in every tile" in found.reason


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
def test_one_wrong_tile_of_many_is_refused(dtype, scale):
    truth = normal((1024, 1024), 0, scale)
    got = truth.to(dtype)
    got[256:384, 512:640] = got[128:256, 512:640]
    found = verdict(got, truth)
    assert not found.passed
    assert "in 1 of 64 128x128 tiles (first: [[2, 4]])" in found.reason


def test_one_slightly_wrong_tile_is_refused_though_the_tensor_passes():
    """A tile of low precision stays below the largest error elsewhere and hardly moves the mean."""
    truth = normal((1024, 1024), 0)
    got = truth.to(BF16)
    blur = (torch.rand(128, 128, generator=gen(9), dtype=torch.float64) - 0.5) * 0.016
    got[256:384, 512:640] = (truth[256:384, 512:640] + blur).to(BF16)
    found = verdict(got, truth)
    assert not found.passed and "tiles are wrong though the whole tensor's errors pass" in found.reason
    assert "[[2, 4]]" in found.reason


def test_missing_last_ragged_tile_is_refused():
    truth = normal((129, 400), 0)
    for fill in (0.0, math.nan, math.inf):
        got = truth.to(BF16)
        got[:, 384:] = fill
        found = verdict(got, truth)
        assert not found.passed
        if not math.isnan(fill) and not math.isinf(fill):
            assert "only in the last partial column tile" in found.reason
        got = truth.to(BF16)
        got[128:] = fill
        found = verdict(got, truth)
        assert not found.passed
        if not math.isnan(fill) and not math.isinf(fill):
            assert "only in the last partial row tile" in found.reason
    vector = truth[0].to(FP32)
    vector[384:] = 0.0
    found = verdict(vector, truth[0])
    assert not found.passed and "only in the last partial tile" in found.reason


@pytest.mark.parametrize("at", [(0, 0), (57, 311), (128, 399)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_one_odd_value_is_refused(dtype, value, at):
    truth = normal((129, 400), 0)
    got = truth.to(dtype)
    got[at] = value
    found = verdict(got, truth)
    assert not found.passed and f"at {list(at)}" in found.reason and "1 elements" in found.reason
    assert ("NaN" in found.reason) == math.isnan(value)


def test_nan_of_the_truth_is_no_wildcard():
    """gpu-mode/pygpubench #7: where the truth is NaN only NaN is right, and nowhere else."""
    truth = normal((8, 16), 0)
    truth[3] = math.nan
    reference = truth.float().to(BF16)
    assert judge("y", truth.to(BF16), truth, reference).passed
    got = truth.to(BF16)
    got[3] = 0.0
    assert not judge("y", got, truth, reference).passed
    got = truth.to(BF16)
    got[4, 0] = math.nan
    assert not judge("y", got, truth, reference).passed
    got = truth.to(BF16)
    got[5] = 100.0
    assert not judge("y", got, truth, reference).passed
    assert not judge("y", torch.full((8, 16), math.nan, dtype=BF16), truth, reference).passed


def test_infinities_and_overflow_must_agree():
    truth = torch.tensor([[math.inf, -math.inf, 1e5, 1.0]], dtype=torch.float64)
    reference = truth.float().to(FP16)  # 1e5 overflows fp16
    assert judge("y", reference.clone(), truth, reference).passed
    for at, value in ((0, 65504.0), (1, math.inf), (2, 65504.0), (2, -math.inf), (0, math.nan)):
        got = reference.clone()
        got[0, at] = value
        assert not judge("y", got, truth, reference).passed, (at, value)


@pytest.mark.parametrize("factor", [1.01, 0.99, 1.004, 0.5, -1.0, 2.0])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_a_constant_factor_is_refused(factor, scale):
    """1 % is about one bf16 ulp (0.4 % to 0.8 %): both error rules and the bias rule see it."""
    truth = normal((512, 512), 0, scale)
    found = verdict((truth * factor).to(BF16), truth)
    assert not found.passed, f"bias {found.bias}, max {found.max_error} vs {found.reference_max_error}"
    if abs(factor - 1) > 0.02:
        assert f"everywhere about {factor:.4g} x the truth" in found.reason


def test_a_factor_below_the_rounding_is_seen_by_its_bias():
    """0.1 % hides in the maximum and the mean of bf16 errors, but the errors then lean one way."""
    truth = normal((512, 512), 0)
    for factor, side in ((1.001, "away from zero"), (0.999, "toward zero")):
        found = verdict((truth * factor).to(BF16), truth)
        assert not found.passed and side in found.reason


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_truncation_instead_of_rounding_is_refused(dtype):
    truth = normal((512, 512), 0)
    bits = truth.float().view(torch.int32) & (-65536 if dtype == BF16 else -8192)
    got = bits.view(torch.float32).to(dtype)
    found = verdict(got, truth)
    assert not found.passed and found.bias < -0.5


def test_a_mean_shift_is_refused():
    truth = normal((512, 512), 0)
    assert not verdict((truth + 0.02).to(BF16), truth).passed
    statistic = normal((512,), 1).square() * 100
    assert not verdict((statistic + 0.01).float(), statistic).passed


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_statistic_computed_from_rounded_values_is_refused(dtype):
    """exploits.md N18: fp32 outputs must be fp32 work, whatever the inputs were."""
    h = normal((256, 512), 0)
    truth = h.square().sum(-1)
    noise = float(truth.mean()) * 2.0**-24
    assert verdict(h.float().square().sum(-1), truth, noise=noise).passed
    assert not verdict(h.to(dtype).float().square().sum(-1), truth, noise=noise).passed
    assert not verdict(truth.to(dtype).float(), truth, noise=noise).passed


def test_bf16_accumulation_is_refused():
    a, b = normal((128, 4096), 0).to(BF16), normal((4096, 128), 1, 1 / 64).to(BF16)
    truth = a.double() @ b.double()
    got = torch.zeros(128, 128, dtype=BF16)
    for i in range(0, 4096, 64):
        got = (got.float() + a[:, i : i + 64].float() @ b[i : i + 64].float()).to(BF16)
    assert not verdict(got, truth, (a.float() @ b.float())).passed


def test_a_dropped_last_k_step_is_refused():
    """exploits.md N01: sixteen of 4096 products missing pass an absolute tolerance completely."""
    for scale in (0.02, 1.0):
        a, b = normal((256, 4096), 0, scale).to(BF16), normal((4096, 256), 1, scale).to(BF16)
        truth, short = a.double() @ b.double(), a[:, :-16].double() @ b[:-16].double()
        assert not verdict(short.to(BF16), truth, a.float() @ b.float()).passed


@pytest.mark.parametrize("change", ["rows", "columns", "transposed", "rolled", "sign of a column", "one row repeated"])
def test_permutations_are_refused(change):
    truth = normal((256, 256), 0)
    got = truth.to(BF16)
    got = {
        "rows": lambda: got[torch.arange(256) ^ 1],
        "columns": lambda: got[:, torch.arange(256) ^ 1],
        "transposed": lambda: got.T.contiguous(),
        "rolled": lambda: got.roll(1, 0),
        "sign of a column": lambda: got * torch.where(torch.arange(256) == 77, -1.0, 1.0).to(BF16),
        "one row repeated": lambda: torch.cat([got[:255], got[:1]]),
    }[change]()
    assert not verdict(got, truth).passed


@pytest.mark.parametrize(
    "got",
    [
        torch.zeros(4, 8), torch.zeros(4, 8, dtype=FP16), torch.zeros(4, 7, dtype=BF16), torch.zeros(8, 4, dtype=BF16),
        torch.zeros(1, 4, 8, dtype=BF16), torch.zeros(4, 1, dtype=BF16), torch.zeros(0, 8, dtype=BF16),
        torch.zeros((), dtype=BF16),
    ],
    ids=lambda t: f"{tuple(t.shape)} {t.dtype}",
)  # fmt: skip
def test_shape_and_dtype_are_never_coerced(got):
    truth = torch.zeros(4, 8, dtype=torch.float64)
    found = judge("y", got, truth, truth.to(BF16))
    assert not found.passed and "must be (4, 8) and torch.bfloat16" in found.reason


# --- patterns and evidence -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (lambda t: t[:, 1::2], "only in odd columns"),
        (lambda t: t[:, 0::2], "only in even columns"),
        (lambda t: t[:, 384:], "only in the last partial column tile"),
        (lambda t: t[128:, :], "only in the last partial row tile"),
        (lambda t: t[:, :], "in every tile"),
        (lambda t: t[:128, 128:256], "in 1 of 8 128x128 tiles (first: [[0, 1]])"),
    ],
)
def test_patterns_are_named(where, text):
    truth = normal((129, 400), 0)
    got = truth.to(BF16)
    where(got).mul_(-3.0)
    found = verdict(got, truth)
    assert not found.passed and text in found.reason
    assert "e.g. at [" in found.reason and "% of elements wrong" in found.reason


def test_finding_holds_the_numbers():
    truth = normal((16, 16), 0)
    got = truth.to(BF16)
    got[2, 5] += 4.0
    found = verdict(got, truth)
    assert found.max_error == pytest.approx(float((got.double() - truth).abs().max()))
    assert found.max_error == pytest.approx(4.0, abs=0.05) and found.reference_max_error < 0.02
    assert found.relative_error == pytest.approx(float((got.double() - truth).norm() / truth.norm()))
    assert f"at [2, 5] got {float(got[2, 5]):.6g}, truth {float(truth[2, 5]):.6g}" in found.reason
    assert found.as_dict()["output"] == "y" and found.as_dict()["passed"] is False


# --- whole numbers ---------------------------------------------------------------------------


def test_whole_numbers_must_be_bit_exact():
    truth = torch.randint(-200, 200, (64, 64), generator=gen(0)).double()
    reference = truth.to(BF16)
    found = judge("y", truth.to(BF16), truth, reference, exact=True)
    assert found.passed and found.max_error == 0.0
    for step in (1.0, -1.0):
        got = truth.to(BF16)
        got[63, 0] += step if got[63, 0].abs() < 128 else 2 * step
        found = judge("y", got, truth, reference, exact=True)
        assert not found.passed and "not bit-exact on integer inputs" in found.reason and "at [63, 0]" in found.reason


def test_whole_numbers_beyond_the_dtype_round_to_even():
    truth = torch.tensor([[257.0, 259.0, 1025.0, -515.0]], dtype=torch.float64)
    assert judge("y", truth.to(BF16), truth, truth.to(BF16), exact=True).passed
    up = torch.tensor([[258.0, 260.0, 1032.0, -516.0]], dtype=BF16)
    assert not judge("y", up, truth, truth.to(BF16), exact=True).passed


# --- through whole kernels ---------------------------------------------------------------------


@epilogue(residual=TileLoad(), weight=RowVecLoad(), h=TileStore(), sumsq=ColVecReduce(product=True), y=TileStore())
def honest(acc, residual, weight):
    h = acc + residual
    return {"h": h, "sumsq": (h, h), "y": h * weight}


@pytest.mark.parametrize("act", [BF16, FP16], ids=str)
def test_an_honest_kernel_is_never_refused(act):
    """sgl-project/sglang #35795 end to end: 0 of 200 seeds, outputs up to 30, tiny and ragged shapes."""
    task = load_suite()["gemm_residual_rmsnorm"]
    reference = reference_of(task)
    dtypes = task.torch_dtypes(act)
    refused = []
    for seed in range(200):
        shape = [(1, 16, 8), (1, 144, 264), (3, 24, 16), (20, 136, 72)][seed % 4]
        a, b, operands = make_inputs(task, shape, act, seed)
        operands["weight"] = operands["weight"] * 10
        truth = truth_of(task, reference, a, b, operands, act)
        got = interpret(honest, a, b, operands, dtypes)
        for name in task.outputs:
            found = judge_output(task, name, got[name], truth, False)
            if not found.passed:
                refused.append((seed, shape, found.reason))
    assert refused == []
