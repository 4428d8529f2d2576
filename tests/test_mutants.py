"""The tests of every task must notice every mistake; the mutation engine must be able to say when they do not."""

import ast
import json

import pytest
import torch
import yaml
from typer.testing import CliRunner

from agent.cli import app
from agent.composer import compose
from reference_kernels.tasks import load_suite
from verifier.execution_mutants import Execution, execution_mutants
from verifier.interpretation import cases
from verifier.mutants import source_mutants
from verifier.mutation import EQUIVALENTS, load_equivalents, load_program, mutate
from verifier.redteam.case import OWN_SUITE, load_cases
from verifier.verdict import HarnessError

SUITE, OWN = load_suite(), load_suite(OWN_SUITE)
CONTROLS = {c.task: c.text for c in load_cases("controls")}
TASK = SUITE["gemm_rmsnorm"]
KERNEL = """\
from primitives import ColVecLoad, ColVecReduce, TileLoad, TileStore, epilogue, silu


@epilogue(scale=ColVecLoad(), x=TileLoad(), y=TileStore(), dot=ColVecReduce(product=True))
def k(acc, scale, x):
    h = silu(acc * scale) - x
    return {"y": h, "dot": (h, acc)}
"""


def explain(tally):
    return f"survived: {[f.mutant for f in tally.survivors]}, wrongly equivalent: {[f.mutant for f in tally.not_equivalent]}, gone: {tally.stale}"


@pytest.mark.parametrize("name", SUITE.tasks)
def test_every_mutant_of_every_task_is_killed(name):
    tally = mutate(SUITE[name], compose(SUITE[name]), load_equivalents().get(name))
    assert tally.passed, explain(tally)
    families = {f.family for f in tally.counted}
    assert families == {"source", "execution"} and len(tally.counted) >= 40


@pytest.mark.parametrize("name", ["rt_row_stats", "rt_col_stats", "rt_head_norm"])
def test_kinds_that_no_listed_task_uses(name):
    tally = mutate(OWN[name], CONTROLS[name], load_equivalents().get(name), OWN_SUITE)
    assert tally.passed, explain(tally)


def test_equivalents_name_known_tasks_and_say_why():
    listed = load_equivalents()
    assert set(listed) <= {*SUITE.tasks, *OWN.tasks}
    raw = yaml.safe_load(EQUIVALENTS.read_text())["equivalents"]
    assert sum(map(len, raw.values())) == sum(map(len, listed.values()))  # none is listed twice


# --- the engine can fail ---------------------------------------------------------------------


def test_weak_tests_are_told():
    """Tolerances that let anything pass let mutants live."""
    weak = TASK.model_copy(update={"max_ratio": 1e9, "mean_ratio": 1e9})
    tally = mutate(weak, compose(TASK))
    assert not tally.passed and tally.rate < 1.0
    assert "accumulation: 16-bit sums every 64 of K" in [f.mutant for f in tally.survivors]


def test_a_killed_mutant_cannot_be_listed_as_equivalent():
    tally = mutate(TASK, compose(TASK), {"drop-factor: y = acc * rstd => y = acc": "it is not, and this must show"})
    assert [f.mutant for f in tally.not_equivalent] == ["drop-factor: y = acc * rstd => y = acc"]
    assert tally.rate == 1.0 and not tally.passed


def test_a_listed_mutant_that_is_gone_is_told():
    tally = mutate(TASK, compose(TASK), {"drop-factor: y = what * nobody => y = wrote": "no such mutant exists"})
    assert tally.stale == ["drop-factor: y = what * nobody => y = wrote"] and not tally.passed


def test_a_wrong_kernel_cannot_be_mutated():
    with pytest.raises(HarnessError, match="fails itself"):
        mutate(TASK, compose(TASK).replace("acc * rstd", "acc + rstd"))


def test_an_equivalent_without_a_reason_is_refused(tmp_path):
    path = tmp_path / "equivalents.yaml"
    path.write_text("equivalents:\n  gemm_rope:\n    - {mutant: 'store: d', reason: ok}\n")
    with pytest.raises(HarnessError, match="say why"):
        load_equivalents(path)


# --- source mutants ----------------------------------------------------------------------------


def test_source_mutants_are_different_programs():
    mutants = source_mutants(KERNEL)
    texts = [m.source for m in mutants]
    assert len(set(texts)) == len(texts) and ast.unparse(ast.parse(KERNEL)) not in texts
    assert len({m.name for m in mutants}) == len(mutants)


