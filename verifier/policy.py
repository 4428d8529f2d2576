"""Policy stage: an allow-list over the syntax tree of a kernel file.

A kernel is declarations and one traced function. What is not listed here is
rejected, so host code, state, imports and name tricks cannot be written down.
"""

from __future__ import annotations

import ast
import re
import time

from primitives import KINDS, MATHS, VOCABULARY

from .verdict import Verdict

MAX_SOURCE = 20_000  # characters; the longest honest kernel is under 3,000
MAX_DEPTH = 200  # of the syntax tree; not left to the recursion limit, which other code of the process may raise
MAX_STRING = 64  # characters of a string that is not a docstring
_CALLABLE = frozenset(KINDS) | frozenset(MATHS) | {"pack", "unpack"}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_COMPARES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
# device code of a custom primitive may reach these attributes of cute.math / cute.arch
_CUTE = {
    "math": {"exp", "exp2", "log", "log2", "log10", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh", "erf",
             "fma", "absf", "floor", "ceil", "round", "roundeven", "trunc", "max", "min", "atan", "atan2"},
    "arch": {"rcp_approx", "fmax", "fmin", "exp", "exp2"},
}  # fmt: skip
_HINTS = {
    ast.If: "a branch on a traced value; use where(condition, a, b)",
    ast.IfExp: "a branch on a traced value; use where(condition, a, b)",
    ast.For: "a loop; the function runs once per element, write the formula",
    ast.While: "a loop; the function runs once per element, write the formula",
    ast.Try: "try/except; a kernel has nothing to catch",
    ast.ClassDef: "a class; a kernel is functions only",
    ast.Import: "an import; only 'from primitives import ...' is allowed",
    ast.Lambda: "a lambda; write a module-level function",
    ast.Global: "global state; a kernel has none",
    ast.Nonlocal: "captured state; a kernel has none",
    ast.ListComp: "a comprehension; write the formula",
    ast.List: "a list; return a dict of outputs, use a tuple for two factors",
    ast.Subscript: "indexing; split pairs with a, b = unpack(x)",
    ast.JoinedStr: "an f-string; a kernel has no text to build",
    ast.Starred: "star arguments; name each argument",
    ast.AugAssign: "augmented assignment; write x = x + y under a new name",
    ast.NamedExpr: "':='; assign on its own line",
    ast.With: "a with block; a kernel opens nothing",
    ast.AsyncFunctionDef: "async code; a kernel is plain functions",
    ast.BoolOp: "and/or on traced values; nest where()",
}


class _Rejected(Exception):
    def __init__(self, node: ast.AST, reason: str):
        self.line = getattr(node, "lineno", 1)
        self.reason = reason
        super().__init__(reason)


def check_policy(source: str) -> Verdict:
    """Accept or reject the text of a kernel file; never executes it."""
    start = time.perf_counter()
    try:
        _check(source)
    except _Rejected as e:
        reason = f"line {e.line}: {e.reason}"
        return Verdict(
            stage="policy", passed=False, reason=reason, evidence={"line": e.line}, seconds=time.perf_counter() - start
        )
    return Verdict(stage="policy", passed=True, reason="only declared operations", seconds=time.perf_counter() - start)


def _check(source: str) -> None:
    if len(source) > MAX_SOURCE:
        raise _Rejected(ast.Module(), f"{len(source)} characters; a kernel file has at most {MAX_SOURCE}")
    if "\0" in source:
        raise _Rejected(ast.Module(), "contains a NUL byte")
    # the file is imported from its bytes: an encoding such as utf-7 would turn a comment into code unseen here
    if re.search(r"#[^\n]*coding[:=]", "\n".join(source.split("\n")[:2])):
        raise _Rejected(ast.Module(), "an encoding declaration; kernel files are UTF-8 without one")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError) as e:  # 3.11 raises the last for depth
        node = ast.Module()
        node.lineno = getattr(e, "lineno", 1) or 1
        raise _Rejected(node, f"not valid Python: {getattr(e, 'msg', None) or e}") from None
    _check_depth(tree)
    functions: dict[str, ast.FunctionDef] = {}
    constants: set[str] = set()
    imported: set[str] = set()
    kernels = []
    for position, node in enumerate(tree.body):
        if isinstance(node, ast.Expr) and _is_string(node.value):
            if position:
                raise _Rejected(node, "a bare string; only the module docstring may be one")
        elif isinstance(node, ast.ImportFrom):
            imported |= _check_import(node)
        elif isinstance(node, ast.Assign):
            constants.add(_check_constant(node, constants))
        elif isinstance(node, ast.FunctionDef):
            _new_name(node, node.name, imported | constants | set(functions))
            if _check_decorators(node, functions):
                kernels.append(node)
            _check_function(node, imported, constants, functions)
            functions[node.name] = node
        else:
            raise _Rejected(node, f"not allowed here: {_describe(node)}")
    if len(kernels) != 1:
        where = kernels[1] if len(kernels) > 1 else ast.Module()
        raise _Rejected(where, f"a kernel file has exactly one @epilogue function, this one has {len(kernels)}")


