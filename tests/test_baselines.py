"""Baselines: layouts and coverage on the CPU, with the libraries' operations written out in PyTorch."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from leaderboard import baselines as libraries
from leaderboard.baselines import coda, flashinfer, liger
from reference_kernels import references
from reference_kernels.references import halves, pairs
from reference_kernels.tasks import load_suite
from reference_kernels.truth import make_inputs, reference_of
from verifier.baselines import PYTORCH, Unavailable, _model, _ways, add_baseline, gross_error, pytorch_ways
from verifier.timing import Bench

SUITE = load_suite()
SHAPE = (24, 512, 64)  # four rotary heads
BF16 = torch.bfloat16


def inputs_of(name, double=False):
    a, b, operands = make_inputs(SUITE[name], SHAPE, BF16, 3)
    if double:
        a, b = a.double(), b.double()
        operands = {n: t.double() if t.is_floating_point() else t for n, t in operands.items()}
    return a, b, operands


def exact_of(name, prepared=None):
    a, b, operands = inputs_of(name, double=True)
    exact = reference_of(SUITE[name])(a @ b, **(operands | (prepared.instead if prepared else {})))
    return exact | {n: follows(exact) for n, follows in (prepared.derived if prepared else {}).items()}


class CaptureGraph:
    """The operations of the graphs that Inductor compiles meanwhile, after all of its passes."""

    def __enter__(self):
        self.targets = set()
        self.patch = torch._inductor.config.patch(post_grad_custom_post_pass=self._look, fx_graph_cache=False)
        self.patch.__enter__()
        return self

    def _look(self, graph):
        self.targets |= {n.target for n in graph.nodes}

    def __exit__(self, *exc):
        self.patch.__exit__(*exc)


# --- PyTorch ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUITE.tasks)
def test_every_spelling_is_the_reference(name):
    """In fp64, so that only the mathematics and the layouts are compared (fp32 angles leave out the low word)."""
    a, b, operands = inputs_of(name, double=True)
    exact = exact_of(name)
    found = references.spellings(name, reference_of(SUITE[name]))
    assert found
    for spelling in found:
        laid = {n: halves(t) if n in spelling.halves else t for n, t in operands.items()}
        got = spelling.compute(a @ (halves(b) if "b" in spelling.halves else b), **laid)
        got = {n: pairs(t) if n in spelling.halves else t for n, t in got.items()}
        assert got.keys() == exact.keys()
        assert gross_error(SUITE[name], got, exact, 0.01 if "rope_lean" in name else 1e-12) == "", spelling.name


@pytest.mark.parametrize("name", SUITE.tasks)
def test_eager_computes_every_output(name):
    task = SUITE[name]
    ways = pytorch_ways("eager", task, BF16, reference_of(task))
    assert {w.partition(", ")[2] for w in ways} == {"16 bit", "fp32"}
    for way, prepare in ways.items():
        prepared = prepare(*inputs_of(name))
        outputs = prepared.read(prepared.call())
        assert {n: t.dtype for n, t in outputs.items()} == {n: task.outputs[n].torch_dtype(BF16) for n in task.outputs}
        assert gross_error(task, outputs, exact_of(name)) == "", way


@pytest.mark.parametrize("name", ["gemm_swiglu", "gemm_rope", "gemm_cross_entropy"])
def test_the_result_of_the_gemm_is_not_written_twice(name):
    task = SUITE[name]
    for spelling in references.spellings(name, reference_of(task)):
        graph = make_fx(_model(spelling, task.torch_dtypes(BF16), True))(*inputs_of(name)).graph
        (mm,) = [n for n in graph.nodes if n.target == torch.ops.aten.mm.default]
        assert mm in next(n for n in graph.nodes if n.op == "output").args[0], spelling.name


def test_the_residual_is_added_in_the_gemm_where_that_is_faster():
    task = SUITE["gemm_residual_rmsnorm"]
    ways = pytorch_ways("torch.compile", task, BF16, reference_of(task))
    prepared = ways["addmm"](*inputs_of(task.name))
    with CaptureGraph() as seen:
        outputs = prepared.read(prepared.call())
    assert torch.ops.aten.addmm.default in seen.targets
    assert gross_error(task, outputs, exact_of(task.name)) == ""


def test_torch_compile_for_real():
    name, task = "gemm_rope", SUITE["gemm_rope"]
    ways = pytorch_ways("torch.compile", task, BF16, reference_of(task))
    assert list(ways) == ["reference", "fused", "halves"]
    prepared = ways["halves"](*inputs_of(name))
    assert gross_error(task, prepared.read(prepared.call()), exact_of(name)) == ""


def test_max_autotune_is_spent_on_the_way_that_won_without_it():
    task = SUITE["gemm_swiglu_bwd"]
    bench = SimpleNamespace(task=task, dtype=BF16, reference=reference_of(task), ways={})
    assert list(_ways(bench, "torch.compile:max-autotune", None)[0]) == ["reference", "fused", "halves"]
    bench.ways["torch.compile"] = "halves"
    ways, version = _ways(bench, "torch.compile:max-autotune", None)
    assert list(ways) == ["halves"] and version == f"torch {torch.__version__}"
    with pytest.raises(Unavailable, match="no baseline 'lieger'; there are: gemm, eager"):
        _ways(bench, "lieger", None)


def test_wrong_results_are_seen():
    task = SUITE["gemm_swiglu"]
    exact = exact_of("gemm_swiglu")
    assert gross_error(task, {"y": exact["y"]}, exact) == ""
    assert "z is off by 1." in gross_error(task, {"z": halves(exact["z"])}, exact)
    assert "y has shape (24, 512), must have (24, 256)" in gross_error(task, {"y": exact["z"]}, exact)
    assert "y is off by nan" in gross_error(task, {"y": exact["y"] * torch.nan}, exact)
    assert gross_error(task, {}, exact) == "it computes no output of the task"
    task, exact = SUITE["gemm_cross_entropy"], exact_of("gemm_cross_entropy")
    assert "lse is off" in gross_error(task, {"lse": exact["lse"] + 0.1}, exact)  # 0.015 of it


# --- the libraries' operations, as their documentation defines them ---------------------


def rms_norm(x, weight, eps, *_):
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd[:, None] * weight, x, rstd


def fused_add_rms_norm(x, residual, weight, eps, offset, casting_mode):
    h = x + residual
    y, _, rstd = rms_norm(h, weight, eps)
    return y, h, rstd, None


def fused_add_rms_norm_backward(dy, ds, s, weight, rstd, *_):
    """By autograd of the forward; the residual stream's own gradient is added."""
    s, weight = s.clone().requires_grad_(), weight.clone().requires_grad_()
    # eps is whatever makes the given rstd the right one
    eps = rstd.pow(-2) - s.detach().square().mean(-1)
    out = s * (s.square().mean(-1) + eps).rsqrt()[:, None] * weight
    dx, dweight = torch.autograd.grad(out, (s, weight), dy)
    return dx + ds, dx + ds, dweight


