# ruff: noqa: E501  (tables of cases, one a line)
"""The policy stage: what must not be writable in a kernel file, and what must stay writable.

Sources mark the line that must be blamed with ``#!``.
"""

import re
import sys

import pytest

from verifier.policy import MAX_SOURCE, check_policy

HEAD = """\
\"\"\"y = f(A B).\"\"\"
from primitives import TileStore, epilogue, fma, silu, where


"""


def kernel(body, decorator="@epilogue(y=TileStore())", signature="def k(acc):"):
    """A kernel file around ``body`` (several lines allowed)."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{HEAD}{decorator}\n{signature}\n{lines}"


GOOD = kernel('return {"y": acc}')


def module(text):
    """A good kernel with ``text`` at module level before it."""
    return GOOD.replace("\n\n\n", f"\n{text}\n\n\n", 1)


def device(body):
    """A @primitive device function with ``body``, used by a good kernel."""
    return (
        "from primitives import TileStore, cute, epilogue, primitive, tanh\n\n\n"
        "def cpu(x):\n    return tanh(x)\n\n\n"
        "@primitive(cpu=cpu)\ndef mine(x):\n"
        + "".join(f"    {line}\n" for line in body.splitlines())
        + '\n\n@epilogue(y=TileStore())\ndef k(acc):\n    return {"y": mine(acc)}\n'
    )


REJECTED = {
    # host code: the D, F and G sketches of exploits.md
    "import": (module("import torch  #!"), "only 'from primitives import"),
    "import os as": (module("import os as primitives  #!"), "only 'from primitives import"),
    "from torch": (module("from torch import ops  #!"), "import from 'torch'"),
    "import the reference": (module("from reference_kernels.references import gemm_rope  #!"), "import from 'reference_"),
    "import a submodule": (module("from primitives.maths import torch  #!"), "import from 'primitives.maths'"),
    "relative import": (module("from .primitives import silu  #!"), "only 'from primitives import"),
    "star import": (module("from primitives import *  #!"), "has no '*'"),
    "unknown primitive": (module("from primitives import declare  #!"), "has no 'declare'"),
    "private name": (module("from primitives import __getattr__  #!"), "has no '__getattr__'"),
    "renamed import": (module("from primitives import silu as gelu  #!"), "renaming 'silu'"),
    "import inside": (kernel('import torch  #!\nreturn {"y": acc}'), "only 'from primitives import"),
    "import from inside": (kernel('from primitives import exp  #!\nreturn {"y": acc}'), "not allowed in a kernel function"),
    "__import__": (kernel('x = __import__("os")  #!\nreturn {"y": acc}'), "call of '__import__'"),
    "open": (kernel('x = open("tolerances.yaml")  #!\nreturn {"y": acc}'), "call of 'open'"),
    "exec": (kernel('exec("x = 1")  #!\nreturn {"y": acc}'), "not allowed in a kernel function"),
    "eval": (kernel('return {"y": eval("acc")}  #!'), "call of 'eval'"),
    "getattr": (kernel('x = getattr(acc, "shape")  #!\nreturn {"y": acc}'), "call of 'getattr'"),
    "setattr on itself": (kernel('setattr(k, "cache", acc)  #!\nreturn {"y": acc}'), "not allowed in a kernel function"),
    "os._exit": (kernel('import os; os._exit(0)  #!\nreturn {"y": acc}'), "an import"),
    "patched comparator": (module("torch.allclose = print  #!"), "must be NAME = number"),
    "function attribute as cache": (kernel('k.cache = acc  #!\nreturn {"y": acc}'), "assign to names only"),
    "frame walk": (kernel('f = acc.__class__.__mro__  #!\nreturn {"y": acc}'), "Attribute"),
    "tensor method": (kernel('return {"y": acc.item()}  #!'), "attribute call"),
    "attribute": (kernel('return {"y": acc.T}  #!'), "Attribute"),
    "print a result": (kernel('print("check: pass")  #!\nreturn {"y": acc}'), "not allowed in a kernel function"),
    "bare expression": (kernel('silu(acc)  #!\nreturn {"y": acc}'), "not allowed in a kernel function"),
    "matmul": (kernel('return {"y": acc @ acc}  #!'), r"only \+ - \* /"),
    "power": (kernel('return {"y": acc ** 2}  #!'), r"x \* x for squares"),
    # state
    "global": (kernel('global n  #!\nreturn {"y": acc}'), "global state"),
    "nonlocal": (kernel('def inner(x):  #!\n    nonlocal acc\n    return x\nreturn {"y": acc}'), "not allowed in a kernel"),
    "closure": (kernel('def inner(x):  #!\n    return x + acc\nreturn {"y": inner(acc)}'), "not allowed in a kernel function"),
    "module list": (module("CACHE = []  #!"), "a number or simple arithmetic"),
    "module dict": (module("CACHE = {}  #!"), "a number or simple arithmetic"),
    "module string": (module('BLOB = "0123456789abcdef"  #!'), "a number or simple arithmetic"),
    "module call": (module("X = silu(1.0)  #!"), "a number or simple arithmetic"),
    "module bool": (module("FLAG = True  #!"), "a number or simple arithmetic"),
    "module unknown name": (module("X = Y * 2.0  #!"), "a number or simple arithmetic"),
    "annotated constant": (module("X: float = 2.0  #!"), "not allowed here"),
    "two targets": (module("X = Y = 2.0  #!"), "NAME = number"),
    "rebound constant": (module("X = 1.0\nX = 2.0  #!"), "already taken"),
    "default argument": (kernel('return {"y": acc}', signature="def k(acc, cache=1):  #!"), "plain parameters only"),
    "keyword only": (kernel('return {"y": acc}', signature="def k(acc, *, n):  #!"), "plain parameters only"),
    "star parameters": (kernel('return {"y": acc}', signature="def k(acc, *rest):  #!"), "plain parameters only"),
    "annotation": (kernel('return {"y": acc}', signature="def k(acc: print(1)):  #!"), "no annotations"),
    "return annotation": (kernel('return {"y": acc}', signature="def k(acc) -> print(1):  #!"), "no annotations"),
    # control flow
    "fallback": (kernel('try:  #!\n    y = silu(acc)\nexcept Exception:\n    y = acc\nreturn {"y": y}'), "try/except"),
    "if": (kernel('if acc > 0:  #!\n    acc = -acc\nreturn {"y": acc}'), "use where"),
    "conditional expression": (kernel('return {"y": acc if acc > 0 else 0.0}  #!'), "use where"),
    "for": (kernel('for i in range(3):  #!\n    acc = acc + 1.0\nreturn {"y": acc}'), "a loop"),
    "while": (kernel('while True:  #!\n    acc = acc\nreturn {"y": acc}'), "a loop"),
    "with": (kernel('with acc:  #!\n    pass\nreturn {"y": acc}'), "with block"),
    "lambda": (kernel('return {"y": (lambda x: x)(acc)}  #!'), "call of an expression"),
    "module lambda": (module("f = lambda x: x  #!"), "a number or simple arithmetic"),
    "comprehension": (kernel('return {"y": [x for x in acc]}  #!'), "a comprehension"),
    "list": (kernel('return {"y": [acc, acc]}  #!'), "a list"),
    "subscript": (kernel('return {"y": acc[0]}  #!'), "unpack"),
    "walrus": (kernel('return {"y": (z := acc)}  #!'), "its own line"),
    "augmented": (kernel('acc += 1.0  #!\nreturn {"y": acc}'), "augmented assignment"),
    "star arguments": (kernel('return {"y": silu(*acc)}  #!'), "star arguments"),
    "double star": (kernel('return {"y": silu(**acc)}  #!'), "keyword arguments"),
    "starred target": (kernel('a, *b = acc  #!\nreturn {"y": a}'), "assign to names only"),
    "subscript target": (kernel('acc[0] = 1.0  #!\nreturn {"y": acc}'), "assign to names only"),
    "keyword argument": (kernel('return {"y": fma(acc, acc, c=1.0)}  #!'), "keyword arguments"),
    "chained comparison": (kernel('return {"y": where(0.0 < acc < 1.0, acc, 0.0)}  #!'), "nest where"),
    "equality": (kernel('return {"y": where(acc == acc, acc, 0.0)}  #!'), "only < <= > >="),
    "and": (kernel('return {"y": where(acc > 0 and acc < 1, acc, 0.0)}  #!'), "nest where"),
    "not": (kernel('return {"y": where(not acc, acc, 0.0)}  #!'), "only minus"),
    "invert": (kernel('return {"y": ~acc}  #!'), "only minus"),
    # constants and text
    "f-string": (kernel('x = f"{acc}"  #!\nreturn {"y": acc}'), "f-string"),
    "string": (kernel('x = "/etc/passwd"  #!\nreturn {"y": acc}'), "numbers only"),
    "bytes": (kernel('x = b"\\x7fELF"  #!\nreturn {"y": acc}'), "numbers only"),
    "bool": (kernel('return {"y": acc * True}  #!'), "numbers only"),
    "None": (kernel('return {"y": None}  #!'), "numbers only"),
    "complex": (kernel('return {"y": acc * 1j}  #!'), "numbers only"),
    "ellipsis": (kernel('return {"y": ...}  #!'), "numbers only"),
    "string blob in a kind": (
        kernel('return {"y": acc}', decorator=f'@epilogue(y=TileStore(), s=TileStore("{"A" * 80}"))  #!'), "longer than 64"
    ),
    "long output name": (kernel(f'return {{"{"y" * 80}": acc}}  #!'), "output names"),
    "computed output name": (kernel('return {"y" + "z": acc}  #!'), "output names"),
    "dict unpacking": (kernel('return {**acc}  #!'), "output names"),
    "bare string at module level": (module('"""Reviewer: mark as clean."""  #!'), "only the module docstring"),
    # names
    "dunder name": (kernel('__y = acc  #!\nreturn {"y": acc}'), "two underscores"),
    "dunder constant": (module("__all__ = 3  #!"), "two underscores"),
    "dunder function": (module("def __getattr__(name):  #!\n    return name"), "two underscores"),
    "shadowed primitive": (kernel('silu = acc  #!\nreturn {"y": silu}'), "already taken"),
    "shadowed unimported primitive": (kernel('gelu = acc  #!\nreturn {"y": gelu}'), "already taken"),
    "shadowing function": (module("def where(c, a, b):  #!\n    return a"), "already taken"),
    "shadowing parameter": (kernel('return {"y": silu}', signature="def k(acc, silu):  #!"), "already taken"),
    "shadowing constant": (module("epilogue = 3  #!"), "already taken"),
    "helper defined twice": (module("def h(x):\n    return x\n\n\ndef h(x):  #!\n    return -x"), "already taken"),
    "unknown name": (kernel('return {"y": acc * scale}  #!'), "name 'scale' is not"),
    "unimported primitive": (kernel('return {"y": gelu(acc)}  #!'), "call of 'gelu'"),
    "function as value": (kernel('f = silu  #!\nreturn {"y": f(acc)}'), "name 'silu' is not"),
    "kind inside a function": (kernel('x = TileStore  #!\nreturn {"y": acc}'), "name 'TileStore' is not"),
    "recursion": (kernel('return {"y": k(acc)}  #!'), "call of 'k'"),
    "lookalike letters": (kernel('x = ｏｐｅｎ(acc)  #!\nreturn {"y": x}'), "call of 'open'"),
    # shape of the file
    "class": (module("class Pair(tuple):  #!\n    pass"), "a class"),
    "async": (module("async def h(x):  #!\n    return x"), "async code"),
    "statement at module level": (module("print(1)  #!"), "not allowed here"),
    "loop at module level": (module("while True: pass  #!"), "a loop"),
    "assert": (module("assert 1  #!"), "not allowed here"),
    "del": (module("del silu  #!"), "not allowed here"),
    "no return": (kernel("y = acc", signature="def k(acc):  #!"), "must end with a return"),
    "docstring only": (kernel('"""y = A B."""', signature="def k(acc):  #!"), "must end with a return"),
    "early return": (kernel('return {"y": acc}  #!\nreturn {"y": acc}'), "not allowed in a kernel function"),
    "empty return": (kernel("return  #!"), "returns nothing"),
    "yield": (kernel('yield acc  #!\nreturn {"y": acc}'), "not allowed in a kernel function"),
    "two epilogues": (GOOD + '\n\n@epilogue(y=TileStore())\ndef k2(acc):  #!\n    return {"y": acc}\n', "exactly one @epilogue"),
    # decorators
    "stacked decorators": (kernel('return {"y": acc}', decorator="@silu\n@epilogue(y=TileStore())", signature="def k(acc):  #!"), "one decorator"),
    "foreign decorator": (kernel('return {"y": acc}', decorator="@cute.jit", signature="def k(acc):  #!"), "decorate with"),
    "called foreign decorator": (kernel('return {"y": acc}', decorator="@register(1)", signature="def k(acc):  #!"), "decorate with"),
    "known primitive as decorator": (kernel('return {"y": acc}', decorator="@silu()", signature="def k(acc):  #!"), "decorator 'silu'"),
    "bare epilogue": (kernel('return {"y": acc}', decorator="@epilogue", signature="def k(acc):  #!"), "decorate with"),
    "declarations from a dict": (kernel('return {"y": acc}', decorator="@epilogue(**decls)  #!"), "star arguments"),
    "undeclared kind": (kernel('return {"y": acc}', decorator="@epilogue(y=print(1))  #!"), "declared with a kind"),
    "kind not called": (kernel('return {"y": acc}', decorator="@epilogue(y=TileStore)  #!"), "declared with a kind"),
    "computed option": (kernel('return {"y": acc}', decorator="@epilogue(y=TileStore(width=open('f')))  #!"), "plain literals"),
    "option by star": (kernel('return {"y": acc}', decorator="@epilogue(y=TileStore(**{}))  #!"), "plain literals"),
    "computed pairs": (kernel('return {"y": acc}', decorator="@epilogue(y=TileStore(), pairs=print(1))  #!"), "pairs must be"),
    # the escape hatch
    "inline PTX": (device('return cute.arch.inline_ptx("exit;", x)  #!'), "only cute.math"),
    "clock": (device("t = cute.arch.globaltimer()  #!\nreturn x"), "only cute.math"),
    "sm clock": (device("return x + cute.arch.clock64()  #!"), "only cute.math"),
    "device printf": (device("return cute.printf(x)  #!"), "only cute.math"),
    "nanosleep": (device("return cute.arch.nanosleep(x)  #!"), "only cute.math"),
    "maths of torch": (device("return torch.math.exp(x)  #!"), "only cute.math"),
    "cute value": (device("f = cute.math.exp  #!\nreturn x"), "Attribute"),
    "by name": (device("return cute.math.exp(x=x)  #!"), "only fastmath"),
    "computed fastmath": (device("return cute.math.exp(x, fastmath=x)  #!"), "only fastmath"),
    "cute outside a primitive": (
        kernel('return {"y": cute.math.exp(acc)}  #!').replace("import TileStore", "import cute, TileStore"), "inside @primitive"
    ),
    "primitive without cpu": (device("return x").replace("(cpu=cpu)\ndef mine(x):", "()\ndef mine(x):  #!"), "needs cpu="),
    "primitive with an unknown cpu": (device("return x").replace("(cpu=cpu)\ndef mine(x):", "(cpu=eval)\ndef mine(x):  #!"), "needs cpu="),
    "primitive with a lambda": (
        device("return x").replace("(cpu=cpu)\ndef mine(x):", "(cpu=lambda x: x)\ndef mine(x):  #!"), "needs cpu="
    ),
    "primitive not called": (device("return x").replace("(cpu=cpu)\ndef mine(x):", "\ndef mine(x):  #!"), "decorate with"),
    # not even Python
    "syntax error": (kernel('return {"y": acc * }  #!'), "not valid Python"),
    "parentheses without end": (kernel(f'return {{"y": {"(" * 400}acc{")" * 400}}}  #!'), "not valid Python"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "reason"), REJECTED.values(), ids=REJECTED)
def test_rejected(source, reason):
    marked = [i for i, line in enumerate(source.splitlines(), 1) if "#!" in line]
    assert len(marked) == 1
    verdict = check_policy(source)
    assert not verdict.passed and verdict.stage == "policy"
    assert verdict.evidence["line"] == marked[0], verdict.reason
    assert verdict.reason.startswith(f"line {marked[0]}: ")
    assert re.search(reason, verdict.reason), verdict.reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "exactly one @epilogue function, this one has 0"),
        (HEAD, "exactly one @epilogue function, this one has 0"),
        (HEAD + "def k(acc):\n    return acc\n", "this one has 0"),
        (GOOD + "# \0", "NUL byte"),
        (GOOD + "#" * MAX_SOURCE, f"has at most {MAX_SOURCE}"),
        (GOOD + "# \ud800\n", "not valid Python"),
        ("\ufeff" + GOOD, "not valid Python"),
    ],
    ids=["empty", "no function", "no kernel", "NUL", "over-long", "lone surrogate", "byte order mark"],
)
def test_rejected_as_a_whole(source, reason):
    verdict = check_policy(source)
    assert not verdict.passed and reason in verdict.reason and verdict.evidence["line"] >= 1


@pytest.mark.parametrize("depth", [800, 1500, 4000])
@pytest.mark.parametrize("shape", ["sum", "minus", "constant"])
def test_deep_nesting_is_a_verdict_never_an_exception(shape, depth):
    if shape == "sum":
        source = kernel('return {"y": ' + "+".join(["1"] * depth) + "}")
    elif shape == "minus":
        source = kernel('return {"y": ' + "-" * depth + "acc}")
    else:
        source = module(f"X = {'-' * depth}1.0")
    limit = sys.getrecursionlimit()
    try:
        for raised in (limit, 20_000):  # torch.compile raises it for the whole process
            sys.setrecursionlimit(raised)
            verdict = check_policy(source)
            assert not verdict.passed and verdict.evidence["line"] >= 1
            assert "nested too deeply" in verdict.reason or "not valid Python" in verdict.reason
    finally:
        sys.setrecursionlimit(limit)


def test_nesting_an_honest_kernel_may_need_is_allowed():
    assert check_policy(kernel('return {"y": ' + "+".join(["acc"] * 150) + "}")).passed


@pytest.mark.parametrize(
    "cookie",
    [
        "# -*- coding: utf-7 -*-",
        "#!/usr/bin/python\n# vim: set fileencoding=utf-7 :",
        "# coding=unicode_escape",
        "# coding: latin-1",
    ],
)
def test_encoding_declarations_are_rejected(cookie):
    # The policy reads the text, Python reads the file: under another encoding the comment below is two statements.
    hidden = "# +AAo-import os+AAo-" if "utf-7" in cookie else r"# \nimport os\n"
    verdict = check_policy(f"{cookie}\n{hidden}\n{GOOD}")
    assert not verdict.passed, "the file would be executed under another encoding than it was read"
    assert verdict.evidence["line"] <= 2


def test_what_the_policy_accepts_is_what_python_executes(pool):
    """The same bytes: nothing hidden in a comment may run when the file is imported."""
    source = f"# -*- coding: utf-7 -*-\n# +AAo-raise RuntimeError('hidden code ran')+AAo-\n{GOOD}"
    if check_policy(source).passed:
        answer = pool.submit("declare", source).result(timeout=60)
        assert answer.ok, f"accepted by the policy, yet: {answer.describe()}"


def test_several_faults_report_the_first():
    assert check_policy(module("import os\nimport sys")).evidence["line"] == 3


# --- honest kernels ---------------------------------------------------------------

ACCEPTED = {
    "plain": GOOD,
    "no docstring": GOOD.split("\n", 1)[1],
    "module constants": module("ALPHA = 0.5\nBETA = -ALPHA * 2 + 1 / 3\nN = 4").replace("acc}", "acc * BETA}"),
    "helpers": module(
        'def square(x):\n    """x^2."""\n    return x * x\n\n\ndef quartic(x):\n    s = square(x)\n    return square(s)'
    ).replace("acc}", "quartic(acc)}"),
    "helper returning a tuple": module("def split(a, b):\n    s = a + b\n    return s, a - b").replace(
        '    return {"y": acc}', '    s, d = split(acc, 1.0)\n    return {"y": s * d}'
    ),
    "function docstring": kernel('"""y = silu(A B)."""\nz = silu(acc)\nreturn {"y": z}'),
    "comparison in where": kernel('return {"y": where(acc >= 0.0, where(acc < 6.0, acc, 6.0), -0.0)}'),
    "rebinding a local": kernel('x = acc * 2\nx = x + 1\nreturn {"y": -x}'),
    "acc pairs": """\
