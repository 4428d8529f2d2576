# ruff: noqa: E501  (tables of cases, one a line)
"""The built-in author: what it writes is deterministic, allowed, and equal to the mathematics.

Composed kernels run in fp64 through the interpreter, so an op and its independent
PyTorch formula must agree to rounding of fp64: op list against reference is the
N-version check of the suite.
"""

import ast
import importlib.util

import pytest
import torch
import torch.nn.functional as F
import yaml

from agent.composer import OPS, CannotCompose, compose
from primitives import VOCABULARY, Program
from primitives.interpret import interpret
from reference_kernels.tasks import SuiteError, load_suite
from reference_kernels.truth import make_inputs, reference_of
from verifier.policy import check_policy

SUITE = load_suite()
F64 = torch.float64


def load(source, folder):
    path = folder / f"kernel_{abs(hash(source)):x}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (program,) = [v for v in vars(module).values() if isinstance(v, Program)]
    return program


def run(task, program, shape, seed=0, tile=(128, 128)):
    """Outputs of a composed kernel in fp64, and the inputs as the reference takes them."""
    a, b, operands = make_inputs(task, shape, torch.bfloat16, seed)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in operands.items()}
    got = interpret(program, a.double(), b.double(), wide, dict.fromkeys(task.outputs, F64), tile=tile, compute=F64)
    return got, a.double() @ b.double(), wide


def make(folder, **task):
    """The one task of a small suite."""
    body = {"summary": "a task", "math": "y = f(A B)", "operands": {}, "reference": "r.py:f", **task}
    name = body.pop("name", "gemm_case")
    head = {"dtypes": ["bf16"], "timed": [[256, 256, 64]], "ragged": [[200, 272, 136]]}
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "defaults": head, "tasks": {name: body}}, allow_unicode=True))
    return load_suite(path)[name]


def agree(got, want):
    assert set(got) == set(want)
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- the built-in suite -------------------------------------------------------------------


@pytest.mark.parametrize("task", SUITE.tasks.values(), ids=SUITE.tasks)
def test_built_in_task(task, tmp_path):
    source = compose(task)
    assert source == compose(task) == compose(load_suite()[task.name])
    verdict = check_policy(source)
    assert verdict.passed, verdict.reason
    assert max(map(len, source.splitlines())) <= 120
    program = load(source, tmp_path)
    assert program.name == task.name and task.mismatch(program) is None
    for shape, tile in ((task.ragged[0], (128, 128)), ((129, 400, 72), (64, 192)), ((256, 256, 64), (128, 128))):
        got, acc, operands = run(task, program, shape, tile=tile)
        agree(got, reference_of(task)(acc, **operands))


@pytest.mark.parametrize("task", SUITE.tasks.values(), ids=SUITE.tasks)
def test_the_check_of_the_op_list_can_fail(task, tmp_path):
    """Every output of every task: the comparison above sees a sign, a factor and a neighbour."""
    program = load(compose(task), tmp_path)
    got, acc, operands = run(task, program, task.ragged[0])
    want = reference_of(task)(acc, **operands)
    for name in task.outputs:
        for wrong in (-want[name], want[name] * (1 + 1e-6), want[name].roll(1, -1)):
            with pytest.raises(AssertionError):
                agree(got, {**want, name: wrong})


# --- every op, against a formula of its own ---------------------------------------------------

TILE, ROW, COL, SCALAR = {"kind": "TileLoad"}, {"kind": "RowVecLoad"}, {"kind": "ColVecLoad"}, {"kind": "Scalar"}
STORE, HALF, WIDE = {"kind": "TileStore"}, {"kind": "TileStore", "width": 0.5}, {"kind": "TileStore", "width": 2}
TURNS = {"kind": "ColVecLoad", "fill": "position"}, {"kind": "RowVecLoad", "fill": "frequency"}
TABLE = {"kind": "TileLoad", "fill": "cos_sin"}


def col(combine="add"):
    return {"kind": "ColVecReduce", "combine": combine}


def row(combine="add"):
    return {"kind": "RowVecReduce", "combine": combine}


def even(x):
    return x[:, 0::2]


def odd(x):
    return x[:, 1::2]


def weave(a, b):
    return torch.stack((a, b), -1).flatten(-2)


