"""The task suite: the built-in one, and every way a user's suite can be wrong."""

import re

import pytest
import torch

from primitives import (
    ColVecLoad,
    ColVecReduce,
    ColVecSelect,
    OnlineLSEReduce,
    RowVecLoad,
    TileLoad,
    TileStore,
    epilogue,
)
from reference_kernels.tasks import DEFAULT_SUITE, SuiteError, load_suite
from reference_kernels.truth import reference_of

SUITE = load_suite()

GOOD = """\
# a user's suite

version: 1
defaults:
  dtypes: [bf16]
  timed: [[256, 256, 64]]
  ragged: [[8, 272, 72]]
tasks:
  other:
    summary: plain
    math: y = A B
    outputs: {y: {kind: TileStore}}
    ops: [y = store(acc)]
  scale:
    summary: row scale
    math: y = (A B) r
    reference: mine.py:scale
    operands:
      rstd:
        kind: ColVecLoad
        fill: rstd
      extra: {kind: RowVecLoad}
    outputs:
      y: {kind: TileStore}
      s: {kind: ColVecReduce}
    ops:
      - t = scale_rows(acc, rstd)
      - y = scale_cols(t, extra)
      - s = row_sum(y)
    ragged:
      - [8, 272, 72]
      - [1, 16, 8]
"""
LINES = GOOD.splitlines()


def line_of(text):
    """1-based line of the only line of GOOD that holds ``text``."""
    (found,) = [i for i, line in enumerate(LINES, 1) if text in line]
    return found


@pytest.fixture
def suite_file(tmp_path):
    def write(text):
        path = tmp_path / "suite.yaml"
        path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
        return path

    return write


# --- the built-in suite ---------------------------------------------------------


def test_built_in_suite_has_the_ten_kernels_of_the_paper():
    numbers = {t.paper: n for n, t in SUITE.tasks.items() if t.paper}
    assert sorted(numbers) == list(range(1, 11)) and SUITE.path == DEFAULT_SUITE
    assert [numbers[i] for i in (1, 4, 9, 10)] == [
        "gemm_rope", "gemm_residual_rmsnorm", "gemm_residual_rmsnorm_bwd", "gemm_swiglu_bwd",
    ]  # fmt: skip
    assert sum(t.paper is not None for t in SUITE.tasks.values()) == 10


@pytest.mark.parametrize("task", SUITE.tasks.values(), ids=lambda t: t.name)
def test_built_in_task_is_complete(task):
    assert callable(reference_of(task))
    assert set(task.outputs) <= {line.name for line in task.ops}
    used = {a for line in task.ops for a in line.args}
    assert set(task.operands) <= used
    assert task.b == ("nk" if "_bwd" in task.name else "kn")
    assert any(m % 64 for m, _, _ in task.ragged) and any(n % 64 for _, n, _ in task.ragged)


def test_dtypes_follow_the_activation():
    task = SUITE["gemm_rmsnorm_cross_entropy"]
    assert task.torch_dtypes(torch.float16) == {
        "rstd": torch.float32, "target": torch.int32, "z": torch.float16, "logit": torch.float32, "lse": torch.float32,
    }  # fmt: skip


def test_unknown_task_names_the_known_ones():
    with pytest.raises(SuiteError, match="no task 'gemm_ropes' in .*tasks.yaml; it has: gemm_rope, "):
        SUITE["gemm_ropes"]


# --- a user's suite ---------------------------------------------------------------


def test_good_suite_loads_and_defaults_are_overridden(suite_file):
    suite = load_suite(suite_file(GOOD))
    scale = suite["scale"]
    assert scale.ragged == ((8, 272, 72), (1, 16, 8)) and suite["other"].ragged == ((8, 272, 72),)
    assert scale.timed == ((256, 256, 64),) and scale.dtypes == ("bf16",)
    assert [str(line) for line in scale.ops][0] == "t = scale_rows(acc, rstd)"
    assert scale.kinds == {
        "rstd": ColVecLoad(), "extra": RowVecLoad(), "y": TileStore(), "s": ColVecReduce(),
    }  # fmt: skip


def swap(old, new):
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


