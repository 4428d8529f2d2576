"""Source mutants: a known-good kernel with one small mistake in its text.

The mistakes are those that authors make: a forgotten term, a flipped sign, the
wrong operand of the same kind, swapped lanes, a related but different
activation, a reduction of the wrong value. What text cannot express (a skipped
tile, a stale statistic, lower precision) is in ``execution_mutants``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from primitives import KINDS, MATHS

_ACTIVATIONS = ("silu", "sigmoid", "gelu", "gelu_tanh", "relu", "relu_sq", "tanh", "softplus")
_DERIVATIVES = ("dsilu", "dsigmoid", "dgelu", "dgelu_tanh", "drelu", "drelu_sq", "dtanh", "dsoftplus")
_OTHERS = {
    "exp": ("exp2",), "exp2": ("exp",), "log": ("exp",), "sqrt": ("rsqrt",), "rsqrt": ("sqrt", "rcp"), "rcp": ("rsqrt",),
    "maximum": ("minimum",), "minimum": ("maximum",), "erf": ("tanh",), "fabs": ("relu",),
    # the approximate forms mean the same on the CPU, so they are no mutants of each other
    "silu_approx": ("sigmoid", "gelu", "relu"), "sigmoid_approx": ("silu", "tanh", "relu"),
}  # fmt: skip
_SCALES = (1.001, 1.01, 0.5)
_MATRIX = {"TileLoad", "HeadRstd"}
_RANK = ("number", "scalar", "row", "col", "lane", "full", "wide")


@dataclass(frozen=True)
class SourceMutant:
    """The text of a mutated kernel; ``name`` says which statement became what."""

    operator: str
    name: str
    source: str


@dataclass(frozen=True)
class _Edit:
    operator: str
    changes: dict  # id of a node -> the node that takes its place
    imports: tuple[str, ...] = ()


def source_mutants(source: str) -> list[SourceMutant]:
    """Every mutant of a kernel file, without duplicates, in a stable order."""
    tree = ast.parse(source)
    kernel = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and _is_kernel(n))
    seen, found = {_canonical(tree)}, []
    for statement in kernel.body:
        if isinstance(statement, ast.Expr):
            continue
        for edit in _statement_edits(kernel, statement):
            mutated = _import_also(_rebuilt(tree, edit.changes), edit.imports)
            if (canonical := _canonical(mutated)) not in seen:
                seen.add(canonical)
                found.append(SourceMutant(edit.operator, _name(edit, statement), ast.unparse(mutated)))
    for edit in _declaration_edits(kernel):
        text = ast.unparse(_rebuilt(tree, edit.changes))
        old = next(n for n in ast.walk(kernel) if id(n) in edit.changes)
        found.append(
            SourceMutant(edit.operator, f"{edit.operator}: {_text(old)} => {_text(edit.changes[id(old)])}", text)
        )
    return found


def _canonical(tree: ast.Module) -> str:
    """Text in which a + b and b + a, a * b and b * a, and the two factors of a product read the same."""

    def sort(node: ast.AST) -> ast.AST:
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                setattr(node, field, sort(value))
            elif isinstance(value, list):
                value[:] = [sort(v) if isinstance(v, ast.AST) else v for v in value]
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            node.left, node.right = sorted((node.left, node.right), key=ast.dump)
        if isinstance(node, ast.Dict):
            for value in node.values:
                if isinstance(value, ast.Tuple):
                    value.elts.sort(key=ast.dump)
        return node

    return ast.unparse(ast.fix_missing_locations(sort(_rebuilt(tree, {}))))


def _is_kernel(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Call) and getattr(d.func, "id", "") == "epilogue" for d in node.decorator_list)


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def _name(edit: _Edit, statement: ast.stmt) -> str:
    before, after = _text(statement), _text(_rebuilt(statement, edit.changes))
    if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Dict):
        # one entry of the returned dict, not all of them
        pairs = zip(statement.value.keys, statement.value.values, strict=True)
        changed = [(k, v) for k, v in pairs if any(id(n) in edit.changes for n in ast.walk(v))]
        if changed:
            before = ", ".join(f"{k.value} = {_text(v)}" for k, v in changed)
            after = ", ".join(f"{k.value} = {_text(_rebuilt(v, edit.changes))}" for k, v in changed)
    return f"{edit.operator}: {before} => {after}"


def _rebuilt(node: ast.AST, changes: dict) -> ast.AST:
    """A copy of the tree with some nodes replaced; the original stays as it is."""
    if id(node) in changes:
        return changes[id(node)]
    fields = {}
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            fields[field] = [_rebuilt(v, changes) if isinstance(v, ast.AST) else v for v in value]
        else:
            fields[field] = _rebuilt(value, changes) if isinstance(value, ast.AST) else value
    return ast.copy_location(type(node)(**fields), node)


def _import_also(tree: ast.Module, names: tuple[str, ...]) -> ast.Module:
    statement = next(n for n in tree.body if isinstance(n, ast.ImportFrom))
    have = {a.name for a in statement.names}
    statement.names = [*statement.names, *(ast.alias(n) for n in names if n not in have)]
    return ast.fix_missing_locations(tree)


# --- which names may stand for each other ------------------------------------------


def _kinds_before(kernel: ast.FunctionDef, statement: ast.stmt) -> dict[str, str]:
    """Kind of every name that exists before ``statement``."""
    options = {k.arg: k.value for d in kernel.decorator_list for k in d.keywords}
    tile_pairs = getattr(options.get("pairs"), "value", None) == "tile"
    kinds = {"acc": "full"}
    for argument in kernel.args.args[1:]:
        declared = options[argument.arg]
        label = declared.func.id
        wide = any(k.arg == "width" and getattr(k.value, "value", 1) == 2 for k in declared.keywords)
        kinds[argument.arg] = (
            ("wide" if wide else "full") if label in _MATRIX
            else {"RowVecLoad": "row", "ColVecLoad": "col"}.get(label, "scalar")
        )  # fmt: skip
    lane = "full" if tile_pairs else "lane"
    for earlier in kernel.body:
        if earlier is statement:
            break
        if not isinstance(earlier, ast.Assign):
            continue
        target, value = earlier.targets[0], earlier.value
        if isinstance(target, ast.Tuple):
            kinds.update(dict.fromkeys((t.id for t in target.elts), lane))
        else:
            kinds[target.id] = _kind(value, kinds, tile_pairs)
    return kinds


def _kind(node: ast.AST, kinds: dict[str, str], tile_pairs: bool) -> str:
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "pack":
        return "wide" if tile_pairs else "full"
    parts = [kinds[n.id] for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in kinds]
    return max(parts, key=_RANK.index, default="number")


# --- the mistakes ----------------------------------------------------------------------


def _statement_edits(kernel: ast.FunctionDef, statement: ast.stmt) -> Iterator[_Edit]:
    kinds = _kinds_before(kernel, statement)
    parents = {id(c): p for p in ast.walk(statement) for c in ast.iter_child_nodes(p)}
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp):
            yield from _operator_edits(node)
        elif isinstance(node, ast.UnaryOp):
            yield _Edit("flip-sign", {id(node): node.operand})
        elif isinstance(node, ast.Call):
            yield from _call_edits(node)
        elif isinstance(node, ast.Compare):
            mirrored = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}[type(node.ops[0])]
            yield _Edit("flip-comparison", {id(node): ast.Compare(node.left, [mirrored()], node.comparators)})
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in kinds:
            yield from _name_edits(node, parents.get(id(node)), kinds)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and node.value:
            yield _Edit("wrong-constant", {id(node): ast.Constant(node.value * 1.01)})
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
        target = statement.targets[0]
        yield _Edit("swap-lanes", {id(target): ast.Tuple(target.elts[::-1], ast.Store())})
    if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Dict):
        yield from _return_edits(statement.value)
    yield from _swapped_operands(statement, kinds)


def _operator_edits(node: ast.BinOp) -> Iterator[_Edit]:
    left, right = node.left, node.right

    def edit(operator: str, new: ast.AST) -> _Edit:
        return _Edit(operator, {id(node): new})

    if isinstance(node.op, (ast.Add, ast.Sub)):
        minus = isinstance(node.op, ast.Sub)
        yield edit("drop-term", left)
        yield edit("drop-term", ast.UnaryOp(ast.USub(), right) if minus else right)
        yield edit("flip-sign", ast.BinOp(left, ast.Add() if minus else ast.Sub(), right))
        yield edit("flip-sign", ast.BinOp(ast.UnaryOp(ast.USub(), left), node.op, right))
        yield edit("wrong-operator", ast.BinOp(left, ast.Mult(), right))
    else:
        yield edit("drop-factor", left)
        yield edit("drop-factor", right)
        yield edit("flip-sign", ast.UnaryOp(ast.USub(), ast.BinOp(left, node.op, right)))
        yield edit("wrong-operator", ast.BinOp(left, ast.Add(), right))
        yield edit("wrong-operator", ast.BinOp(left, ast.Div() if isinstance(node.op, ast.Mult) else ast.Mult(), right))


def _call_edits(node: ast.Call) -> Iterator[_Edit]:
    name = getattr(node.func, "id", "")
    if name == "pack":
        a, b = node.args
        yield _Edit("swap-lanes", {id(node): ast.Call(node.func, [b, a], [])})
        yield _Edit("same-lane-twice", {id(node): ast.Call(node.func, [a, a], [])})
        yield _Edit("same-lane-twice", {id(node): ast.Call(node.func, [b, b], [])})
        return
    if name not in MATHS:
        return
    if name in _ACTIVATIONS:
        others = tuple(a for a in _ACTIVATIONS if a != name)
    elif name in _DERIVATIVES:
        others = (*(d for d in _DERIVATIVES if d != name), name[1:])
    else:
        others = _OTHERS.get(name, ())
    for other in others:
        new = ast.Call(ast.Name(other, ast.Load()), node.args, [])
        yield _Edit("wrong-function", {id(node): new}, (other,))
    if len(node.args) == 1:
        yield _Edit("drop-function", {id(node): node.args[0]})
    if name == "where":
        c, a, b = node.args
        yield _Edit("swap-branches", {id(node): ast.Call(node.func, [c, b, a], [])})
        yield _Edit("drop-branch", {id(node): a})
        yield _Edit("drop-branch", {id(node): b})


def _name_edits(node: ast.Name, parent: ast.AST | None, kinds: dict[str, str]) -> Iterator[_Edit]:
    for other, kind in kinds.items():
        if other != node.id and kind == kinds[node.id]:
            yield _Edit("wrong-value", {id(node): ast.Name(other, ast.Load())})
    in_call_of_pairs = isinstance(parent, ast.Call) and getattr(parent.func, "id", "") == "unpack"
    if in_call_of_pairs:
        return
    operator = getattr(parent, "op", None)
    for neutral in (0.0, 1.0):
        # a neutral element in a sum or product is the dropped term or factor that exists already
        if isinstance(operator, (ast.Add, ast.Sub) if neutral == 0.0 else ast.Mult):
            continue
        yield _Edit("neutral-operand", {id(node): ast.Constant(neutral)})


def _return_edits(result: ast.Dict) -> Iterator[_Edit]:
    values = result.values
    for value in values:
        if isinstance(value, ast.Tuple):
            a, b = value.elts
            for factors in ((a, a), (b, b), (a, ast.Constant(1.0)), (ast.Constant(1.0), b)):
                yield _Edit("wrong-factors", {id(value): ast.Tuple(list(factors), ast.Load())})
            for scale in _SCALES:
                scaled = ast.BinOp(a, ast.Mult(), ast.Constant(scale))
                yield _Edit("wrong-scale", {id(value): ast.Tuple([scaled, b], ast.Load())})
            yield _Edit("flip-sign", {id(value): ast.Tuple([ast.UnaryOp(ast.USub(), a), b], ast.Load())})
            continue
        for scale in _SCALES:
            yield _Edit("wrong-scale", {id(value): ast.BinOp(value, ast.Mult(), ast.Constant(scale))})
        yield _Edit("flip-sign", {id(value): ast.UnaryOp(ast.USub(), value)})
        yield _Edit("wrong-offset", {id(value): ast.BinOp(value, ast.Add(), ast.Constant(0.01))})
    for i, first in enumerate(values):
        for second in values[i + 1 :]:
            yield _Edit("swap-outputs", {id(first): second, id(second): first})


def _swapped_operands(statement: ast.stmt, kinds: dict[str, str]) -> Iterator[_Edit]:
    """Two names of the same kind exchanged throughout one statement."""
    loads = [
        n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in kinds
    ]
    names = sorted({n.id for n in loads})
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            if kinds[a] == kinds[b]:
                other = {a: b, b: a}
                changes = {id(n): ast.Name(other[n.id], ast.Load()) for n in loads if n.id in other}
                yield _Edit("swap-operands", changes)


def _declaration_edits(kernel: ast.FunctionDef) -> Iterator[_Edit]:
    """Wrong kinds and options; the comparison with the task must refuse each."""
    twin = {
        "RowVecLoad": "ColVecLoad",
        "ColVecLoad": "RowVecLoad",
        "ColVecReduce": "RowVecReduce",
        "RowVecReduce": "ColVecReduce",
    }
    for keyword in (k for d in kernel.decorator_list for k in d.keywords):
        call = keyword.value
        label = getattr(getattr(call, "func", None), "id", "")
        if label not in KINDS:
            continue
        if label in twin:
            yield _Edit("wrong-kind", {id(call): ast.Call(ast.Name(twin[label], ast.Load()), [], call.keywords)})
        if label.endswith("VecReduce"):
            now = next((k.value.value for k in call.keywords if k.arg == "combine"), "add")
            combine = ast.keyword("combine", ast.Constant("max" if now == "add" else "add"))
            kept = [k for k in call.keywords if k.arg not in ("combine", "product")]
            yield _Edit("wrong-kind", {id(call): ast.Call(call.func, [], [*kept, combine])})
