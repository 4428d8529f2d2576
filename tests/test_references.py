"""The references against an ordinary Transformer under autograd in fp64, and the inputs they run on."""

import math

import pytest
import torch
import torch.nn.functional as F

from reference_kernels import references as ref
from reference_kernels.tasks import load_suite
from reference_kernels.truth import frequency_row, make_inputs, reference_of, truth_of

SUITE = load_suite()
EPS = 1e-5
M, D, H = 12, 32, 48  # tokens, model width, hidden width
LINEAR = [
    "gemm_rope", "gemm_residual_rmsnorm", "gemm_rmsnorm", "gemm_rmsnorm_rope",
    "gemm_residual_rmsnorm_bwd", "gemm_residual_rmsnorm_bwd_lean",
]  # fmt: skip


def randn(*size, grad=False):
    return torch.randn(size, dtype=torch.float64).requires_grad_(grad)


def rms_scale(x):
    return (x.square().mean(-1) + EPS).rsqrt()


def rmsnorm(x, w):
    return F.rms_norm(x, x.shape[-1:], w, EPS)


def swiglu(z):
    gate, up = z.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up


def close(got, want, rtol=1e-11, atol=1e-11):
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


# --- backward kernels against autograd ---------------------------------------------


def test_swiglu_backward():
    z, w = randn(M, 2 * H, grad=True), randn(H, D)
    y = swiglu(z)
    y.retain_grad()
    dout = randn(M, D)
    (y @ w * dout).sum().backward()
    got = ref.gemm_swiglu_bwd(dout @ w.T, z.detach())
    close(got["dz"], z.grad)
    close(got["y"], y.detach())
    close(got["zdz"], (z.detach() * z.grad).sum(-1))


def rmsnorm_and_linear(x, w, w1):
    return rmsnorm(x, w) @ w1


@pytest.mark.parametrize("lean", [False, True])
def test_rmsnorm_backward_with_the_statistic_of_the_next_gemm(lean):
    x, w, w1 = randn(M, D, grad=True), randn(D, grad=True), randn(D, H)
    dx_in, dz = randn(M, D), randn(M, H)
    z = rmsnorm_and_linear(x, w, w1)
    ((z * dz).sum() + (x * dx_in).sum()).backward()
    saved, rstd = x.detach(), rms_scale(x.detach())
    zdz = (z.detach() * dz).sum(-1) / D  # sum over the features of z, mean over those of x
    dn = dz @ w1.T
    close(zdz, (rmsnorm(saved, w.detach()) * dn).mean(-1))
    if lean:
        correction = -(rstd**3 / D) * (dn * w.detach() * saved).sum(-1)
        got = ref.gemm_residual_rmsnorm_bwd_lean(dn * rstd[:, None], saved, dx_in, w.detach(), correction)
        assert got.keys() == {"dx", "dweight"}
    else:
        got = ref.gemm_residual_rmsnorm_bwd(dn, saved, dx_in, w.detach(), rstd, zdz)
        close(got["n"], rmsnorm(saved, w.detach()))
    close(got["dx"], x.grad)
    close(got["dweight"], w.grad)