SCALE = line_of("  scale:")
BAD = {
    "unknown field": (
        swap("    summary: row scale\n", "    summary: row scale\n    sumary: oops\n"),
        line_of("summary: row scale") + 1, "tasks.scale.sumary", "Extra inputs",
    ),
    "missing field": (swap("    math: y = (A B) r\n", ""), SCALE, "tasks.scale.math", "required"),
    "wrong kind": (
        swap("        kind: ColVecLoad", "        kind: ColVecLod"),
        line_of("        kind: ColVecLoad"), "tasks.scale.operands.rstd.kind", "ColVecLoad",
    ),
    "unknown option of a kind": (
        swap("        fill: rstd", "        fil: rstd"), line_of("fill: rstd"), "tasks.scale.operands.rstd.fil", "Extra",
    ),
    "unknown fill": (
        swap("        fill: rstd", "        fill: ones"), line_of("fill: rstd"), "tasks.scale.operands.rstd.fill", "normal",
    ),
    "output kind as operand": (
        swap("extra: {kind: RowVecLoad}", "extra: {kind: RowVecReduce}"),
        SCALE, "tasks.scale", "operand 'extra': RowVecReduce is an output kind",
    ),
    "operand kind as output": (
        swap("s: {kind: ColVecReduce}", "s: {kind: ColVecLoad}"),
        SCALE, "tasks.scale", "output 's': ColVecLoad is an operand kind",
    ),
    "impossible width": (
        swap("extra: {kind: RowVecLoad}", "extra: {kind: TileLoad, width: 0.5}"),
        SCALE, "tasks.scale", "width must be 1 or 2",
    ),
    "select without index": (
        swap("s: {kind: ColVecReduce}", "s: {kind: ColVecSelect, index: rstd}"),
        SCALE, "tasks.scale", "output 's': index must name an int32 operand",
    ),
    "undefined argument": (
        swap("y = scale_cols(t, extra)", "y = scale_cols(u, extra)"),
        SCALE, "tasks.scale", r"op 'y = scale_cols\(u, extra\)': \['u'\] not defined before this line",
    ),
    "argument defined later": (
        swap("t = scale_rows(acc, rstd)", "t = scale_rows(y, rstd)"), SCALE, "tasks.scale", r"\['y'\] not defined before",
    ),
    "name defined twice": (
        swap("y = scale_cols(t, extra)", "t = scale_cols(t, extra)"), SCALE, "tasks.scale", "'t' already defined",
    ),
    "output without op": (
        swap("      - s = row_sum(y)\n", ""), SCALE, "tasks.scale", r"no op produces output\(s\) \['s'\]",
    ),
    "op line without call": (
        swap("s = row_sum(y)", "s is the sum of y"),
        line_of("- t = scale_rows") - 1, "tasks.scale.ops", "'s is the sum of y' is not of the form",
    ),
    "no ops": (swap("ops: [y = store(acc)]", "ops: []"), line_of("ops: [y"), "tasks.other.ops", "at least 1"),
    "ops not a list": (swap("ops: [y = store(acc)]", "ops: {}"), line_of("ops: [y"), "tasks.other.ops", "a list of"),
    "no outputs": (
        swap("outputs: {y: {kind: TileStore}}", "outputs: {}"), line_of("outputs: {y"), "tasks.other.outputs", "at least 1",
    ),
    "operand and output share a name": (
        swap("extra: {kind: RowVecLoad}", "s: {kind: RowVecLoad}"), SCALE, "tasks.scale", "both operand and output",
    ),
    "reserved name": (
        swap("extra: {kind: RowVecLoad}", "D: {kind: RowVecLoad}"), SCALE, "tasks.scale", "'D' is reserved",
    ),
    "operand named like an option": (
        swap("extra: {kind: RowVecLoad}", "pairs: {kind: RowVecLoad}"), SCALE, "tasks.scale", "'pairs' is reserved",
    ),
    "operand is a keyword": (
        swap("extra: {kind: RowVecLoad}", "in: {kind: RowVecLoad}"), SCALE, "tasks.scale", "'in' is reserved or not",
    ),
    "operand in another script": (
        swap("extra: {kind: RowVecLoad}", "ρ: {kind: RowVecLoad}"), SCALE, "tasks.scale", "'ρ' is reserved or not an ASCII",
    ),
    "value is a keyword": (
        swap("y = scale_cols(t, extra)", "is = scale_cols(t, extra)"), SCALE, "tasks.scale", "'is' is not an ASCII identifier",
    ),
    "task is a keyword": (swap("  other:", "  yield:"), line_of("  other:"), "tasks.yield.name", "keyword"),
    "task is a primitive": (swap("  other:", "  silu:"), line_of("  other:"), "tasks.silu.name", "name of a primitive"),
    "N rows not 16 bytes": (
        swap("[1, 16, 8]", "[1, 100, 8]"), SCALE, "tasks.scale", "shape 1x100x8: N must be a multiple of 8",
    ),
    "N rows of a half-width store": (
        swap("y: {kind: TileStore}\n      s", "y: {kind: TileStore, width: 0.5}\n      s").replace("[1, 16", "[1, 24"),
        SCALE, "tasks.scale", "shape 1x24x8: N must be a multiple of 16",
    ),
    "K rows not 16 bytes": (
        swap("[1, 16, 8]", "[1, 16, 12]"), SCALE, "tasks.scale", "shape 1x16x12: K must be a multiple of 8",
    ),
    "N not whole heads": (
        swap("extra: {kind: RowVecLoad}", "extra: {kind: HeadRstd, head_dim: 64}").replace("272", "256"),
        SCALE, "tasks.scale", "shape 1x16x8: N must be a multiple of extra.head_dim=64",
    ),
    "size zero": (
        swap("[1, 16, 8]", "[0, 16, 8]"), line_of("[1, 16, 8]"), "tasks.scale.ragged.1.0", "greater than or equal to 1",
    ),
    "two sizes": (swap("[1, 16, 8]", "[16, 8]"), line_of("[1, 16, 8]"), "tasks.scale.ragged.1.2", "required"),
    "paper number": (
        swap("    summary: plain", "    summary: plain\n    paper: 11"),
        line_of("summary: plain") + 1, "tasks.other.paper", "less than or equal to 10",
    ),
    "task name": (swap("  other:", "  Other-1:"), line_of("  other:"), "tasks.Other-1.name", "pattern"),
    "task name is a number": (swap("  other:", "  7:"), line_of("  other:"), "tasks.7.name", "valid string"),
    "task is not a mapping": (
        swap("  scale:", "  third: [1, 2]\n  scale:"), SCALE, "tasks?.*third", "must be a mapping",
    ),
    "default of a wrong type": (
        swap("dtypes: [bf16]", "dtypes: [fp64]"), line_of("dtypes: [bf16]"), "dtypes.0", "bf16",
    ),
    "defaults not a mapping": (
        GOOD.replace("\n".join(LINES[3:7]), "defaults: [bf16]"), line_of("defaults:"), "defaults", "mapping",
    ),
    "name inside the body": (
        swap("    summary: plain", "    name: other\n    summary: plain"), line_of("summary: plain"), "name", "",
    ),
    "bad version": (swap("version: 1", "version: 2"), line_of("version: 1"), "version", "must be 1"),
    "no version": (swap("version: 1\n", ""), r"\d+", "version", "must be 1"),
    "unknown top-level key": (swap("defaults:", "default:"), line_of("defaults:"), "default", "unknown; use version"),
    "empty tasks": ("# none\n\nversion: 1\ntasks: {}\n", 4, "tasks", "mapping of task name to task"),
    "tasks is a list": ("version: 1\ntasks:\n  - scale\n", 2, "tasks", "mapping of task name to task"),
    "no tasks": ("version: 1\n", r"\d+", "tasks", "mapping of task name to task"),
    "empty file": ("", 1, "tasks", "mapping of task name to task"),
}  # fmt: skip