def _check_depth(tree: ast.Module) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        at = next((n for n in level if hasattr(n, "lineno")), ast.Module())
        raise _Rejected(at, "nested too deeply; split it into several lines")


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _describe(node: ast.AST) -> str:
    return _HINTS.get(type(node), type(node).__name__)


def _check_import(node: ast.ImportFrom) -> set[str]:
    if node.module != "primitives" or node.level:
        raise _Rejected(node, f"import from {node.module!r}; only 'from primitives import ...' is allowed")
    for alias in node.names:
        if alias.name not in VOCABULARY:
            raise _Rejected(node, f"primitives has no {alias.name!r} for kernels; see 'coda-agent docs'")
        if alias.asname:
            raise _Rejected(node, f"renaming {alias.name!r}; use the primitive under its own name")
    return {alias.name for alias in node.names}


def _check_constant(node: ast.Assign, constants: set[str]) -> str:
    target = node.targets[0]
    if len(node.targets) != 1 or not isinstance(target, ast.Name):
        raise _Rejected(node, "a module-level assignment must be NAME = number")
    _new_name(node, target.id, constants)
    for part in ast.walk(node.value):
        number = isinstance(part, ast.Constant) and type(part.value) in (int, float)
        known = isinstance(part, ast.Name) and part.id in constants
        plain = isinstance(part, (ast.BinOp, ast.UnaryOp, ast.USub, ast.Load, *_OPERATORS))
        if not (number or known or plain):
            raise _Rejected(node, "a module-level value must be a number or simple arithmetic on numbers")
    return target.id


def _new_name(node: ast.AST, name: str, taken: set[str]) -> None:
    if name.startswith("__"):
        raise _Rejected(node, f"name {name!r} starts with two underscores")
    if name in VOCABULARY or name in taken:
        raise _Rejected(node, f"name {name!r} is already taken; choose another")


def _check_decorators(node: ast.FunctionDef, functions: dict) -> bool:
    """True for the kernel itself, False for helpers and custom primitives."""
    if not node.decorator_list:
        return False
    if len(node.decorator_list) != 1:
        raise _Rejected(node, "one decorator at most: @epilogue(...) or @primitive(cpu=...)")
    call = node.decorator_list[0]
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args):
        raise _Rejected(node, "decorate with @epilogue(name=Kind(), ...) or @primitive(cpu=function)")
    if call.func.id == "primitive":
        cpu = call.keywords[0].value if len(call.keywords) == 1 and call.keywords[0].arg == "cpu" else None
        if not (isinstance(cpu, ast.Name) and (cpu.id in functions or cpu.id in MATHS)):
            raise _Rejected(node, "@primitive needs cpu=<function defined above, its CPU meaning>")
        return False
    if call.func.id != "epilogue":
        raise _Rejected(node, f"decorator {call.func.id!r}; use @epilogue or @primitive")
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg is None:
            raise _Rejected(value, "star arguments; name each argument")
        if keyword.arg == "pairs":
            if not (_is_string(value) or (isinstance(value, ast.Constant) and value.value is None)):
                raise _Rejected(value, "pairs must be 'acc' or 'tile'")
            continue
        if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in KINDS):
            raise _Rejected(value, f"{keyword.arg} must be declared with a kind: one of {', '.join(KINDS)}")
        for part in (*value.args, *(k.value for k in value.keywords)):
            _check_literal(part)
    return True


def _check_literal(node: ast.AST) -> None:
    for part in ast.walk(node):
        ok = isinstance(part, (ast.Constant, ast.UnaryOp, ast.USub, ast.BinOp, ast.Div, ast.Load))
        if not ok or (isinstance(part, ast.Constant) and isinstance(part.value, (bytes, complex))):
            raise _Rejected(node, "options of a kind must be plain literals")
        if _is_string(part) and len(part.value) > MAX_STRING:
            raise _Rejected(node, f"a string longer than {MAX_STRING} characters")


