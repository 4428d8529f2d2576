"""The author documentation: complete, and every example runs and computes what it says."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

import primitives
from primitives import declare
from primitives.interpret import interpret
from primitives.shapes import shape_of
from reference_kernels.tasks import load_suite
from reference_kernels.truth import reference_of

DOCS = Path(primitives.__file__).parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FAMILIES = {"elementwise", "vector", "tile", "reduce", "stateful", "structure"}
M, N, K, TILE = 40, 96, 32, (32, 64)  # the last tile is ragged in both directions
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXPECTS = re.compile(r"^<!-- expects: (\{.*?\}) -->$", re.DOTALL | re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)


def front_matter(page: Path) -> dict:
    return yaml.safe_load(page.read_text().split("---\n")[1])


def example(page: Path) -> str:
    (source,) = PYTHON.findall(page.read_text())
    return source


def load_program(page: Path, folder: Path) -> declare.Program:
    file = folder / f"example_{page.stem}.py"
    file.write_text(example(page))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (program,) = [v for v in vars(module).values() if isinstance(v, declare.Program)]
    return program


def inputs_for(program: declare.Program) -> tuple[torch.Tensor, torch.Tensor, dict]:
    gen = torch.Generator().manual_seed(7)
    a = torch.randn(M, K, generator=gen).bfloat16()
    b = (torch.randn(K, N, generator=gen) / K**0.5).bfloat16()
    operands: dict = {}
    for name, kind in program.operands.items():
        if isinstance(kind, declare.HeadRstd):
            continue  # computed by the kernel
        if isinstance(kind, declare.Scalar):
            operands[name] = 0.75
            continue
        values = torch.randn(shape_of(kind, M, N), generator=gen)
        operands[name] = values.bfloat16() if isinstance(kind, declare.TileLoad) else values
    for name in program.index_operands:
        operands[name] = torch.randint(0, N, (M,), generator=gen, dtype=torch.int32)
    return a, b, operands


def run(program: declare.Program, a: torch.Tensor, b: torch.Tensor, operands: dict) -> dict:
    dtypes = {
        name: torch.bfloat16 if isinstance(kind, declare.TileStore) else torch.float32
        for name, kind in program.outputs.items()
    }
    return interpret(program, a, b, operands, dtypes, tile=TILE)


def in_fp64(a: torch.Tensor, b: torch.Tensor, operands: dict) -> dict:
    """``acc`` and the operands, floating tensors raised to fp64."""
    up = {n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in operands.items()}
    return {"acc": a.double() @ b.double(), **up}


def grad(f, x: torch.Tensor) -> torch.Tensor:
    """Derivative of the elementwise ``f`` at ``x``."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x).sum(), x)
    return g


def close(got: torch.Tensor, want: torch.Tensor, rtol: float) -> bool:
    if got.shape != want.shape:
        return False
    return bool((got.double() - want).abs().max() <= rtol * want.abs().max())


def test_every_name_has_exactly_one_page():
    named = [name for page in PAGES for name in front_matter(page)["names"]]
    assert sorted(named) == sorted(primitives.VOCABULARY)


@each_page
def test_front_matter(page):
    meta = front_matter(page)
    assert set(meta) == {"names", "family"} and meta["family"] in FAMILIES
    for name in meta["names"]:
        if name in primitives.KINDS:
            assert meta["family"] == getattr(primitives, name).family
        elif name in primitives.MATHS:
            assert meta["family"] == "elementwise"
        else:
            assert meta["family"] == "structure"
    assert page.stem in meta["names"] or page.stem == "pairs"


@each_page
def test_page_ends_with_its_example(page):
    text = page.read_text()
    assert text.count("```python") == 1 and len(EXPECTS.findall(text)) == 1
    after = EXPECTS.sub("", text.split(example(page) + "```")[1])
    assert not after.strip(), "nothing may follow the example and its expectation"
    for name in front_matter(page)["names"]:
        assert re.search(rf"\b{name}\b", text.split("---\n", 2)[2])


@each_page
def test_example_is_an_admissible_kernel(page):
    policy = pytest.importorskip("verifier.policy")
    verdict = policy.check_policy(example(page))
    assert verdict.passed, verdict.reason


@each_page
def test_example_computes_what_the_page_says(page, tmp_path):
    program = load_program(page, tmp_path)
    a, b, operands = inputs_for(program)
    got = run(program, a, b, operands)
    expects = json.loads(EXPECTS.search(page.read_text()).group(1))
    assert set(expects) == set(program.outputs)
    scope = {"torch": torch, "F": F, "grad": grad, **in_fp64(a, b, operands)}
    for name, kind in program.outputs.items():
        rtol = 1e-2 if isinstance(kind, declare.TileStore) else 1e-3
        assert close(got[name], eval(expects[name], scope), rtol), name


@each_page
def test_example_answers_no_task(page, tmp_path):
    """Few-shot examples never hold a task's own answer, not even under other names."""
    program = load_program(page, tmp_path)
    a, b, operands = inputs_for(program)
    got = run(program, a, b, operands)
    mine = in_fp64(a, b, operands)
    acc = mine.pop("acc")
    kinds_in = {n: signature(program.operands.get(n)) for n in mine}
    kinds_out = {n: signature(k) for n, k in program.outputs.items()}
    suite = load_suite()
    for task in suite.tasks.values():
        index = {spec.index for spec in task.outputs.values() if spec.index}
        want_in = {n: signature(None if n in index else s.declared) for n, s in task.operands.items()}
        want_out = {n: signature(s.declared) for n, s in task.outputs.items()}
        reference = reference_of(task, suite.path)
        for names in renamings(kinds_in, want_in):
            truth = reference(acc, **{theirs: mine[ours] for theirs, ours in names.items()})
            for outputs in renamings(kinds_out, want_out):
                same = all(close(got[ours], truth[theirs], 1e-2) for theirs, ours in outputs.items())
                assert not same, f"the example of {page.name} is task {task.name}"


def signature(kind: declare.Kind | None) -> tuple:
    """Kind and width: what two tensors must share to stand for each other (None: an index)."""
    return (kind and kind.label, getattr(kind, "width", None), getattr(kind, "combine", None))


def renamings(ours: dict[str, tuple], theirs: dict[str, tuple]):
    """Every way to give our tensors the other side's names, kinds respected."""
    if sorted(map(repr, ours.values())) != sorted(map(repr, theirs.values())):
        return
    for order in itertools.permutations(ours):
        if all(ours[o] == kind for o, kind in zip(order, theirs.values())):
            yield dict(zip(theirs, order))
