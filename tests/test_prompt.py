"""Prompts: complete, within their size, byte-stable, and never giving the answer away."""

import json
import re

import pytest

from agent.budget import CHARS_PER_TOKEN
from agent.composer import compose
from agent.pages import pages
from agent.prompt import examples, nearest, render, same_mathematics
from agent.tips import read_tips
from primitives import KINDS, MATHS, VOCABULARY
from reference_kernels.tasks import load_suite
from verifier.policy import check_policy

SUITE = load_suite()
TASKS = sorted(SUITE.tasks)


def prompt(name, **options):
    return render(SUITE[name], SUITE, **options)


def test_static_part_is_small_and_the_same_for_every_task():
    statics = {prompt(name, tools=tools).static for name in TASKS for tools in (False, True)}
    assert len(statics) == 1
    assert len(statics.pop()) / CHARS_PER_TOKEN < 20_000


@pytest.mark.parametrize("name", TASKS)
def test_whole_prompt_leaves_room_for_the_work(name):
    made = prompt(name, tools=True, attempts=6)
    assert len(made.text) / CHARS_PER_TOKEN < 12_000  # three calls and their answers stay under 60,000


def test_every_name_of_the_vocabulary_is_explained():
    static = prompt("gemm_rmsnorm").static
    words = set(re.findall(r"\w+", static))
    assert set(KINDS) <= words and VOCABULARY <= words
    assert [m for m in MATHS if m not in words and f"d{m[1:]}" not in words] == []


@pytest.mark.parametrize("name", TASKS)
def test_the_task_is_told_completely(name):
    task, made = SUITE[name], prompt(name)
    for line in task.math.splitlines():
        assert line.rstrip() in made.task
    for tensor, spec in task.tensors.items():
        assert f"`{tensor}`" in made.task
        if spec.dtype != "int32":
            assert re.search(rf"`{tensor}={spec.kind}\(.*\)`", made.task)
    assert name in made.task and all(str(op) in made.task for op in task.ops)


@pytest.mark.parametrize("name", TASKS)
def test_the_answer_is_not_in_the_prompt(name):
    task, made = SUITE[name], prompt(name)
    assert len(made.examples) == 3
    body = compose(task).split("def ")[1].split("\n", 1)[1]
    for other in made.examples:
        assert not same_mathematics(task, SUITE[other])
        assert compose(SUITE[other]).split("def ")[1].split("\n", 1)[1] != body
    assert f"def {name}(" not in made.text


@pytest.mark.parametrize(("name", "variant"), [("gemm_swiglu", "gemm_swiglu_lean"), ("gemm_rope", "gemm_rope_lean"),
                                               ("gemm_residual_rmsnorm_bwd_lean", "gemm_residual_rmsnorm_bwd")])  # fmt: skip
def test_lean_and_full_variants_are_kept_apart(name, variant):
    assert variant not in [t.name for t in nearest(SUITE[name], SUITE)]


def test_examples_are_the_nearest_and_valid():
    shown = examples(SUITE["gemm_rmsnorm_swiglu"], SUITE)
    assert {t.name for t, _ in shown} >= {"gemm_rmsnorm"}
    assert all(check_policy(source).passed for _, source in shown)


def test_declarations_in_the_table_are_those_the_check_wants():
    text = prompt("gemm_swiglu_bwd").task
    assert "`z=TileLoad(width=2)`" in text and "`dz=TileStore(width=2)`" in text and "`zdz=ColVecReduce()`" in text
    text = prompt("gemm_cross_entropy").task
    assert '`logit=ColVecSelect(index="target")`' in text and "not declared, not a parameter" in text


def test_only_active_tips_are_told():
    states = {t.id: t for t in read_tips()}
    made = prompt("gemm_rope")
    assert set(made.tips) == {i for i, t in states.items() if t.state == "active"}
    one = [t for t in states.values() if t.state == "active"][:1]
    few = prompt("gemm_rope", tips=one)
    assert few.tips == (one[0].id,) and few.static != made.static and one[0].claim in few.static


def test_hash_is_of_the_text_and_changes_with_it():
    import hashlib

    made = prompt("gemm_rope")
    assert made.sha256 == hashlib.sha256(made.text.encode()).hexdigest() == prompt("gemm_rope").sha256
    assert made.sha256 != prompt("gemm_rope", tools=True).sha256 != prompt("gemm_rope", tools=True, attempts=2).sha256


def test_undefined_names_in_templates_are_errors():
    import jinja2

    from agent.prompt import _templates

    with pytest.raises(jinja2.UndefinedError):
        _templates().get_template("task.md.j2").render(task=SUITE["gemm_rope"])


def test_pages_carry_no_notes_for_tests():
    from agent.pages import page

    assert all("expects:" not in page(n) for names in pages().values() for n in names)


def test_diff_against_a_run(tmp_path, capsys, monkeypatch):
    import sys

    from agent.cli import main
    from agent.run import Run

    run = Run.start(tmp_path, tasks=["gemm_rope"], author="claude", attempts=6)
    old = prompt("gemm_rope", tools=True, attempts=6, tips=read_tips()[:3])
    run.keep_prompt(old)
    run.log("prompt", task="gemm_rope", sample=1, sha256=old.sha256, tips=old.tips, examples=old.examples)
    run.close()
    monkeypatch.setattr(
        sys, "argv", ["coda-agent", "prompt", "gemm_rope", "--diff", "last", "--runs", str(tmp_path), "--json"]
    )
    with pytest.raises(SystemExit):
        main()
    told = json.loads(capsys.readouterr().out)
    assert told["before"] == old.sha256 and any(line.startswith("+* ") for line in told["diff"])
