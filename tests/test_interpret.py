"""The interpreter, the declarations and what follows from them, against fp64 written out by hand."""

import json
import math
from dataclasses import dataclass
from typing import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primitives import (
    ColVecLoad,
    ColVecReduce,
    ColVecSelect,
    DeclarationError,
    HeadRstd,
    OnlineLSEReduce,
    Pair,
    Program,
    RowVecLoad,
    RowVecReduce,
    Scalar,
    TileLoad,
    TileStore,
    epilogue,
    pack,
    silu,
    unpack,
)
from primitives.interpret import OperandError, interpret
from primitives.shapes import shape_of

HEAD, EPS = 16, 1e-6


@epilogue(
    bias=RowVecLoad(), rstd=ColVecLoad(), alpha=Scalar(), residual=TileLoad(),
    y=TileStore(), total=ColVecReduce(), top=ColVecReduce(combine="max"), peak=ColVecReduce(combine="max_abs"),
    dot=ColVecReduce(product=True),
)  # fmt: skip
def row_kinds(acc, bias, rstd, alpha, residual):
    y = alpha * acc * rstd + bias + residual
    return {"y": y, "total": y, "top": y, "peak": y, "dot": (y, residual)}


def row_kinds64(acc, bias, rstd, alpha, residual):
    y = alpha * acc * rstd[:, None] + bias[None] + residual
    return {"y": y, "total": y.sum(1), "top": y.amax(1), "peak": y.abs().amax(1), "dot": (y * residual).sum(1)}


@epilogue(
    scale=ColVecLoad(), shift=RowVecLoad(), x=TileLoad(),
    total=RowVecReduce(), top=RowVecReduce(combine="max"), peak=RowVecReduce(combine="max_abs"),
    dot=RowVecReduce(product=True),
)  # fmt: skip
def column_kinds(acc, scale, shift, x):
    v = acc * scale - shift
    return {"total": v, "top": v, "peak": v, "dot": (acc, x * scale)}


def column_kinds64(acc, scale, shift, x):
    v = acc * scale[:, None] - shift[None]
    dot = (acc * x * scale[:, None]).sum(0)
    return {"total": v.sum(0), "top": v.amax(0), "peak": v.abs().amax(0), "dot": dot}


@epilogue(rstd=ColVecLoad(), z=TileStore(), lse=OnlineLSEReduce(), logit=ColVecSelect(index="target"))
def cross_entropy(acc, rstd):
    z = acc * rstd
    return {"z": z, "lse": z, "logit": z}


def cross_entropy64(acc, rstd, target):
    z = acc * rstd[:, None]
    return {"z": z, "lse": z.exp().sum(1).log(), "logit": torch.stack([z[i, t] for i, t in enumerate(target)])}


@epilogue(
    pairs="acc", w=RowVecLoad(), rstd=ColVecLoad(), c=TileLoad(),
    z=TileStore(), prod=TileStore(width=1 / 2), swap=TileStore(),
    row=ColVecReduce(), column=RowVecReduce(), peak=RowVecReduce(combine="max_abs"),
)  # fmt: skip
def paired_columns(acc, w, rstd, c):
    z = acc * rstd * w + c
    g, u = unpack(z)
    return {"z": z, "prod": g * u, "swap": pack(-u, 2.0 * g), "row": z, "column": z, "peak": z}


def paired_columns64(acc, w, rstd, c):
    z = acc * rstd[:, None] * w[None] + c
    swap = torch.empty_like(z)
    swap[:, 0::2], swap[:, 1::2] = -z[:, 1::2], 2 * z[:, 0::2]
    sums = {"row": z.sum(1), "column": z.sum(0), "peak": z.abs().amax(0)}
    return {"z": z, "prod": z[:, 0::2] * z[:, 1::2], "swap": swap, **sums}