def swiglu_of_halves(z):
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(z, dy):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(swiglu_of_halves(z), z, dy)[0]


def rotate_half(x, cos, sin):
    """Hugging Face's Llama: x cos + [-x2 | x1] sin, with tables that repeat their half."""
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


def liger_rope(q, k, cos, sin):
    """q, k: (batch, heads, tokens, head); cos, sin: (1, tokens, head)."""
    return rotate_half(q, cos[:, None], sin[:, None]), rotate_half(k, cos[:, None], sin[:, None]), cos, sin


class CrossEntropyKernel:
    """Launched over rows: writes each row's loss; leaves the logits alone when no gradient is asked for."""

    def __getitem__(self, grid):
        def launch(*, X_ptr, Y_ptr, loss_ptr, n_cols, reduction, HAS_GRADIENTS, ignore_index, **_):
            assert grid == (X_ptr.shape[0],) and n_cols == X_ptr.shape[1] and not HAS_GRADIENTS
            loss_ptr.copy_(F.cross_entropy(X_ptr, Y_ptr, reduction=reduction, ignore_index=ignore_index))

        return launch


LIGER = SimpleNamespace(
    rms_norm=SimpleNamespace(rms_norm_forward=rms_norm),
    fused_add_rms_norm=SimpleNamespace(
        fused_add_rms_norm_forward=fused_add_rms_norm,
        fused_add_rms_norm_backward=fused_add_rms_norm_backward,
        calculate_settings=lambda n: (n, 4),
        _str_to_casting_mode={"llama": 0},
    ),
    swiglu=SimpleNamespace(
        swiglu_fused_gate_up_forward=lambda z: (z, swiglu_of_halves(z)),
        swiglu_fused_gate_up_backward=swiglu_backward,
    ),
    rope=SimpleNamespace(rope_forward=liger_rope),
    cross_entropy=SimpleNamespace(liger_cross_entropy_kernel=CrossEntropyKernel(), MAX_FUSED_SIZE=32768),
)