def rotate(x, angle):
    z = torch.complex(even(x), odd(x)) * torch.exp(-1j * angle)
    return weave(z.real, z.imag)


def turns(position, freq):
    return 2 * torch.pi * torch.remainder(position[:, None] * (even(freq[None]) + odd(freq[None])), 1.0)


CASES = {
    # op list, operands, outputs, formula
    "store": (["y = store(acc)"], {}, {"y": STORE}, lambda acc: {"y": acc}),
    "residual_add": (["y = residual_add(acc, r)"], {"r": TILE}, {"y": STORE}, lambda acc, r: {"y": acc + r}),
    "add": (["y = add(r, acc)"], {"r": TILE}, {"y": STORE}, lambda acc, r: {"y": acc + r}),
    "subtract": (["y = subtract(acc, r)"], {"r": TILE}, {"y": STORE}, lambda acc, r: {"y": acc - r}),
    "multiply": (["y = multiply(acc, r)"], {"r": TILE}, {"y": STORE}, lambda acc, r: {"y": acc * r}),
    "bias_add": (["y = bias_add(acc, v)"], {"v": ROW}, {"y": STORE}, lambda acc, v: {"y": acc + v}),
    "scale_cols": (["y = scale_cols(acc, v)"], {"v": ROW}, {"y": STORE}, lambda acc, v: {"y": acc * v}),
    "scale_rows": (["y = scale_rows(acc, v)"], {"v": COL}, {"y": STORE}, lambda acc, v: {"y": acc * v[:, None]}),
    "scale": (["y = scale(acc, s)"], {"s": SCALAR}, {"y": STORE}, lambda acc, s: {"y": acc * s}),
    "unary chain": (
        ["t = gelu(acc)", "u = tanh(t)", "y = softplus(u)"], {}, {"y": STORE},
        lambda acc: {"y": torch.log1p(torch.exp(torch.tanh(0.5 * acc * (1 + torch.erf(acc / 2**0.5)))))},
    ),
    "relu_sq": (["y = relu_sq(acc)"], {}, {"y": STORE}, lambda acc: {"y": acc.clamp_min(0) ** 2}),
    "swiglu": (["y = swiglu(acc)"], {}, {"y": HALF}, lambda acc: {"y": even(acc) / (1 + torch.exp(-even(acc))) * odd(acc)}),
    "geglu": (["y = geglu(acc)"], {}, {"y": HALF}, lambda acc: {"y": F.gelu(even(acc)) * odd(acc)}),
    "geglu_tanh": (["y = geglu_tanh(acc)"], {}, {"y": HALF}, lambda acc: {"y": F.gelu(even(acc), approximate="tanh") * odd(acc)}),
    "reglu": (["y = reglu(acc)"], {}, {"y": HALF}, lambda acc: {"y": even(acc).relu() * odd(acc)}),
    "half-width chain": (
        ["t = swiglu(acc)", "y = relu(t)", "w = swiglu(acc)"], {}, {"y": HALF, "w": HALF},
        lambda acc: {"y": (F.silu(even(acc)) * odd(acc)).relu(), "w": F.silu(even(acc)) * odd(acc)},
    ),
    "rope": (
        ["y = rope(acc, t)"], {"t": TABLE}, {"y": STORE},
        lambda acc, t: {"y": weave(even(acc) * even(t) + odd(acc) * odd(t), odd(acc) * even(t) - even(acc) * odd(t))},
    ),
    "rope_position": (
        ["y = rope_position(acc, p, f)"], {"p": TURNS[0], "f": TURNS[1]}, {"y": STORE},
        lambda acc, p, f: {"y": rotate(acc, turns(p, f))},
    ),
    "scale, rope, bias": (
        ["a = scale_rows(acc, s)", "o = rope(a, t)", "y = bias_add(o, v)"], {"s": COL, "t": TABLE, "v": ROW}, {"o": STORE, "y": STORE},
        lambda acc, s, t, v: (lambda o: {"o": o, "y": o + v})(
            weave(even(acc * s[:, None]) * even(t) + odd(acc * s[:, None]) * odd(t),
                  odd(acc * s[:, None]) * even(t) - even(acc * s[:, None]) * odd(t))
        ),
    ),
    "row_sum": (["s = row_sum(acc)"], {}, {"s": col()}, lambda acc: {"s": acc.sum(1)}),
    "row_max": (["s = row_max(acc)"], {}, {"s": col("max")}, lambda acc: {"s": acc.amax(1)}),
    "row_amax": (["s = row_amax(acc)"], {}, {"s": col("max_abs")}, lambda acc: {"s": acc.abs().amax(1)}),
    "col_sum": (["s = col_sum(acc)"], {}, {"s": row()}, lambda acc: {"s": acc.sum(0)}),
    "col_max": (["s = col_max(acc)"], {}, {"s": row("max")}, lambda acc: {"s": acc.amax(0)}),
    "col_amax": (["s = col_amax(acc)"], {}, {"s": row("max_abs")}, lambda acc: {"s": acc.abs().amax(0)}),
    "row_sum_sq": (["s = row_sum_sq(acc)"], {}, {"s": col()}, lambda acc: {"s": (acc**2).sum(1)}),
    "row_dot": (["s = row_dot(acc, r)"], {"r": TILE}, {"s": col()}, lambda acc, r: {"s": (acc * r).sum(1)}),
    "col_dot": (["s = col_dot(r, acc)"], {"r": TILE}, {"s": row()}, lambda acc, r: {"s": (acc * r).sum(0)}),
    "reductions of pairs": (
        ["y = rope(acc, t)", "s = row_sum_sq(y)", "d = col_dot(y, acc)", "m = row_amax(y)", "c = col_sum(acc)"], {"t": TABLE},
        {"y": STORE, "s": col(), "d": row(), "m": col("max_abs"), "c": row()},
        lambda acc, t: (lambda y: {"y": y, "s": (y**2).sum(1), "d": (y * acc).sum(0), "m": y.abs().amax(1), "c": acc.sum(0)})(
            weave(even(acc) * even(t) + odd(acc) * odd(t), odd(acc) * even(t) - even(acc) * odd(t))
        ),
    ),
    "row_logsumexp and select": (
        ["l = row_logsumexp(acc)", "z = select(acc, t)"], {"t": {"kind": "ColVecLoad", "dtype": "int32", "fill": "target"}},
        {"l": {"kind": "OnlineLSEReduce"}, "z": {"kind": "ColVecSelect", "index": "t"}},
        lambda acc, t: {"l": acc.exp().sum(1).log(), "z": acc[torch.arange(len(acc)), t.long()]},
    ),
    "swiglu_bwd": (
        ["dz = swiglu_bwd(acc, z)", "y = swiglu(z)", "s = row_sum_sq(dz)", "r = row_sum(dz)", "q = row_dot(dz, z)"],
        {"z": {"kind": "TileLoad", "width": 2}}, {"dz": WIDE, "y": STORE, "s": col(), "r": col(), "q": col()},
        lambda acc, z: swiglu_by_autograd(acc, z),
    ),
    "geglu of a wide tile": (
        ["dz = swiglu_bwd(acc, z)", "y = geglu(z)", "w = multiply(y, acc)"],
        {"z": {"kind": "TileLoad", "width": 2}}, {"dz": WIDE, "y": STORE, "w": STORE},
        lambda acc, z: {"dz": swiglu_by_autograd(acc, z)["dz"], "y": F.gelu(even(z)) * odd(z), "w": F.gelu(even(z)) * odd(z) * acc},
    ),
    "head norm": (
        ["y = multiply(acc, h)"], {"h": {"kind": "HeadRstd", "head_dim": 16}}, {"y": STORE},
        lambda acc: {"y": (acc.unflatten(1, (-1, 16)) * torch.rsqrt(acc.unflatten(1, (-1, 16)).square().mean(-1, True) + 1e-6)).flatten(1)},
    ),
    "one value under two names": (["y = store(acc)", "w = store(acc)"], {}, {"y": STORE, "w": STORE}, lambda acc: {"y": acc, "w": acc}),
    "an operand stored": (["y = store(r)", "z = store(acc)"], {"r": TILE}, {"y": STORE, "z": STORE}, lambda acc, r: {"y": r, "z": acc}),
}  # fmt: skip