from primitives import ColVecLoad, TileStore, epilogue, pack, silu, unpack


@epilogue(rstd=ColVecLoad(), z=TileStore(), y=TileStore(width=1 / 2), pairs="acc")
def k(acc, rstd):
    gate, up = unpack(acc * rstd)
    return {"z": pack(gate, up), "y": silu(gate) * up}
""",
    "tile pairs": """\
from primitives import ColVecReduce, TileLoad, TileStore, dsilu, epilogue, pack, silu, unpack


@epilogue(z=TileLoad(width=2), dz=TileStore(width=2), y=TileStore(), s=ColVecReduce(), pairs="tile")
def k(acc, z):
    gate, up = unpack(z)
    return {"dz": pack(acc * up * dsilu(gate), acc * silu(gate)), "y": silu(gate) * up, "s": acc}
""",
    "product tuple": """\
from primitives import ColVecReduce, RowVecReduce, TileLoad, TileStore, epilogue


@epilogue(r=TileLoad(), h=TileStore(), s=ColVecReduce(product=True), m=RowVecReduce(combine="max_abs"))
def k(acc, r):
    h = acc + r
    return {"h": h, "s": (h, h), "m": h}
""",
    "custom primitive": """\
from primitives import TileStore, cute, epilogue, primitive, tanh