def _check_function(node: ast.FunctionDef, imported: set[str], constants: set[str], functions: dict) -> None:
    args = node.args
    if args.posonlyargs or args.kwonlyargs or args.vararg or args.kwarg or args.defaults or args.kw_defaults:
        raise _Rejected(node, "plain parameters only (no defaults, *args or **kwargs)")
    if node.returns or any(a.annotation for a in args.args):
        raise _Rejected(node, "no annotations; the declarations say what each operand is")
    device = any(
        isinstance(d, ast.Call) and isinstance(d.func, ast.Name) and d.func.id == "primitive"
        for d in node.decorator_list
    )
    values = {a.arg for a in args.args}
    for name in values:
        _new_name(node, name, constants | set(functions))
    scope = _Scope(values | constants, (_CALLABLE & imported) | set(functions), imported, device)
    body = node.body
    if isinstance(body[0], ast.Expr) and _is_string(body[0].value):
        body = body[1:]
    if not body or not isinstance(body[-1], ast.Return):
        raise _Rejected(node, f"{node.name}() must end with a return")
    for statement in body[:-1]:
        _check_assignment(statement, scope, constants | set(functions))
    _check_return(body[-1], scope)


class _Scope:
    def __init__(self, values: set[str], callables: set[str], imported: set[str], device: bool):
        self.values, self.callables, self.imported, self.device = set(values), callables, imported, device


def _check_assignment(node: ast.stmt, scope: _Scope, taken: set[str]) -> None:
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        raise _Rejected(node, f"not allowed in a kernel function: {_describe(node)}")
    _check_expression(node.value, scope)
    target = node.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    for name in names:
        if not isinstance(name, ast.Name):
            raise _Rejected(node, "assign to names only")
        _new_name(node, name.id, taken)
        scope.values.add(name.id)


def _check_return(node: ast.Return, scope: _Scope) -> None:
    value = node.value
    if isinstance(value, ast.Dict):
        for key, item in zip(value.keys, value.values):
            if key is None or not _is_string(key) or len(key.value) > MAX_STRING:
                raise _Rejected(value, "dict keys must be output names as plain strings")
            _check_expression(item, scope)
    elif value is not None:
        _check_expression(value, scope)
    else:
        raise _Rejected(node, "returns nothing")


def _check_expression(node: ast.AST, scope: _Scope) -> None:
    if isinstance(node, ast.Constant):
        if type(node.value) not in (int, float):
            raise _Rejected(node, f"constant {node.value!r}; numbers only")
    elif isinstance(node, ast.Name):
        if node.id not in scope.values:
            raise _Rejected(node, f"name {node.id!r} is not a parameter, constant or earlier value")
    elif isinstance(node, ast.BinOp):
        if not isinstance(node.op, _OPERATORS):
            raise _Rejected(node, "operator; only + - * / are available (x * x for squares)")
        _check_expression(node.left, scope)
        _check_expression(node.right, scope)
    elif isinstance(node, ast.UnaryOp):
        if not isinstance(node.op, ast.USub):
            raise _Rejected(node, "unary operator; only minus is available")
        _check_expression(node.operand, scope)
    elif isinstance(node, ast.Compare):
        if len(node.ops) != 1:
            raise _Rejected(node, "chained comparison; CuTeDSL evaluates it wrongly, nest where()")
        if not isinstance(node.ops[0], _COMPARES):
            raise _Rejected(node, "comparison; only < <= > >= are available")
        _check_expression(node.left, scope)
        _check_expression(node.comparators[0], scope)
    elif isinstance(node, ast.Tuple):
        for item in node.elts:
            _check_expression(item, scope)
    elif isinstance(node, ast.Call):
        _check_call(node, scope)
    else:
        raise _Rejected(node, f"not allowed in a kernel function: {_describe(node)}")


def _check_call(node: ast.Call, scope: _Scope) -> None:
    func = node.func
    if isinstance(func, ast.Attribute):
        base = func.value
        is_cute = isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id == "cute"
        if not (scope.device and is_cute and "cute" in scope.imported and func.attr in _CUTE.get(base.attr, ())):
            raise _Rejected(node, "attribute call; only cute.math.* / cute.arch.* inside @primitive functions")
        for keyword in node.keywords:
            flag = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool)
            if keyword.arg != "fastmath" or not flag:
                raise _Rejected(node, "only fastmath=True/False may be passed by name")
    elif isinstance(func, ast.Name):
        if func.id not in scope.callables:
            raise _Rejected(node, f"call of {func.id!r}; import it from primitives or define it above")
        if node.keywords:
            raise _Rejected(node, "keyword arguments; pass values in order")
    else:
        raise _Rejected(node, "call of an expression; call primitives and helpers by name")
    for argument in node.args:
        _check_expression(argument, scope)