def test_whole_mlp_block_forward_and_backward():
    """Kernels 4, 6, 4 forward and 10, 9 backward are the block that autograd differentiates."""
    y0, x0 = randn(M, H, grad=True), randn(M, D, grad=True)
    w0, w1, w2 = randn(H, D, grad=True), randn(D, 2 * H, grad=True), randn(H, D, grad=True)
    gamma, gamma2, dx2 = randn(D, grad=True), randn(D), randn(M, D)
    x1 = y0 @ w0 + x0
    x2 = swiglu(rmsnorm(x1, gamma) @ w1) @ w2 + x1
    x2.backward(dx2)

    with torch.no_grad():
        first = ref.gemm_residual_rmsnorm(y0 @ w0, x0, gamma)
        rstd = (first["sumsq"] / D + EPS).rsqrt()
        mid = ref.gemm_rmsnorm_swiglu(first["y"] @ w1, rstd)
        last = ref.gemm_residual_rmsnorm(mid["y"] @ w2, first["h"], gamma2)
        close(last["h"], x2.detach())
        close(last["sumsq"], x2.square().sum(-1))
        close(last["y"] * (last["sumsq"] / D + EPS).rsqrt()[:, None], rmsnorm(x2, gamma2))

        ten = ref.gemm_swiglu_bwd(dx2 @ w2.T, mid["z"])
        nine = ref.gemm_residual_rmsnorm_bwd(ten["dz"] @ w1.T, first["h"], dx2, gamma, rstd, ten["zdz"] / D)
        for got, leaf in (
            (nine["dx"], x0),
            (nine["dx"] @ w0.T, y0),
            (y0.T @ nine["dx"], w0),
            (nine["n"].T @ ten["dz"], w1),
            (ten["y"].T @ dx2, w2),
            (nine["dweight"], gamma),
        ):
            close(got, leaf.grad, rtol=1e-9, atol=1e-9)


def test_deferral():
    h, w, w1 = randn(M, D), randn(D), randn(D, H)
    close(ref.gemm_rmsnorm((h * w) @ w1, rms_scale(h))["y"], rmsnorm(h, w) @ w1)


# --- RoPE ---------------------------------------------------------------------------


def table_of(angle):
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


def test_rope_is_a_rotation_by_minus_theta():
    acc, angle = randn(M, D), randn(M, D // 2)
    got = ref.gemm_rope(acc, table_of(angle))
    turned = torch.view_as_complex(acc.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), -angle)
    close(got["o"], torch.view_as_real(turned).flatten(-2))
    close(got["d"], acc)
    close(ref.gemm_rope(got["o"], table_of(-angle))["o"], acc)
    one = ref.gemm_rope(torch.tensor([[1.0, 0.0]]), table_of(torch.tensor([[math.pi / 2]])))["o"]
    torch.testing.assert_close(one, torch.tensor([[0.0, -1.0]]))


@pytest.mark.parametrize("position", [0, 1, 777, 131071, 2**24 - 1])
def test_rope_lean_equals_the_table(position):
    n, head_dim, base = 64, 32, 10000.0
    freq = frequency_row(n, base, head_dim)
    inv_freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    table = table_of((position * inv_freq).repeat(n // head_dim))[None].expand(M, n)
    acc, rstd, positions = randn(M, n), randn(M), torch.full((M,), float(position), dtype=torch.float64)
    close(ref.gemm_rope_lean(acc, positions, freq.double())["o"], ref.gemm_rope(acc, table)["o"], atol=2e-7, rtol=0)
    close(
        ref.gemm_rmsnorm_rope_lean(acc, rstd, positions, freq.double())["o"],
        ref.gemm_rmsnorm_rope(acc, rstd, table)["o"], atol=5e-7, rtol=0,
    )  # fmt: skip
    low = ref.gemm_rope_lean(acc.float(), positions.float(), freq)["o"]
    assert low.dtype == torch.float32
    close(low.double(), ref.gemm_rope(acc, table)["o"], atol=2e-6, rtol=0)


def test_frequency_row_carries_48_bits():
    row = frequency_row(256, base=500000.0, head_dim=128).double()
    want = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128) / (2 * math.pi)
    close(row[0::2] + row[1::2], want.repeat(2), rtol=2.0**-47, atol=0)
    assert (row[1::2].abs() <= row[0::2] * 2.0**-24).all()


# --- cross-entropy ------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
def test_cross_entropy_loss_and_gradient(scaled):
    acc, target = randn(M, H, grad=True), torch.randint(0, H, (M,), dtype=torch.int32)
    rstd = randn(M).abs() + 0.1
    z = acc * rstd[:, None] if scaled else acc
    want = F.cross_entropy(z, target.long(), reduction="none")
    (slope,) = torch.autograd.grad(want.sum(), acc)
    run = ref.gemm_rmsnorm_cross_entropy(acc, rstd, target) if scaled else ref.gemm_cross_entropy(acc, target)
    loss = run["lse"] - run["logit"]
    close(loss, want)
    close(torch.autograd.grad(loss.sum(), acc)[0], slope)
    close(run["z"], z)


def test_select_outside_is_nan():
    acc = torch.arange(8.0).reshape(4, 2)
    got = ref.gemm_cross_entropy(acc, torch.tensor([1, -1, 2, 0], dtype=torch.int32))["logit"]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor([1.0, math.nan, math.nan, 6.0]), equal_nan=True)