@pytest.mark.parametrize("text, line, field, reason", BAD.values(), ids=BAD)
def test_bad_suite_says_where_and_why(suite_file, text, line, field, reason):
    path = suite_file(text)
    with pytest.raises(SuiteError) as caught:
        load_suite(path)
    message = str(caught.value)
    assert re.match(rf"{re.escape(str(path))}:{line}: ", message), message
    assert re.search(field if "?" in field else rf"field '[\w.]*{re.escape(field)}'", message), message
    assert re.search(reason, message), message


@pytest.mark.parametrize(
    "text, line",
    [
        (swap("math: y = A B", "math: y: A B"), line_of("math: y = A B")),
        (swap("    summary: row scale", "\tsummary: row scale"), line_of("summary: row scale")),
        (swap("ops: [y = store(acc)]", "ops: y = store(acc)]\n    @"), line_of("ops: [y") + 1),
        (swap("summary: plain", "summary: !!python/name:os.system plain"), line_of("summary: plain")),
    ],
    ids=["colon", "tab", "at sign", "python tag"],
)
def test_yaml_syntax_error_has_its_line(suite_file, text, line):
    path = suite_file(text)
    with pytest.raises(SuiteError, match=rf"{re.escape(str(path))}:{line}: not valid YAML: \w+"):
        load_suite(path)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(SuiteError, match="cannot read suite .*none.yaml: No such file.*--tasks FILE"):
        load_suite(tmp_path / "none.yaml")
    with pytest.raises(SuiteError, match="cannot read suite .*directory"):
        load_suite(tmp_path)