@epilogue(
    pairs="tile", z=TileLoad(width=2), bias=RowVecLoad(), x=TileLoad(),
    dz=TileStore(width=2), y=TileStore(), zdz=ColVecReduce(), dot=RowVecReduce(product=True),
)  # fmt: skip
def paired_tile(acc, z, bias, x):
    g, u = unpack(z)
    d = acc + bias
    dz = pack(d * u, d * g * x)
    return {"dz": dz, "y": g * u, "zdz": g * dz[0] + u * dz[1], "dot": (d, x)}


def paired_tile64(acc, z, bias, x):
    g, u, d = z[:, 0::2], z[:, 1::2], acc + bias[None]
    dz = torch.empty_like(z)
    dz[:, 0::2], dz[:, 1::2] = d * u, d * g * x
    return {"dz": dz, "y": g * u, "zdz": (z * dz).sum(1), "dot": (d * x).sum(0)}


@epilogue(r=HeadRstd(head_dim=HEAD, eps=EPS), w=RowVecLoad(), y=TileStore())
def head_norm(acc, r, w):
    return {"y": acc * r * w}


@epilogue(pairs="acc", r=HeadRstd(head_dim=HEAD, eps=EPS), w=RowVecLoad(), y=TileStore(), g=TileStore(width=0.5))
def head_norm_paired(acc, r, w):
    y = acc * r * w
    return {"y": y, "g": silu(y[0]) * y[1]}