def swiglu_by_autograd(dy, z):
    z = z.clone().requires_grad_()
    y = F.silu(even(z)) * odd(z)
    (dz,) = torch.autograd.grad(y, z, dy)
    z = z.detach()
    return {"dz": dz, "y": y.detach(), "s": (dz**2).sum(1), "r": dz.sum(1), "q": (dz * z).sum(1)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_op(case, tmp_path):
    ops, operands, outputs, formula = case
    task = make(tmp_path, ops=ops, operands=operands, outputs=outputs)
    source = compose(task)
    assert check_policy(source).passed, check_policy(source).reason
    program = load(source, tmp_path)
    assert task.mismatch(program) is None
    got, acc, values = run(task, program, (200, 272, 136))
    agree(got, formula(acc, **{n: v for n, v in values.items() if n != "h"}))


def test_every_op_has_a_case():
    used = {line.partition("=")[2].partition("(")[0].strip() for ops, *_ in CASES.values() for line in ops}
    assert not {op for op in OPS if op not in VOCABULARY} - used


@pytest.mark.parametrize("op", sorted(set(OPS) & VOCABULARY))
def test_unary_ops_call_the_primitive_of_their_name(op, tmp_path):
    task = make(tmp_path, ops=[f"y = {op}(acc)"], outputs={"y": STORE})
    source = compose(task)
    assert f"    y = {op}(acc)\n" in source and check_policy(source).passed


# --- what it refuses ---------------------------------------------------------------------------

INDEX = {"kind": "ColVecLoad", "dtype": "int32", "fill": "target"}
REFUSED = {
    "unknown op": (["y = conv(acc)"], {}, {"y": STORE}, r"op 'y = conv\(acc\)'.*no rule for 'conv'; it knows .*swiglu"),
    "vector first": (["y = scale_rows(v, acc)"], {"v": COL}, {"y": STORE}, "scale_rows.*first argument must be a matrix"),
    "row as column": (["y = scale_rows(acc, v)"], {"v": ROW}, {"y": STORE}, "scale_rows.*second argument must be a col"),
    "column as row": (["y = bias_add(acc, v)"], {"v": COL}, {"y": STORE}, "bias_add.*second argument must be a row"),
    "matrix as scalar": (["y = scale(acc, r)"], {"r": TILE}, {"y": STORE}, "scale.*second argument must be a scalar"),
    "vector added": (["y = add(acc, v)"], {"v": ROW}, {"y": STORE}, "add.*second argument must be a full"),
    "one argument missing": (["y = add(acc)"], {}, {"y": STORE}, "add.*takes two arguments"),
    "no argument": (["y = silu()"], {}, {"y": STORE}, "silu.*first argument must be a matrix"),
    "two arguments": (["y = silu(acc, acc)"], {}, {"y": STORE}, "silu.*takes one argument"),
    "store of two": (["y = store(acc, acc)"], {}, {"y": STORE}, "store.*takes one argument"),
    "select by a matrix": (["y = select(acc, r)"], {"r": TILE}, {"y": STORE}, "select.*int32"),
    "dot of one": (["s = row_dot(acc)"], {}, {"s": col()}, "row_dot.*same shape"),
    "dot with a vector": (["s = row_dot(acc, v)"], {"v": ROW}, {"s": col()}, "row_dot.*same shape"),
    "swiglu of a half": (["t = swiglu(acc)", "y = swiglu(t)"], {}, {"y": HALF}, "swiglu.*interleaved pairs"),
    "full plus half": (["t = swiglu(acc)", "y = add(acc, t)"], {}, {"y": STORE}, "add.*must be a full"),
    "half reduced": (["t = swiglu(acc)", "s = row_sum(t)"], {}, {"s": col()}, "row_sum.*only"),
    "rope without table": (["y = rope(acc)"], {}, {"y": STORE}, "rope.*cos/sin table"),
    "rope with a vector": (["y = rope(acc, v)"], {"v": COL}, {"y": STORE}, "rope.*cos/sin table"),
    "rope_position swapped": (["y = rope_position(acc, f, p)"], {"p": COL, "f": ROW}, {"y": STORE}, "rope_position.*positions"),
    "swiglu_bwd without wide": (["y = swiglu_bwd(acc, r)"], {"r": TILE}, {"y": STORE}, "swiglu_bwd.*takes dy"),
    "column sum of a wide tile": (
        ["dz = swiglu_bwd(acc, z)", "s = col_sum(dz)"], {"z": {"kind": "TileLoad", "width": 2}}, {"dz": WIDE, "s": row()},
        "col_sum.*only row sums",
    ),
    "operand named like a primitive": (["y = add(acc, silu)"], {"silu": TILE}, {"y": STORE}, "'silu' has the name of a primitive"),
    "index as a vector": (["y = scale_rows(acc, t)"], {"t": INDEX}, {"y": STORE}, "scale_rows.*second argument must be a col"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused_with_the_name_of_the_op(case, tmp_path):
    ops, operands, outputs, reason = case
    task = make(tmp_path, ops=ops, operands=operands, outputs=outputs)
    with pytest.raises(CannotCompose, match=reason):
        compose(task)


MISMATCHED = {
    "row_max into a sum": (["s = row_max(acc)"], {"s": col()}, "row_max"),
    "row_sum into a maximum": (["s = row_sum(acc)"], {"s": col("max")}, "row_sum"),
    "row reduction into a row vector": (["s = row_sum(acc)"], {"s": row()}, "row_sum"),
    "reduction into a matrix": (["y = row_sum(acc)"], {"y": STORE}, "row_sum"),
    "matrix into a reduction": (["s = silu(acc)"], {"s": col()}, "silu"),
    "full into a half": (["t = swiglu(acc)", "y = silu(acc)"], {"t": HALF, "y": HALF}, "silu"),
    "half into a full": (["y = swiglu(acc)"], {"y": STORE}, "swiglu"),
    "logsumexp into a sum": (["s = row_logsumexp(acc)"], {"s": col()}, "row_logsumexp"),
}


@pytest.mark.parametrize("case", MISMATCHED.values(), ids=MISMATCHED)
def test_an_op_and_the_kind_of_its_output_must_agree(case, tmp_path):
    """row_max into an adding reduction would be composed as a sum, silently."""
    ops, outputs, op = case
    task = make(tmp_path, ops=ops, outputs=outputs)
    with pytest.raises(CannotCompose, match=op):
        compose(task)


# --- whatever a suite says, the file is sound or refused ------------------------------------------

PLAIN = {"ops": ["y = scale_rows(acc, v)"], "operands": {"v": COL}, "outputs": {"y": STORE}}


def named(op="t", operand="v", output="y", **more):
    return {
        "ops": [f"{op} = scale_rows(acc, {operand})", f"{output} = silu({op})"],
        "operands": {operand: COL}, "outputs": {output: STORE}, **more,
    }  # fmt: skip


SOUND = {
    "value named like a primitive": named(op="silu"),
    "value named like its own op": named(op="exp"),
    "output named like a primitive": named(output="tanh"),
    "value named like a kind would be": named(op="epilogue"),
    "value named like the lanes": {
        "ops": ["gate = scale_rows(acc, up)", "y = swiglu(gate)"], "operands": {"up": COL}, "outputs": {"y": HALF}
    },
    "value named like the task": {**named(op="gemm_case")},
    "operand named like the task": {**named(operand="gemm_case")},
    "value that is a keyword": named(op="lambda"),
    "operand that is a keyword": named(operand="in"),
    "output that is a keyword": named(output="class"),
    "operand named pairs": named(operand="pairs"),
    "output named pairs": named(output="pairs"),
    "dunder value": named(op="__t"),
    "dunder operand": named(operand="__v"),
    "dunder output": named(output="__y"),
    "task named like a primitive": {**PLAIN, "name": "silu"},
    "task named like the decorator": {**PLAIN, "name": "epilogue"},
    "task that is a keyword": {**PLAIN, "name": "lambda"},
    "LaTeX in the mathematics": {**PLAIN, "math": r"y_{mn} = \xi \nu \sum_k a_{mk} b_{kn} \, r_m \Nabla \u"},
    "quotes in the mathematics": {**PLAIN, "math": 'y = """A B"""'},
    "quote at the end of the mathematics": {**PLAIN, "math": 'y = "A B"'},
    "backslash at the end of the summary": {**PLAIN, "summary": "a \\"},
    "quote in the summary": {**PLAIN, "summary": '"""; x = 1'},
    "empty summary": {**PLAIN, "summary": ""},
    "other scripts": {**PLAIN, "summary": "größer als üblich", "math": "y = (A B) ρ — 矩阵"},
    "encoding in the summary": {**PLAIN, "summary": "coding: utf-7", "math": "# -*- coding: utf-7 -*-"},
    "select beside pairs": {
        "ops": ["y = swiglu(acc)", "z = select(acc, t)"], "operands": {"t": INDEX},
        "outputs": {"y": HALF, "z": {"kind": "ColVecSelect", "index": "t"}},
    },
    "logsumexp beside pairs": {
        "ops": ["y = swiglu(acc)", "l = row_logsumexp(acc)"], "outputs": {"y": HALF, "l": {"kind": "OnlineLSEReduce"}}
    },
    "wide operand without a wide output": {
        "ops": ["y = swiglu(z)"], "operands": {"z": {"kind": "TileLoad", "width": 2}}, "outputs": {"y": STORE}
    },
    "two wide operands": {
        "ops": ["dz = swiglu_bwd(acc, z)", "y = swiglu(w)"],
        "operands": {"z": {"kind": "TileLoad", "width": 2}, "w": {"kind": "TileLoad", "width": 2}}, "outputs": {"dz": WIDE, "y": STORE},
    },
    "head norm beside a wide tile": {
        "ops": ["dz = swiglu_bwd(acc, z)", "y = multiply(acc, h)"],
        "operands": {"z": {"kind": "TileLoad", "width": 2}, "h": {"kind": "HeadRstd", "head_dim": 16}}, "outputs": {"dz": WIDE, "y": STORE},
    },
}  # fmt: skip


@pytest.mark.filterwarnings("error::DeprecationWarning", "error::SyntaxWarning")
@pytest.mark.parametrize("case", SOUND.values(), ids=SOUND)
def test_composed_or_refused_but_never_broken(case, tmp_path):
    """Every file it writes passes our own policy, loads, and fits the task."""
    try:
        task = make(tmp_path, **case)
        source = compose(task)
    except (SuiteError, CannotCompose) as e:
        assert str(e)
        return
    verdict = check_policy(source)
    assert verdict.passed, f"{verdict.reason}\n{source}"
    assert task.mismatch(load(source, tmp_path)) is None


@pytest.mark.parametrize("text", [r"\xi \u \N \ ", '"""', '""""', 'x"', "\\", "\t\r\x00\x0c\x1b\u2028\u202e", "ρ — 矩阵", "a\nb"])
def test_the_docstring_says_what_the_suite_says(text, tmp_path):
    task = make(tmp_path, **{**PLAIN, "math": f"y = {text}\nand more", "summary": f"about {text}"})
    source = compose(task)
    assert check_policy(source).passed, source
    doc = ast.get_docstring(ast.parse(source), clean=False)
    assert doc == f"About {' '.join(text.split())}.\n\ny = {text}\nand more\n".replace(" .\n", ".\n", not text.strip())


NOT_READABLE = {
    "a sum": (["s = row_sum(acc)", "y = silu(s)"], {}, {"s": col(), "y": STORE}, "silu"),
    "a product": (["s = row_sum_sq(acc)", "y = silu(s)"], {}, {"s": col(), "y": STORE}, "silu"),
    "a sum that is no output": (["s = row_sum(acc)", "y = store(acc)"], {}, {"y": STORE}, "row_sum.*must be an output"),
    "another index": (
        ["z = select(acc, t)"], {"t": INDEX, "u": INDEX}, {"z": {"kind": "ColVecSelect", "index": "u"}}, "select.*index",
    ),
    "a row vector beside halves": (["t = swiglu(acc)", "y = scale_cols(t, v)"], {"v": ROW}, {"y": HALF}, "scale_cols"),
    "an index nobody selects by": (["y = store(acc)"], {"t": INDEX}, {"y": STORE}, "needs t="),
    "a file too long": (["y = store(acc)"] + [f"t{i} = silu(acc)" for i in range(2000)], {}, {"y": STORE}, "characters"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_READABLE.values(), ids=NOT_READABLE)
def test_what_would_compute_something_else_is_refused(case, tmp_path):
    ops, operands, outputs, reason = case
    with pytest.raises(CannotCompose, match=reason):
        compose(make(tmp_path, ops=ops, operands=operands, outputs=outputs))