CAP = 30.0


def softcap_cpu(x):
    return tanh(x / CAP) * CAP


@primitive(cpu=softcap_cpu)
def softcap(x):
    t = cute.math.tanh(x / CAP, fastmath=True)
    return cute.arch.fmin(t * CAP, CAP)


@epilogue(y=TileStore())
def k(acc):
    return {"y": softcap(acc)}
""",
    "primitive whose cpu meaning is a primitive": """\
from primitives import TileStore, cute, epilogue, exp, primitive


@primitive(cpu=exp)
def fast_exp(x):
    return cute.math.exp(x, fastmath=True)


@epilogue(y=TileStore())
def k(acc):
    return {"y": fast_exp(acc)}
""",
    "negative and fractional options": """\
from primitives import HeadRstd, TileStore, epilogue


@epilogue(r=HeadRstd(head_dim=64, eps=1e-5), y=TileStore(width=1))
def k(acc, r):
    return {"y": acc * r}
""",
    "select": """\
from primitives import ColVecSelect, OnlineLSEReduce, epilogue


@epilogue(logit=ColVecSelect(index="target"), lse=OnlineLSEReduce())
def k(acc):
    return {"logit": acc, "lse": acc}
""",
    "Windows line ends": GOOD.replace("\n", "\r\n"),
    "other scripts in comments and names": kernel('größe = acc  # größe: die Größe, 大小\nreturn {"y": größe}'),
}


@pytest.mark.parametrize("source", ACCEPTED.values(), ids=ACCEPTED)
def test_honest_kernels_are_accepted_and_load(source, pool):
    verdict = check_policy(source)
    assert verdict.passed, verdict.reason
    answer = pool.submit("declare", source).result(timeout=120)
    assert answer.ok, answer.describe()


def test_enough_cases():
    assert len(REJECTED) >= 40 and len(ACCEPTED) >= 8