@pytest.mark.parametrize("content", [b"version: 1\n\xff\xfe\x00tasks:", b"version: \x00"], ids=["not utf-8", "nul"])
def test_binary_file(suite_file, content):
    path = suite_file(content)
    with pytest.raises(SuiteError, match=re.escape(str(path))):
        load_suite(path)


# --- does a kernel fit its task ---------------------------------------------------


def kernel(*parameters, pairs=None, **declared):
    scope = {}
    exec(f"def kernel(acc, {', '.join(parameters)}): pass", scope)
    return epilogue(pairs=pairs, **declared)(scope["kernel"])


NORM = dict(
    residual=TileLoad(), weight=RowVecLoad(), h=TileStore(), sumsq=ColVecReduce(), y=TileStore(),
)  # fmt: skip


def norm_kernel(**changes):
    declared = {k: v for k, v in {**NORM, **changes}.items() if v is not None}
    return kernel(*(k for k, v in declared.items() if v.is_operand), **declared)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, None),
        ({"sumsq": ColVecReduce(product=True)}, None),
        ({"y": None}, r"task gemm_residual_rmsnorm needs y=TileStore\(width=1\); declare it"),
        ({"weight": None}, r"needs weight=RowVecLoad\(\); declare it"),
        ({"z": TileStore()}, r"z=TileStore\(width=1\) is not part of task gemm_residual_rmsnorm; it has .*'residual'"),
        ({"eps": ColVecLoad()}, r"eps=ColVecLoad\(\) is not part of task"),
        ({"weight": ColVecLoad()}, r"weight must be declared RowVecLoad\(\), not ColVecLoad\(\)"),
        ({"sumsq": ColVecReduce(combine="max")}, r"sumsq must be declared ColVecReduce\(combine='add'\), not .*'max'"),
        ({"residual": None, "Residual": TileLoad()}, r"needs residual=TileLoad\(width=1\)"),
    ],
)
def test_mismatch(changes, message):
    got = SUITE["gemm_residual_rmsnorm"].mismatch(norm_kernel(**changes))
    assert got is None if message is None else re.search(message, got), got


def test_mismatch_of_widths():
    task = SUITE["gemm_swiglu"]
    assert task.mismatch(kernel(pairs="acc", z=TileStore(), y=TileStore(width=1 / 2))) is None
    assert "y must be declared TileStore(width=0.5)" in task.mismatch(kernel(pairs="acc", z=TileStore(), y=TileStore()))


def test_mismatch_with_an_index_operand():
    declared = dict(z=TileStore(), lse=OnlineLSEReduce(), logit=ColVecSelect(index="target"))
    task = SUITE["gemm_cross_entropy"]
    assert task.mismatch(kernel(**declared)) is None
    assert "target" in task.mismatch(kernel(**{**declared, "logit": ColVecSelect(index="label")}))
    assert "needs lse=OnlineLSEReduce()" in task.mismatch(
        kernel(z=TileStore(), logit=ColVecSelect(index="target"))
    )


# --- a user's own reference -----------------------------------------------------------


def test_user_reference_is_found_beside_the_suite(suite_file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def scale(acc, rstd, extra):\n    y = acc * rstd[:, None] * extra\n    return {'y': y, 's': y.sum(-1)}\n"
    )
    suite = load_suite(suite_file(GOOD))
    got = reference_of(suite["scale"], suite.path)(
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 1.0]), torch.tensor([1.0, -1.0])
    )
    assert got["y"].tolist() == [[10, -20], [3, -4]] and got["s"].tolist() == [-10, -1]


@pytest.mark.parametrize(
    "reference, message",
    [
        ("none.py:scale", "reference 'none.py:scale' is not an existing file.py:function"),
        ("mine.py", "reference 'mine.py' is not an existing file.py:function"),
        ("'mine.py:'", "is not an existing file.py:function"),
        ("mine.py:scales", "has no function 'scales'"),
    ],
)
def test_user_reference_errors(suite_file, tmp_path, reference, message):
    (tmp_path / "mine.py").write_text("def scale(acc, rstd, extra):\n    return {}\n")
    suite = load_suite(suite_file(swap("mine.py:scale", reference)))
    with pytest.raises(SuiteError, match=f"task scale: .*{message}"):
        reference_of(suite["scale"], suite.path)


def test_task_without_any_reference(suite_file):
    suite = load_suite(suite_file(GOOD))
    with pytest.raises(SuiteError, match="task other: no built-in reference; add 'reference: file.py:function'"):
        reference_of(suite["other"], suite.path)