def head_norm64(acc, w):
    heads = acc.unflatten(1, (-1, HEAD))
    y = (heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(1) * w[None]
    g, u = y[:, 0::2], y[:, 1::2]
    return {"y": y, "g": g / (1 + torch.exp(-g)) * u}


@dataclass
class Case:
    program: Program
    truth: Callable
    rational: bool = True  # whole numbers in, exact numbers out
    step: int = 1  # N and tile_n are multiples of it


CASES = {
    "row": Case(row_kinds, row_kinds64),
    "column": Case(column_kinds, column_kinds64),
    "cross-entropy": Case(cross_entropy, cross_entropy64, rational=False),
    "pairs=acc": Case(paired_columns, paired_columns64, step=2),
    "pairs=tile": Case(paired_tile, paired_tile64),
    "head": Case(head_norm, head_norm64, rational=False, step=HEAD),
    "head pairs=acc": Case(head_norm_paired, head_norm64, rational=False, step=HEAD),
}
any_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def inputs(program, m, n, k, whole=False, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randint(-3, 4, size, generator=gen).float() if whole else torch.randn(size, generator=gen)

    operands = {}
    for name, kind in program.operands.items():
        if isinstance(kind, Scalar):
            operands[name] = 2.0 if whole else -0.75
        elif not isinstance(kind, HeadRstd):
            operands[name] = draw(*shape_of(kind, m, n))
    for name in program.index_operands:
        operands[name] = torch.randint(0, n, (m,), generator=gen, dtype=torch.int32)
    return draw(m, k), draw(k, n), operands


def run(program, a, b, operands, tile=(128, 128), act=torch.float32, **options):
    return interpret(program, a, b, operands, dict.fromkeys(program.outputs, act), tile, **options)


def truth_of(case, a, b, operands):
    up = {n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in operands.items()}
    want = case.truth(a.double() @ b.double(), **up)
    return {name: want[name] for name in case.program.outputs}


def assert_matches(got, want, rel):
    assert got.keys() == want.keys()
    for name, truth in want.items():
        assert got[name].shape == truth.shape, name
        error = (got[name].double() - truth).abs().max().item()
        assert error <= rel * max(1.0, truth.abs().max().item()), f"{name}: error {error}"


TILES = [(128, 128), (64, 32), (16, 48), (512, 1024)]


@any_case
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", [(150, 208, 40), (1, 16, 8), (64, 64, 64), (129, 80, 24)], ids=str)
def test_matches_fp64(case, tile, shape):
    a, b, operands = inputs(case.program, *shape)
    want = truth_of(case, a, b, operands)
    assert_matches(run(case.program, a, b, operands, tile), want, 3e-6)
    assert_matches(run(case.program, a, b, operands, tile, act=torch.float64, compute=torch.float64), want, 1e-13)


@any_case
@given(data=st.data())
@settings(max_examples=20)
def test_independent_of_the_tile(case, data):
    step = case.step
    m, n = data.draw(st.integers(1, 90), "m"), step * data.draw(st.integers(1, 96 // step), "n / step")
    tiles = st.tuples(st.integers(1, 100), st.integers(1, 128 // step).map(lambda x: x * step))
    tile, other = data.draw(tiles, "tile"), data.draw(tiles, "other")
    a, b, operands = inputs(case.program, m, n, 24, seed=data.draw(st.integers(0, 99), "seed"))
    one, two = run(case.program, a, b, operands, tile), run(case.program, a, b, operands, other)
    assert_matches(one, {k: v.double() for k, v in two.items()}, 4e-6)
    assert_matches(one, truth_of(case, a, b, operands), 4e-6)


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.rational], ids=[n for n in CASES if CASES[n].rational])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_whole_numbers_are_bit_exact(case, tile):
    a, b, operands = inputs(case.program, 150, 208, 40, whole=True)
    for name, truth in truth_of(case, a, b, operands).items():
        got = run(case.program, a, b, operands, tile)[name]
        assert truth.abs().max() < 2**24 and torch.equal(got.double(), truth), name


def test_rows_and_columns_are_not_confused_when_square():
    @epilogue(r=RowVecLoad(), c=ColVecLoad(), y=TileStore(), by_row=ColVecReduce(), by_column=RowVecReduce())
    def square(acc, r, c):
        y = acc + 10.0 * r + c
        return {"y": y, "by_row": y, "by_column": y}

    zero, r, c = torch.zeros(3, 3), torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6])
    got = run(square, zero, zero, {"r": r, "c": c}, tile=(2, 2))
    assert got["y"].tolist() == [[14, 24, 34], [15, 25, 35], [16, 26, 36]]
    assert got["by_row"].tolist() == [72, 75, 78]
    assert got["by_column"].tolist() == [45, 75, 105]


@pytest.mark.parametrize("act", [torch.bfloat16, torch.float16])
def test_rounds_only_at_the_store(act):
    @epilogue(residual=TileLoad(), h=TileStore(), sumsq=ColVecReduce(), y=TileStore())
    def residual_norm(acc, residual):
        h = acc + residual
        return {"h": h, "sumsq": h * h, "y": h * 3.0}

    a, b, operands = inputs(residual_norm, 40, 48, 32)
    a, b, operands = a.to(act), b.to(act), {"residual": operands["residual"].to(act)}
    got = interpret(residual_norm, a, b, operands, {"h": act, "y": act}, (32, 32))
    h = a.double() @ b.double() + operands["residual"].double()
    assert got["h"].dtype == got["y"].dtype == act and got["sumsq"].dtype == torch.float32
    assert_matches({"sumsq": got["sumsq"]}, {"sumsq": h.square().sum(1)}, 1e-6)
    assert not torch.allclose(got["h"].double().square().sum(1), h.square().sum(1), rtol=1e-6)
    ulp = torch.finfo(act).eps
    for name, exact in (("h", h), ("y", 3 * h)):  # half a unit of the stored type, plus fp32 noise
        assert ((got[name].double() - exact).abs() <= exact.abs() * ulp / 2 * 1.01 + 1e-5).all()


# --- padding ------------------------------------------------------------------


@pytest.mark.parametrize("shape, tile", [((5, 24, 8), (16, 16)), ((33, 40, 8), (32, 32)), ((3, 8, 8), (128, 256))])
def test_reductions_stay_inside_the_matrix(shape, tile):
    """Vectors are NaN and tiles zero beyond the edge: neither may reach a result."""

    @epilogue(
        bias=RowVecLoad(), scale=ColVecLoad(), x=TileLoad(),
        row=ColVecReduce(), column=RowVecReduce(), row_top=ColVecReduce(combine="max"),
        column_top=RowVecReduce(combine="max"), lse=OnlineLSEReduce(),
    )  # fmt: skip
    def leaning(acc, bias, scale, x):
        v = acc + bias
        low = x - 100.0  # every true maximum is negative, so a zero from the padding would win
        return {"row": v, "column": acc * scale, "row_top": low, "column_top": low, "lse": acc * scale + bias}

    a, b, ops = inputs(leaning, *shape, whole=True)
    got = run(leaning, a, b, ops, tile)
    acc = a.double() @ b.double()
    assert torch.equal(got["row"].double(), (acc + ops["bias"]).sum(1))
    assert torch.equal(got["column"].double(), (acc * ops["scale"][:, None]).sum(0))
    assert torch.equal(got["row_top"], ops["x"].amax(1) - 100) and torch.equal(got["column_top"], ops["x"].amax(0) - 100)
    lse = (acc * ops["scale"][:, None] + ops["bias"]).logsumexp(1)
    torch.testing.assert_close(got["lse"].double(), lse, rtol=1e-6, atol=1e-6)


@epilogue(mask=TileLoad(), lse=OnlineLSEReduce())
def masked_lse(acc, mask):
    return {"lse": acc + mask}


def test_lse_with_masked_tiles_and_rows():
    a, b, _ = inputs(masked_lse, 4, 64, 16)
    mask = torch.zeros(4, 64)
    mask[0, :16] = mask[1, 16:] = mask[2] = -math.inf  # first tile, all but the first, everything
    got = run(masked_lse, a, b, {"mask": mask}, (16, 16))["lse"]
    z = a.double() @ b.double()
    want = [z[0, 16:].exp().sum().log(), z[1, :16].exp().sum().log(), -math.inf, z[3].exp().sum().log()]
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_lse_does_not_overflow():
    a, b = torch.tensor([[1e4], [-1e4], [0.0]]), torch.tensor([[1.0, 1.0, 1.0, 0.5]])
    got = run(masked_lse, a, b, {"mask": torch.zeros(3, 4)}, (2, 2))["lse"].double()
    want = torch.tensor([1e4 + math.log(3), -5e3, math.log(4)], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_select_out_of_range_is_nan(dtype):
    m, n = 6, 20
    a, b, _ = inputs(cross_entropy, m, n, 8, whole=True)
    target = torch.tensor([-1, n, n + 5, 0, n - 1, 16], dtype=dtype)  # 20..31 lies in the last, padded tile
    got = run(cross_entropy, a, b, {"rstd": torch.ones(m), "target": target}, (4, 16))["logit"]
    z = a @ b
    want = torch.tensor([math.nan] * 3 + [z[3, 0], z[4, n - 1], z[5, 16]])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_padding_is_what_the_hardware_leaves():
    seen = {}

    @epilogue(w=RowVecLoad(), r=ColVecLoad(), c=TileLoad(), y=TileStore())
    def spy(acc, w, r, c):
        seen.update(acc=acc, w=w, r=r, c=c)
        return {"y": acc}

    a, b, operands = inputs(spy, 3, 5, 8)
    run(spy, a, b, operands, (4, 8))
    assert seen["w"][0, 5:].isnan().all() and seen["r"][3:, 0].isnan().all()
    for matrix in (seen["acc"], seen["c"]):
        assert matrix.shape == (4, 8) and (matrix[3:] == 0).all() and (matrix[:, 5:] == 0).all()


def test_pair_is_what_a_paired_kernel_sees():
    seen = {}

    @epilogue(pairs="acc", w=RowVecLoad(), r=ColVecLoad(), c=TileLoad(), y=TileStore())
    def spy(acc, w, r, c):
        seen.update(acc=acc, w=w, r=r, c=c)
        return {"y": acc}

    a, b, operands = inputs(spy, 4, 8, 8, whole=True)
    run(spy, a, b, operands, (4, 8))
    assert [isinstance(seen[x], Pair) for x in ("acc", "w", "r", "c")] == [True, True, False, True]
    assert torch.equal(seen["acc"][1], (a @ b)[:, 1::2]) and torch.equal(seen["w"][0][0], operands["w"][0::2])


# --- refusals -----------------------------------------------------------------


@pytest.mark.parametrize(
    "case, name, wrong, message",
    [
        ("row", "bias", None, "operand 'bias' .RowVecLoad. is missing"),
        ("row", "bias", torch.zeros(6), r"operand 'bias' .RowVecLoad. must have shape \(10,\), got \(6,\)"),
        ("row", "rstd", torch.zeros(10), r"'rstd' .ColVecLoad. must have shape \(6,\), got \(10,\)"),
        ("row", "rstd", torch.zeros(6, 1), r"'rstd'.* shape \(6,\), got \(6, 1\)"),
        ("row", "rstd", 1.0, r"'rstd'.* shape \(6,\), got \(\)"),
        ("row", "alpha", torch.ones(6), r"'alpha' .Scalar. must have shape \(\), got \(6,\)"),
        ("row", "residual", torch.zeros(10, 6), r"'residual' .TileLoad. must have shape \(6, 10\), got \(10, 6\)"),
        ("pairs=tile", "z", torch.zeros(6, 10), r"'z' .TileLoad. must have shape \(6, 20\), got \(6, 10\)"),
        ("cross-entropy", "target", None, r"index operand 'target'"),
        ("cross-entropy", "target", torch.zeros(5, dtype=torch.int32), "'target'.*shape"),
        ("cross-entropy", "target", torch.zeros(7, dtype=torch.int32), "'target'.*shape"),
        ("cross-entropy", "target", torch.zeros(6, 1, dtype=torch.int32), "'target'.*shape"),
    ],
    ids=[
        "missing", "too short", "row for column", "2-D column", "number for vector", "vector for scalar",
        "transposed tile", "single for double tile", "no index", "index too short", "index too long", "2-D index",
    ],
)
def test_operand_errors(case, name, wrong, message):
    program = CASES[case].program
    a, b, operands = inputs(program, 6, 10, 8)
    operands = {k: v for k, v in operands.items() if k != name} | ({} if wrong is None else {name: wrong})
    with pytest.raises(OperandError, match=message):
        run(program, a, b, operands)


def program_returning(value, pairs=None, **outputs):
    extra = {"z": TileLoad(width=2), "dz": TileStore(width=2)} if pairs == "tile" else {}
    if pairs == "tile":

        def fn(acc, z):
            return {"dz": z, **value(acc)} if outputs else value(acc)
    else:

        def fn(acc):
            return value(acc)

    return epilogue(pairs=pairs, **extra, **outputs)(fn)


@pytest.mark.parametrize(
    "value, pairs, outputs, message",
    [
        (lambda acc: acc, None, {"y": TileStore()}, "must return a dict .*got Tensor"),
        (lambda acc: {}, None, {"y": TileStore()}, r"declares \['y'\]; missing \['y'\]"),
        (lambda acc: {"y": acc, "x": acc}, None, {"y": TileStore()}, r"not declared \['x'\]"),
        (lambda acc: {"Y": acc}, None, {"y": TileStore()}, r"missing \['y'\]; not declared \['Y'\]"),
        (lambda acc: {"y": acc[0]}, "acc", {"y": TileStore()}, r"pairs got a single value; return pack\(a, b\)"),
        (lambda acc: {"y": acc}, "acc", {"y": TileStore(width=0.5)}, r"one value per pair got a pair; unpack\(\)"),
        (lambda acc: {"y": pack(acc, acc)}, "tile", {"y": TileStore()}, r"got a pair; unpack\(\)"),
        (lambda acc: {"dz": acc}, "tile", {}, r"pairs got a single value; return pack\(a, b\)"),
        (lambda acc: {"y": pack(acc, acc)}, None, {"y": TileStore()}, "pair"),
        (lambda acc: {"y": (acc, acc)}, None, {"y": TileStore()}, "one value|tuple"),
        (lambda acc: {"s": acc[0]}, "acc", {"s": ColVecReduce()}, "ColVecReduce needs a pair"),
        (lambda acc: {"s": pack(acc, acc)}, None, {"s": RowVecReduce()}, "RowVecReduce needs one value, not a pair"),
        (lambda acc: {"s": pack(acc, acc)}, "tile", {"s": ColVecReduce()}, "ColVecReduce needs one value, not a pair"),
        (lambda acc: {"s": pack(acc, acc)}, None, {"s": OnlineLSEReduce()}, "OnlineLSEReduce needs one value"),
        (lambda acc: {"s": acc}, None, {"s": ColVecReduce(product=True)}, r"product=True\) needs two factors"),
        (lambda acc: {"s": (acc, acc, acc)}, None, {"s": RowVecReduce(product=True)}, "needs two factors"),
        (lambda acc: {"s": (acc, acc)}, None, {"s": ColVecReduce()}, "return one value, or declare product=True"),
    ],
    ids=[
        "tensor", "empty dict", "extra output", "misspelt output", "full store single", "half store pair",
        "tile store pair", "double store single", "pack without pairs", "tuple without pairs", "paired sum single",
        "column sum pair", "tile sum pair", "lse pair", "product single", "product of three", "two factors undeclared",
    ],
)
def test_wrong_results_are_refused(value, pairs, outputs, message):
    program = program_returning(value, pairs, **outputs)
    a, b, operands = inputs(program, 6, 16, 8)
    with pytest.raises(DeclarationError, match=message):
        run(program, a, b, operands, (8, 8))


def one(acc):
    return {"y": acc}


def with_rstd(acc, rstd):
    return {"y": acc * rstd}


def with_default(acc, rstd=1.0):
    return {"y": acc * rstd}


def with_kwargs(acc, **rest):
    return {"y": acc}


def with_keyword_only(acc, *, rstd):
    return {"y": acc * rstd}


def no_acc(x):
    return {"y": x}


def no_parameters():
    return {}


def with_z(acc, z):
    return {"y": acc}


def with_target(acc, target):
    return {"y": acc}


Y, WIDE = {"y": TileStore()}, {"z": TileLoad(width=2), "dz": TileStore(width=2)}


@pytest.mark.parametrize(
    "fn, declared, message",
    [
        (one, {"pairs": "row", **Y}, "pairs='row'; choose 'acc', 'tile'"),
        (one, {"y": TileStore}, "is not a kind; write e.g. y=TileLoad"),
        (one, {"y": "TileStore"}, "is not a kind"),
        (one, {"acc": TileStore(), **Y}, "'acc' is a name of the GEMM itself, rename it"),
        (one, {"D": TileStore(), **Y}, "'D' is a name of the GEMM itself, rename it"),
        (no_acc, {"x": TileLoad(), **Y}, "first parameter must be acc"),
        (no_parameters, Y, "first parameter must be acc"),
        (with_default, {"rstd": ColVecLoad(), **Y}, "plain parameters only"),
        (with_kwargs, Y, "plain parameters only"),
        (with_keyword_only, {"rstd": ColVecLoad(), **Y}, "plain parameters only"),
        (with_rstd, Y, r"\['rstd'\] not declared; add e.g. rstd=ColVecLoad"),
        (with_rstd, {"rstd": ColVecReduce(), **Y}, r"\['rstd'\] not declared"),
        (one, {"rstd": ColVecLoad(), **Y}, r"\['rstd'\] declared but not parameters"),
        (with_rstd, {"rstd": ColVecLoad()}, "declares no output"),
        (with_target, {"target": ColVecLoad(), "y": ColVecSelect()}, r"\['target'\] is read by ColVecSelect itself"),
        (one, {"target": ColVecLoad(), "y": ColVecSelect()}, r"\['target'\] is read by ColVecSelect itself"),
        (one, {"y": TileStore(width=0.5)}, "need pairs='acc' or pairs='tile'"),
        (with_z, {"z": TileLoad(width=2), **Y}, "need pairs='acc' or pairs='tile'"),
        (one, {"pairs": "acc", "y": TileStore(width=2)}, "width=2 needs pairs='tile'"),
        (with_z, {"pairs": "acc", "z": TileLoad(width=2), **Y}, "width=2 needs pairs='tile'"),
        (one, {"pairs": "acc", "y": ColVecReduce(product=True)}, "product=True is not available"),
        (one, {"pairs": "acc", "y": OnlineLSEReduce()}, "need pairs=None"),
        (one, {"pairs": "acc", "y": ColVecSelect()}, "need pairs=None"),
        (with_z, {"pairs": "tile", **WIDE, "y": TileStore(width=0.5)}, "width=1/2 needs pairs='acc'"),
        (one, {"pairs": "tile", **Y}, "exactly one TileLoad.width=2. and one TileStore.width=2."),
        (with_z, {"pairs": "tile", "z": TileLoad(width=2), **Y}, "exactly one"),
        (with_z, {"pairs": "tile", **WIDE, "y": TileStore(width=2)}, "exactly one"),
    ],
)
def test_declaration_errors(fn, declared, message):
    with pytest.raises(DeclarationError, match=message) as caught:
        epilogue(**declared)(fn)
    assert f"{fn.__name__}()" in str(caught.value)


def test_head_rstd_refuses_tile_pairs():
    def both(acc, z, r):
        return {"dz": z}

    with pytest.raises(DeclarationError, match="HeadRstd is not available with pairs='tile'"):
        epilogue(pairs="tile", r=HeadRstd(), **WIDE)(both)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: TileLoad(width=0.5), r"TileLoad\(width=0.5\): width must be 1 or 2"),
        (lambda: TileStore(width=3), "width must be 1/2, 1 or 2"),
        (lambda: ColVecReduce(combine="mean"), r"ColVecReduce\(combine='mean'\): choose one of .*'add', 'max'"),
        (lambda: RowVecReduce(combine="max", product=True), "product=True needs combine='add'"),
    ],
)
def test_kind_options_are_checked(build, message):
    with pytest.raises(DeclarationError, match=message):
        build()


def test_program_keeps_parameter_order_and_hides_the_index():
    @epilogue(lse=OnlineLSEReduce(), w=RowVecLoad(), z=TileStore(), r=ColVecLoad(), s=ColVecSelect("t"))
    def kernel(acc, r, w):
        """Doc of the kernel."""
        return {"lse": acc, "z": acc, "s": acc}

    assert list(kernel.operands) == ["r", "w"] and kernel.index_operands == {"t": "s"}
    assert list(kernel.sinks) == ["lse", "s"] and list(kernel.tile_stores) == ["z"]
    assert (kernel.name, kernel.doc, kernel.pairs) == ("kernel", "Doc of the kernel.", None)


@any_case
def test_declarations_survive_json(case):
    program = case.program
    copy = Program.from_description(json.loads(json.dumps(program.describe())))
    for field in ("name", "operands", "outputs", "pairs", "doc", "index_operands"):
        assert getattr(copy, field) == getattr(program, field)


def test_rebuilt_program_says_that_it_has_no_function():
    copy = Program.from_description(row_kinds.describe())
    a, b, operands = inputs(copy, 4, 16, 8)
    with pytest.raises(DeclarationError, match="no function"):
        run(copy, a, b, operands, (4, 16))