# --- lean variants --------------------------------------------------------------------


def test_lean_variants_equal_their_full_versions():
    acc, rstd, target = randn(M, H), randn(M), torch.randint(0, H, (M,))
    pairs = [
        (ref.gemm_swiglu_lean(acc), ref.gemm_swiglu(acc), {"y"}),
        (ref.gemm_rmsnorm_swiglu_lean(acc, rstd), ref.gemm_rmsnorm_swiglu(acc, rstd), {"y"}),
        (
            ref.gemm_rmsnorm_cross_entropy_lean(acc, rstd, target),
            ref.gemm_rmsnorm_cross_entropy(acc, rstd, target),
            {"logit", "lse"},
        ),
    ]
    for lean, full, outputs in pairs:
        assert lean.keys() == outputs and outputs < full.keys()
        for name in outputs:
            close(lean[name], full[name])
    close(ref.gemm_swiglu(acc)["y"], swiglu(acc))
    close(ref.gemm_rmsnorm_swiglu(acc, rstd)["y"], swiglu(acc * rstd[:, None]))
    close(ref.gemm_rmsnorm_swiglu(acc, rstd)["z"], acc * rstd[:, None])


def test_lean_norm_backward_equals_full_with_folded_scale():
    dn, x, dx_in, w, rstd, zdz = randn(M, D), randn(M, D), randn(M, D), randn(D), randn(M).abs(), randn(M)
    full = ref.gemm_residual_rmsnorm_bwd(dn, x, dx_in, w, rstd, zdz)
    lean = ref.gemm_residual_rmsnorm_bwd_lean(dn * rstd[:, None], x, dx_in, w, -(rstd**2) * zdz)
    close(lean["dx"], full["dx"])
    close(lean["dweight"], full["dweight"])


# --- inputs and evaluations -------------------------------------------------------------


@pytest.mark.parametrize("name", SUITE.tasks)
def test_reference_makes_exactly_the_declared_outputs(name):
    task, (m, n, k) = SUITE[name], (10, 64, 24)
    a, b, operands = make_inputs(task, (m, n, k), torch.bfloat16, seed=3)
    assert a.shape == (m, k) and b.shape == (k, n) and operands.keys() == task.operands.keys()
    assert {x: t.dtype for x, t in operands.items()} == {
        x: d for x, d in task.torch_dtypes(torch.bfloat16).items() if x in operands
    }
    assert (b.mT if task.b == "nk" else b).is_contiguous()
    truth = truth_of(task, reference_of(task), a, b, operands, torch.bfloat16)
    out = truth.exact
    assert out.keys() == truth.same.keys() == truth.low.keys() == task.outputs.keys()
    assert all(t.dtype == torch.float64 and torch.isfinite(t).all() for t in out.values())
    shapes = {"TileStore": lambda s: (m, int(n * s.width)), "RowVecReduce": lambda s: (n,)}
    for x, spec in task.outputs.items():
        assert out[x].shape == shapes.get(spec.kind, lambda s: (m,))(spec), x
    for x, spec in task.outputs.items():
        assert truth.low[x].dtype == (torch.bfloat16 if spec.kind == "TileStore" else torch.float32)
        assert torch.equal(truth.low[x], truth.same[x].to(truth.low[x].dtype))
        close(truth.same[x].double(), out[x], rtol=1e-5, atol=1e-5 * max(1.0, out[x].abs().max()))


