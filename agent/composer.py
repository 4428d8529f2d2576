"""The built-in author: writes a kernel file from a task's op list, one op to one line.

Deterministic and offline. It is the default author, and the baseline that an
LLM author has to beat. What it cannot compose it names, with what it knows.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass, field, replace

from primitives import MATHS, VOCABULARY, DeclarationError, epilogue
from reference_kernels.tasks import OpLine, Task, TensorSpec
from verifier.policy import check_policy

AUTHOR = "composer"
_WIDTH = 100  # columns of the files it writes

# what a value is, per accumulator element: full (M, N); half: one per pair of columns;
# wide: a pair of columns of an (M, 2N) tile; row (N,), col (M,), scalar; a reduction's result is
# reduced, factors (of a product) or select: an output that no other op can read
_UNARY = {m for m in MATHS if m not in ("minimum", "maximum", "fma", "where", "rotary_cos_sin")}
_BINARY = {
    "residual_add": "{0} + {1}",
    "add": "{0} + {1}",
    "bias_add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "scale_rows": "{0} * {1}",
    "scale_cols": "{0} * {1}",
    "scale": "{0} * {1}",
}
_SECOND_ARGUMENT = {"bias_add": "row", "scale_cols": "row", "scale_rows": "col", "scale": "scalar"}
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
_NEEDS_PAIRS = {*_GATED, "rope", "rope_position", "swiglu_bwd"}
_REDUCES = {"row_sum", "row_max", "row_amax", "col_sum", "col_max", "col_amax", "row_sum_sq", "row_dot", "col_dot"}
_COMBINE = {"max": "max", "amax": "max_abs"}  # of row_max, col_amax ...; the others add
OPS = sorted({*_UNARY, *_BINARY, *_NEEDS_PAIRS, *_REDUCES, "store", "row_logsumexp", "select"})


class CannotCompose(ValueError):
    """The composer has no rule for an op of this task; the message names the op."""


@dataclass
class _Draft:
    """The kernel being written: known values, body lines, what must be imported."""

    task: Task
    pairs: str | None
    kinds: dict[str, str] = field(default_factory=dict)
    alias: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    lanes: dict[str, tuple[str, str]] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    products: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)

    def fresh(self, name: str) -> str:
        """A variable name that hides no primitive and no earlier value."""
        while name in VOCABULARY or name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def unpack(self, value: str, names: tuple[str, str]) -> tuple[str, str]:
        """The two lanes of a pair, unpacked once."""
        if value not in self.lanes:
            self.imports.add("unpack")
            a, b = self.fresh(names[0]), self.fresh(names[1])
            self.lines.append(f"{a}, {b} = unpack({value})")
            self.lanes[value] = (a, b)
        return self.lanes[value]


def compose(task: Task) -> str:
    """Source text of a kernel file for ``task``.

    Raises:
        CannotCompose: an op it has no rule for, one that does not fit its operands or its
            output, or ops that cannot stand in one kernel.
    """
    draft = _Draft(task, _pairing(task))
    for name, spec in task.operands.items():
        draft.kinds[name] = _operand_kind(spec)
        draft.alias[name] = name
        draft.taken.add(name)
        if name in VOCABULARY:
            raise CannotCompose(f"{task.name}: operand {name!r} has the name of a primitive; rename it")
    draft.kinds["acc"], draft.alias["acc"] = "full", "acc"
    draft.taken.add("acc")
    for line in task.ops:
        _op(draft, line)
    _check_declarations(draft)
    source = _render(draft)
    verdict = check_policy(source)
    if not verdict.passed:
        raise CannotCompose(f"task {task.name}: the kernel file would be refused: {verdict.reason}")
    return source


def _pairing(task: Task) -> str | None:
    if any(s.kind == "TileLoad" and s.width == 2 for s in task.operands.values()):
        return "tile"
    halves = any(s.kind == "TileStore" and s.width == 0.5 for s in task.outputs.values())
    return "acc" if halves or any(line.op in _NEEDS_PAIRS for line in task.ops) else None


def _operand_kind(spec: TensorSpec) -> str:
    if spec.dtype == "int32":
        return "index"
    by_kind = {"RowVecLoad": "row", "ColVecLoad": "col", "Scalar": "scalar", "HeadRstd": "full"}
    return by_kind.get(spec.kind) or ("wide" if spec.width == 2 else "full")


def _op(draft: _Draft, line: OpLine) -> None:
    if line.op not in OPS:
        raise CannotCompose(f"op '{line}': the composer has no rule for {line.op!r}; it knows {', '.join(OPS)}")
    kinds = [draft.kinds[a] for a in line.args]
    args = [draft.alias[a] for a in line.args]
    try:
        expression, kind = _expression(draft, line, args, kinds)
        _check_output(draft.task, line, kind)
    except _Misfit as e:
        raise CannotCompose(f"op '{line}': {e}") from None
    if expression in draft.taken or kind == "factors":
        name = expression  # nothing to compute: the op stores or reduces a value that exists
    else:
        name = draft.fresh(line.name)
        draft.lines.append(f"{name} = {expression}")
    draft.kinds[line.name], draft.alias[line.name] = kind, name
    if line.name in draft.task.outputs:
        draft.results[line.name] = name
        if kind == "factors":
            draft.products.add(line.name)


class _Misfit(Exception):
    pass


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise _Misfit(message)


def _check_output(task: Task, line: OpLine, kind: str) -> None:
    """An output is declared as what its op gives; what a reduction gives is an output."""
    if line.op in _REDUCES:
        axis, _, what = line.op.partition("_")
        reduce = "ColVecReduce" if axis == "row" else "RowVecReduce"
        gives = TensorSpec(kind=reduce, combine=_COMBINE.get(what, "add"))
    elif line.op == "row_logsumexp":
        gives = TensorSpec(kind="OnlineLSEReduce")
    elif line.op == "select":
        gives = TensorSpec(kind="ColVecSelect", index=line.args[1])
    else:
        gives = TensorSpec(kind="TileStore", width={"half": 0.5, "wide": 2}.get(kind, 1))
    spec = task.outputs.get(line.name)
    if spec is None:
        _need(gives.kind == "TileStore", f"gives a {gives.kind}; it must be an output, other ops cannot read it")
    elif spec.declared != gives.declared:
        raise _Misfit(f"gives {_kind_call(gives, False)}, but output {line.name!r} is {_kind_call(spec, False)}")


def _check_declarations(draft: _Draft) -> None:
    """Refuse what ``@epilogue`` itself would refuse when the file is loaded."""
    task = draft.task
    declared = {}
    for name, spec in task.tensors.items():
        if _operand_kind(spec) != "index":
            kind = spec.declared
            declared[name] = replace(kind, product=True) if name in draft.products else kind

    def kernel() -> None: ...

    kernel.__name__ = task.name
    names = ["acc", *(n for n, kind in declared.items() if kind.is_operand)]
    kernel.__signature__ = inspect.Signature(
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names
    )
    try:
        misfit = task.mismatch(epilogue(pairs=draft.pairs, **declared)(kernel))
    except DeclarationError as e:
        misfit = f"{e} (its ops and operands need pairs={draft.pairs!r})"
    if misfit:
        raise CannotCompose(f"task {task.name}: {misfit}")


def _expression(draft: _Draft, line: OpLine, args: list[str], kinds: list[str]) -> tuple[str, str]:
    op = line.op
    matrix = kinds[0] if kinds else ""
    _need(matrix in ("full", "half", "wide"), "the first argument must be a matrix")
    if op == "store":
        _need(len(args) == 1, "takes one argument")
        return args[0], matrix
    if op in _BINARY:
        _need(len(args) == 2, "takes two arguments")
        second = _SECOND_ARGUMENT.get(op)
        _need(kinds[1] == (second or matrix), f"the second argument must be a {second or matrix} operand")
        _need(second != "row" or matrix == "full", "a row vector goes with (M, N) matrices only")
        return _BINARY[op].format(*args), matrix
    if op in _UNARY:
        _need(len(args) == 1, "takes one argument")
        draft.imports.add(op)
        return f"{op}({args[0]})", matrix
    if op in _REDUCES or op == "row_logsumexp":
        return _reduce(draft, line, args, kinds)
    if op == "select":
        _need(len(args) == 2 and kinds[1] == "index", "takes a matrix and an int32 operand")
        return args[0], "select"
    return _paired(draft, op, args, kinds)


def _paired(draft: _Draft, op: str, args: list[str], kinds: list[str]) -> tuple[str, str]:
    """Ops on neighbouring columns."""
    lanes_of = "wide" if draft.pairs == "tile" else "full"
    if op in _GATED:
        _need(len(args) == 1 and kinds[0] == lanes_of, "takes one matrix of interleaved pairs")
        gate, up = draft.unpack(args[0], ("gate", "up"))
        draft.imports.add(_GATED[op])
        return f"{_GATED[op]}({gate}) * {up}", "full" if draft.pairs == "tile" else "half"
    if op == "swiglu_bwd":
        _need(draft.pairs == "tile" and kinds == ["full", "wide"], "takes dy (M, N) and z (M, 2N)")
        gate, up = draft.unpack(args[1], ("gate", "up"))
        draft.imports |= {"pack", "silu", "dsilu"}
        dgate, dup = draft.fresh("dgate"), draft.fresh("dup")
        draft.lines.append(f"{dgate} = {args[0]} * {up} * dsilu({gate})")
        draft.lines.append(f"{dup} = {args[0]} * silu({gate})")
        draft.lanes[line_name := draft.fresh("dz_")] = (dgate, dup)
        draft.lines.append(f"{line_name} = pack({dgate}, {dup})")
        return line_name, "wide"
    _need(draft.pairs == "acc" and kinds[0] == "full", "needs the full-width accumulator")
    x, y = draft.unpack(args[0], ("x", "y"))
    if op == "rope":
        _need(len(args) == 2 and kinds[1] == "full", "takes a matrix and its cos/sin table (M, N)")
        cos, sin = draft.unpack(args[1], ("cos", "sin"))
    else:
        _need(kinds[1:] == ["col", "row"], "takes a matrix, positions (M,) and frequencies (N,)")
        draft.imports.add("rotary_cos_sin")
        cos, sin = draft.fresh("cos"), draft.fresh("sin")
        draft.lines.append(f"{cos}, {sin} = rotary_cos_sin({args[1]}, {args[2]})")
    draft.imports.add("pack")
    return f"pack({x} * {cos} + {y} * {sin}, {y} * {cos} - {x} * {sin})", "full"


def _reduce(draft: _Draft, line: OpLine, args: list[str], kinds: list[str]) -> tuple[str, str]:
    op = line.op
    two = op.endswith("dot")
    _need(len(args) == (2 if two else 1) and len(set(kinds)) == 1, "takes matrices of the same shape")
    if kinds[0] == "wide":
        _need(op in ("row_dot", "row_sum", "row_sum_sq"), "only row sums of (M, 2N) tiles are possible")
        a = draft.unpack(args[0], ("a0", "a1"))
        b = draft.unpack(args[-1], ("b0", "b1"))
        if op == "row_sum":
            return f"{a[0]} + {a[1]}", "reduced"
        return f"{a[0]} * {b[0]} + {a[1]} * {b[1]}", "reduced"
    _need(kinds[0] == "full", "reduces (M, N) matrices only")
    if op in ("row_sum_sq", "row_dot", "col_dot"):
        if draft.pairs == "acc":
            return f"{args[0]} * {args[-1]}", "reduced"
        return f"({args[0]}, {args[-1]})", "factors"
    return args[0], "reduced"


def _render(draft: _Draft) -> str:
    task = draft.task
    declarations = []
    for name, spec in task.tensors.items():
        if _operand_kind(spec) == "index":
            continue  # named by its ColVecSelect, never declared itself
        draft.imports.add(spec.kind)
        declarations.append(f"{name}={_kind_call(spec, name in draft.products)}")
    if draft.pairs:
        declarations.append(f'pairs="{draft.pairs}"')
    draft.imports.add("epilogue")
    operands = [n for n, s in task.operands.items() if _operand_kind(s) != "index"]
    results = [f'"{n}": {draft.results[n]}' for n in task.outputs]
    summary = " ".join(task.summary.split()) or task.name
    doc = f'"""{_escape(summary[0].upper() + summary[1:])}.\n\n{_escape(task.math.rstrip())}\n"""'
    return "\n".join(
        [
            doc,
            "",
            _wrap("from primitives import ", sorted(draft.imports, key=str.lower), "(", ")", bare=True),
            "",
            "",
            _wrap("@epilogue(", declarations, "", ")"),
            f"def {task.name}({', '.join(['acc', *operands])}):",
            *textwrap.indent("\n".join(draft.lines), "    ").splitlines(),
            "    " + _wrap("return {", results, "", "}", indent=4),
            "",
        ]
    )


def _escape(text: str) -> str:
    """Text inside a docstring, so that the docstring's value is that text."""
    text = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _kind_call(spec: TensorSpec, product: bool) -> str:
    options = []
    if spec.width != 1:
        options.append("width=1 / 2" if spec.width == 0.5 else f"width={spec.width:g}")
    if spec.combine != "add":
        options.append(f'combine="{spec.combine}"')
    if product:
        options.append("product=True")
    if spec.kind == "ColVecSelect":
        options.append(f'index="{spec.index}"')
    if spec.kind == "HeadRstd":
        options.append(f"head_dim={spec.head_dim}, eps={spec.eps!r}")
    return f"{spec.kind}({', '.join(options)})"


def _wrap(head: str, items: list[str], opening: str, closing: str, bare: bool = False, indent: int = 0) -> str:
    """One line if it fits, else one item per line in brackets."""
    flat = head + ", ".join(items) + ("" if bare else closing)
    if len(flat) + indent <= _WIDTH:
        return flat
    pad = " " * indent
    body = "".join(f"{pad}    {item},\n" for item in items)
    return f"{head}{opening}\n{body}{pad}{closing}"