@pytest.mark.parametrize(
    "line",
    [
        "h = silu(acc * scale)",  # a term dropped
        "h = silu(acc * scale) + x",  # its sign flipped
        "h = silu(acc) - x",  # a factor dropped
        "h = gelu(acc * scale) - x",  # another activation, and its import
        "h = acc * scale - x",  # no activation
        "h = silu(acc * scale) - acc",  # another value of the same shape
        "'dot': (h, h)",  # the product of other factors
        "'dot': (h, 1.0)",  # a factor forgotten
        "'y': h * 1.01",
        "x=TileLoad(), y=TileStore(), dot=RowVecReduce(product=True)",
        "scale=RowVecLoad()",
    ],
)
def test_typical_mistakes_are_among_them(line):
    assert [m for m in source_mutants(KERNEL) if line in m.source], line


def test_what_commutes_is_no_mutant():
    swapped = {ast.unparse(ast.parse(KERNEL.replace("acc * scale", "scale * acc"))),
               ast.unparse(ast.parse(KERNEL.replace("(h, acc)", "(acc, h)")))}  # fmt: skip
    assert not swapped & {m.source for m in source_mutants(KERNEL)}


def test_mutants_import_what_they_use():
    program = load_program(next(m.source for m in source_mutants(KERNEL) if "gelu_tanh(acc" in m.source))
    assert set(program.outputs) == {"y", "dot"}


# --- execution mutants -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gemm_residual_rmsnorm", "gemm_cross_entropy", "gemm_rmsnorm_rope_lean", "gemm_swiglu_bwd"]
)
def test_the_faithful_fold_is_the_interpreter(name):
    """The faults sit on a copy of the reduction; without a fault it must give what the interpreter gives."""
    task, program = SUITE[name], load_program(compose(SUITE[name]))
    for case in cases(task, "bf16", 0)[:6]:
        x = Execution(task, program, "bf16", case)
        honest = x.run()
        assert all(torch.equal(v, honest[n]) or honest[n].isnan().any() for n, v in x.run(product=x.product()).items())
        for output, kind in program.sinks.items():
            if kind.label != "ColVecSelect":
                torch.testing.assert_close(
                    x.fold(output, x.reduced_values(output)), honest[output], rtol=1e-6, atol=1e-6
                )


def test_every_fault_changes_something():
    """A fault that changes no output on any case would count as killed by nothing."""
    task = SUITE["gemm_rmsnorm_cross_entropy"]
    program = load_program(compose(task))
    inputs = cases(task, "bf16", 0)
    for mutant in execution_mutants(task, program):
        changed = False
        for case in inputs:
            x = Execution(task, program, "bf16", case)
            honest, faulty = x.run(), mutant.run(Execution(task, program, "bf16", case))
            assert faulty.keys() == honest.keys(), mutant.name
            changed |= any(not torch.equal(honest[n].nan_to_num(7.25), faulty[n].nan_to_num(7.25)) for n in honest)
        assert changed, mutant.name


# --- the verb --------------------------------------------------------------------------------------


def test_verb_prints_the_rate_and_exits_zero():
    result = CliRunner().invoke(app, ["mutate", "gemm_rmsnorm", "--json"])
    assert result.exit_code == 0, result.output
    (tally,) = json.loads(result.stdout)["tasks"]
    assert (
        tally["rate"] == 1.0 and tally["killed"] == tally["counted"] == len(tally["fates"]) - tally["by_construction"]
    )
    assert all(f["output"] == "y" and f["case"] for f in tally["fates"] if f["how"] == "numerics")


def test_verb_exits_one_when_mutants_live(tmp_path):
    body = TASK.model_dump(mode="json", exclude={"name", "paper"}, exclude_defaults=True)
    body |= {
        "ops": [str(o) for o in TASK.ops],
        "max_ratio": 1e9,
        "mean_ratio": 1e9,
        "reference": "r.py:gemm_rmsnorm",
        "b": "kn",
    }
    (tmp_path / "r.py").write_text("def gemm_rmsnorm(acc, rstd):\n    return {'y': acc * rstd[:, None]}\n")
    (tmp_path / "weak.yaml").write_text(yaml.safe_dump({"version": 1, "tasks": {"gemm_rmsnorm": body}}))
    result = CliRunner().invoke(app, ["mutate", "--all", "--tasks", str(tmp_path / "weak.yaml"), "--json"])
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["tasks"][0]["survivors"]


def test_verb_takes_a_kernel_file(tmp_path):
    path = tmp_path / "k.py"
    path.write_text(compose(TASK))
    result = CliRunner().invoke(app, ["mutate", "gemm_rmsnorm", "--kernel", str(path), "--json"])
    assert result.exit_code == 0, result.output