@pytest.mark.parametrize("name", SUITE.tasks)
@pytest.mark.parametrize("style", ["normal", "integers"])
def test_inputs_depend_on_the_seed_only(name, style):
    def flat(seed):
        torch.rand(seed + 1)  # the global generator must not matter
        a, b, operands = make_inputs(SUITE[name], (9, 64, 16), torch.float16, seed, style=style)
        return {"A": a, "B": b, **operands}

    one, again, other = flat(5), flat(5), flat(6)
    assert all(torch.equal(one[x], again[x]) for x in one)
    fixed = {"freq"} | ({"rstd"} if style == "integers" else set())
    assert all(not torch.equal(one[x], other[x]) for x in one if x not in fixed)


@pytest.mark.parametrize("act", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LINEAR)
def test_whole_number_inputs_are_exact_in_fp32(name, act):
    task = SUITE[name]
    for shape in task.ragged:
        a, b, operands = make_inputs(task, shape, act, seed=1, style="integers")
        truth = truth_of(task, reference_of(task), a, b, operands, act)
        for x, want in truth.exact.items():
            assert want.abs().max() > 0 and truth.same[x].dtype == torch.float32
            assert torch.equal(truth.same[x].double(), want), f"{x} at {shape}"


def test_low_precision_differs_on_normal_inputs():
    task = SUITE["gemm_rmsnorm"]
    a, b, operands = make_inputs(task, (64, 64, 256), torch.bfloat16, seed=0)
    truth = truth_of(task, ref.gemm_rmsnorm, a, b, operands, torch.bfloat16)
    exact = (a.double() @ b.double()) * operands["rstd"].double()[:, None]
    close(truth.exact["y"], exact)
    assert 0 < (truth.same["y"].double() - exact).abs().max() < 1e-5
    assert 1e-4 < ((truth.low["y"].double() - exact) / exact).abs().max() < 2.0**-8


def test_distributions():
    m, n, k = 512, 256, 1024
    a, b, operands = make_inputs(SUITE["gemm_rmsnorm_rope"], (m, n, k), torch.float16, seed=2)
    assert a.float().std().item() == pytest.approx(1.0, rel=0.01) and abs(a.float().mean()) < 0.01
    assert b.float().std().item() == pytest.approx(k**-0.5, rel=0.01)
    close(operands["rstd"], (a.double().square().mean(-1) + 1e-6).rsqrt().float(), rtol=1e-6, atol=0)
    table = operands["cos_sin"].double()
    close(table[:, 0::2] ** 2 + table[:, 1::2] ** 2, torch.ones(m, n // 2).double(), rtol=0, atol=2e-3)
    assert abs(table.mean()) < 0.01  # angles all around the circle

    target = make_inputs(SUITE["gemm_cross_entropy"], (4096, 16, 8), torch.float16, seed=2)[2]["target"]
    assert target.dtype == torch.int32 and sorted(set(target.tolist())) == list(range(16))
    position = make_inputs(SUITE["gemm_rope_lean"], (4096, 16, 8), torch.float16, seed=2)[2]["position"]
    assert torch.equal(position, position.round()) and position.min() >= 0 and 120000 < position.max() < 131072


def test_whole_number_inputs_are_small_and_signed():
    a, b, operands = make_inputs(SUITE["gemm_rmsnorm_rope"], (64, 64, 64), torch.bfloat16, seed=4, style="integers")
    for t in (a, b):
        assert set(t.float().unique().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert set(operands["rstd"].unique().tolist()) == {0.5, 1.0, 2.0}
    table = operands["cos_sin"].float()
    assert set(table.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert torch.equal(table[:, 0::2] ** 2 + table[:, 1::2] ** 2, torch.ones(64, 32))