def add_then_norm_in_place(x, residual, weight, eps):
    residual += x
    x.copy_(rms_norm(residual, weight, eps)[0])


def rope_in_place(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Cosines are the first half of a cache row, sines the second; without is_neox pairs are neighbours."""
    assert not is_neox and cos_sin_cache.dtype == torch.float32
    cos, sin = (t[:, None].repeat_interleave(2, -1) for t in cos_sin_cache[positions.long()].chunk(2, -1))
    for x in (query, key):
        heads = x.view(x.shape[0], -1, head_size)
        turned = torch.stack((-heads[..., 1::2], heads[..., 0::2]), -1).flatten(-2)
        heads.copy_(heads * cos + turned * sin)


FLASHINFER = SimpleNamespace(
    rmsnorm=lambda x, weight, eps: rms_norm(x, weight, eps)[0],
    fused_add_rmsnorm=add_then_norm_in_place,
    silu_and_mul=swiglu_of_halves,
    apply_rope_with_cos_sin_cache_inplace=rope_in_place,
)


def gemm_swiglu(a, b):
    z = a @ b
    return z, F.silu(z[:, 0::2]) * z[:, 1::2]


def gemm_rope(a, b, pos, freq):
    """x cos + y sin, y cos - x sin, of the angle pos * freq in radians at the even column."""
    z, theta = a @ b, (pos[:, None] * freq)[:, 0::2]
    x, y = z[:, 0::2], z[:, 1::2]
    turned = x * theta.cos() + y * theta.sin(), y * theta.cos() - x * theta.sin()
    return torch.stack(turned, -1).flatten(-2)


CODA = SimpleNamespace(
    gemm_swiglu=gemm_swiglu, gemm_rope=gemm_rope, gemm_lse=lambda a, b: (a @ b, (a @ b).logsumexp(-1))
)
LIBRARIES = [(liger, LIGER), (flashinfer, FLASHINFER), (coda, CODA)]
CASES = [(m, ops, task, way) for m, ops in LIBRARIES for task, ways in m.WAYS.items() for way in ways]


@pytest.mark.parametrize(("adapter", "ops", "name", "way"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_an_adapter_computes_the_task(adapter, ops, name, way):
    """In fp64: what is left of an error is the fp32 tables of angles."""
    a, b, operands = inputs_of(name, double=True)
    before = {n: t.clone() for n, t in operands.items()}
    prepared = adapter.WAYS[name][way](ops, a, b, operands)
    outputs = prepared.read(prepared.call())
    assert outputs.keys() <= SUITE[name].outputs.keys() | prepared.derived.keys()
    assert gross_error(SUITE[name], outputs, exact_of(name, prepared), 0.02 if adapter is coda else 1e-6) == ""
    assert all(torch.equal(t, before[n]) for n, t in operands.items())  # other subjects time on the same inputs


def test_what_adapters_cover():
    def covered(adapter, ops, name):
        prepared = next(iter(adapter.WAYS[name].values()))(ops, *inputs_of(name, double=True))
        return set(prepared.read(prepared.call()))

    assert covered(liger, LIGER, "gemm_swiglu_bwd") == {"dz"}
    assert covered(liger, LIGER, "gemm_residual_rmsnorm_bwd") == {"dx", "dweight"}
    assert covered(liger, LIGER, "gemm_cross_entropy") == {"z", "lse - logit"}
    assert covered(flashinfer, FLASHINFER, "gemm_residual_rmsnorm") == {"h", "y"}
    assert covered(coda, CODA, "gemm_cross_entropy") == {"z", "logit", "lse"}


@pytest.mark.parametrize("adapter", [liger, flashinfer, coda], ids=lambda m: m.PACKAGE)
def test_every_task_is_computed_or_left_out_for_a_reason(adapter):
    assert set(adapter.WAYS) | set(adapter.LEFT_OUT) == set(SUITE.tasks)
    assert not set(adapter.WAYS) & set(adapter.LEFT_OUT)


def test_rotary_columns_must_be_whole_heads():
    task = SUITE["gemm_rope_lean"]
    a, b, operands = make_inputs(task, (8, 192, 64), BF16, 0)
    for adapter, ops in LIBRARIES[:2]:
        with pytest.raises(Unavailable, match="multiple of 128"):
            next(iter(adapter.WAYS[task.name].values()))(ops, a, b, operands)


# --- installed or not --------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for libraries with pins of their own; what loading adds to the path is taken back."""
    monkeypatch.setenv(libraries.PATH_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.path", list(sys.path))

    def install(package, version):
        info = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        return tmp_path

    yield install
    for name in [n for n in sys.modules if n.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", libraries.ADAPTERS)
def test_not_installed(name, monkeypatch):
    monkeypatch.delenv(libraries.PATH_VARIABLE, raising=False)
    if libraries.installed(name):
        pytest.skip(f"{name} is installed here")
    reason = libraries.available()[name]
    assert reason.startswith("not installed: pip install ") and name in reason
    with pytest.raises(Unavailable, match=re.escape(reason)):
        libraries.load(name, SUITE["gemm_swiglu"], BF16)


def test_an_unknown_name_lists_what_there_is(folder):
    folder("liger-kernel", "9.9")
    with pytest.raises(
        Unavailable, match=r"no baseline 'ligger'; there are: gemm \(torch .*liger \(liger-kernel 9.9\)"
    ):
        libraries.load("ligger", SUITE["gemm_swiglu"], BF16)
    assert list(libraries.available()) == ["gemm", *PYTORCH, *libraries.ADAPTERS]


def test_a_library_in_a_folder_of_its_own(folder):
    ops = folder("liger-kernel", "9.9") / "liger_kernel" / "ops"
    ops.mkdir(parents=True)
    (ops / "__init__.py").write_text("raise ImportError('no driver')")
    with pytest.raises(Unavailable, match="liger-kernel 9.9 cannot be imported: ImportError: no driver"):
        libraries.load("liger", SUITE["gemm_swiglu"], BF16)
    for module in ("cross_entropy", "fused_add_rms_norm", "rms_norm", "rope", "swiglu"):
        (ops / f"{module}.py").touch()
    (ops / "__init__.py").write_text("")
    ways, version = libraries.load("liger", SUITE["gemm_swiglu"], BF16)
    assert list(ways) == ["swiglu"] and version == "liger-kernel 9.9"
    with pytest.raises(Unavailable, match="shared by all heads"):
        libraries.load("liger", SUITE["gemm_rope"], BF16)


def test_coda_says_which_quack_it_needs(folder):
    folder("coda-kernels", "0.2")
    folder("quack-kernels", "0.6.5")
    with pytest.raises(Unavailable, match="it needs quack-kernels 0.6.1, found 0.6.5"):
        libraries.load("coda", SUITE["gemm_swiglu"], BF16)


# --- on the GPU ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to PyTorch")
@pytest.mark.parametrize("name", ["gemm_swiglu", "gemm_residual_rmsnorm", "gemm_rope_lean"])
def test_what_is_installed_is_timed(name):
    bench = Bench(SUITE[name], {"shape": (512, 512, 512), "act": "bf16", "seed": 1}, lambda task, _: reference_of(task))
    asked = ["gemm", "eager", "torch.compile", *(n for n in libraries.ADAPTERS if libraries.installed(n))]
    answers = {n: add_baseline(bench, n, "leaderboard.baselines") for n in asked}
    assert {n: a["reason"] for n, a in answers.items() if not a["passed"]} == {}
    result = bench.run(rounds=3)
    assert result["times_us"].keys() == set(asked)
    assert min(min(times) for times in result["times_us"].values()) > 0
