"""No known exploit is accepted, each is rejected for what it does, and no honest kernel is rejected."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from agent.cli import app
from agent.library_attacks import ATTACKS as LIBRARY_ATTACKS
from verifier.gpu import NoGpu
from verifier.policy import check_policy
from verifier.redteam.attacks import ATTACKS, Attack
from verifier.redteam.case import Case, load_cases, suites
from verifier.redteam.gpu import TAMPERS, read_cases, run_gpu, source_of
from verifier.redteam.runner import run, run_attack
from verifier.verdict import HarnessError

pytestmark = pytest.mark.timeout(900)  # the first test waits for every case, some of them compiles

CASES, GPU_CASES = load_cases(), load_cases("gpu")
ALL_ATTACKS = [*ATTACKS, *LIBRARY_ATTACKS]
EXPLOITS = [c for c in CASES if c.stage != "accepted"]
CONTROLS = [c for c in CASES if c.stage == "accepted"]


def has_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.fixture(scope="module")
def outcomes(pool):
    """Every case once; the longest, the honest controls, take most of the time."""
    return {o.name: o for o in run(pool, CASES, ALL_ATTACKS)}


@pytest.mark.parametrize("name", [c.name for c in EXPLOITS] + [a.name for a in ALL_ATTACKS])
def test_exploit_is_rejected_for_what_it_does(name, outcomes):
    outcome = outcomes[name]
    if outcome.skipped:
        pytest.skip(outcome.reason)
    assert outcome.ok, f"must be rejected by {outcome.expected}, was: {outcome.got}: {outcome.reason}"


@pytest.mark.parametrize("name", [c.name for c in CONTROLS])
def test_honest_control_passes(name, outcomes):
    assert outcomes[name].ok, f"{outcomes[name].got}: {outcomes[name].reason}"


@pytest.mark.gpu
@pytest.mark.skipif(not has_hopper(), reason="needs a Hopper GPU")
def test_wrong_device_code_is_rejected_on_the_gpu(pool):
    wrong = [f"{o.name}: {o.got}: {o.reason}" for o in run_gpu(pool) if not o.ok]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(has_hopper(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    result = CliRunner().invoke(app, ["redteam", "--gpu", "--compiled", "nowhere"])
    assert isinstance(result.exception, NoGpu) and "Hopper GPU" in str(result.exception)


def test_compiled_cases_of_other_sources_are_refused(tmp_path):
    with pytest.raises(HarnessError, match="compile-to"):
        read_cases(tmp_path, GPU_CASES)
    (tmp_path / "bundle.json").write_text('{"manifests": []}')
    with pytest.raises(HarnessError, match="other sources of gpu_honest_before"):
        read_cases(tmp_path, GPU_CASES)


# --- the red team can fail ---------------------------------------------------------------------


def one(pool, **fields):
    case = Case(
        **{"name": "probe", "codes": ["K24"], "what": "a probe", "stage": "policy", "reason": "an import", **fields}
    )
    (outcome,) = run(pool, [case], [])
    return outcome


def test_an_accepted_exploit_fails(pool):
    outcome = one(pool, how="worker", stage="worker", reason="anything", source=CONTROLS[2].text)
    assert outcome.got == "accepted" and not outcome.ok


def test_a_breach_is_an_accepted_exploit(pool):
    outcome = one(pool, how="worker", stage="worker", reason="BREACH", source="raise RuntimeError('BREACH')")
    assert outcome.got == "accepted" and not outcome.ok


def test_the_right_stage_for_another_reason_fails(pool):
    outcome = one(pool, module="class A:\n    pass\n")
    assert outcome.got == "policy" and not outcome.ok


def test_the_right_reason_at_another_stage_fails(pool):
    outcome = one(pool, module="import os\n", stage="interpret")
    assert outcome.got == "policy" and re.search("an import", outcome.reason) and not outcome.ok


def test_a_rejected_control_fails(pool):
    outcome = one(pool, stage="accepted", reason="", value="acc")
    assert outcome.got == "interpret" and not outcome.ok


def test_an_attack_that_nothing_stops_fails(pool):
    outcome = run_attack(Attack("probe", ["K04"], "a probe", "bundle", "refused", lambda pool: ""), pool)
    assert outcome.got == "accepted" and not outcome.ok


def test_an_exploit_must_say_why_it_is_rejected():
    with pytest.raises(ValueError, match="needs the reason"):
        Case(name="probe", codes=["K04"], what="a probe", stage="policy")


# --- the cases themselves ----------------------------------------------------------------------


def test_every_class_of_exploit_and_enough_controls():
    codes = {code for c in (*EXPLOITS, *ALL_ATTACKS, *GPU_CASES) for code in c.codes}
    assert all(re.fullmatch(r"[A-HKNT]\d\d", code) for code in codes), sorted(codes)
    assert {code[0] for code in codes} >= set("ABCDEFGHN")
    assert len(EXPLOITS) + len(ALL_ATTACKS) >= 100 and len(CONTROLS) >= 10


def test_names_are_unique():
    names = [c.name for c in (*CASES, *ALL_ATTACKS, *GPU_CASES)]
    assert len(set(names)) == len(names)


def test_controls_use_every_kind_that_kernels_may_declare():
    from primitives import KINDS

    text = "".join(c.text for c in CONTROLS)
    assert [k for k in KINDS if f"{k}(" not in text] == []


def test_gpu_cases_are_complete():
    listed, own = suites()
    assert all(c.how == "gpu" and c.task in {**listed.tasks, **own.tasks} for c in GPU_CASES)
    assert {c.tamper for c in GPU_CASES if c.tamper} == set(TAMPERS)
    assert len({source_of(c) for c in GPU_CASES}) == len(GPU_CASES)
    assert [c.name for c in GPU_CASES if c.stage == "accepted"] == [GPU_CASES[0].name, GPU_CASES[-1].name]


def test_what_the_gpu_would_hang_on_does_not_pass_the_policy():
    hostile = [c for c in GPU_CASES if "inline_asm" in c.text]
    assert len(hostile) >= 2 and not any(check_policy(source_of(c)).passed for c in hostile)


# --- the verb ------------------------------------------------------------------------------------


def test_verb_prints_what_was_asked_for():
    result = CliRunner().invoke(app, ["redteam", "linecache", "encoding_utf7", "manifest_renamed", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["passed"] and [c["name"] for c in found["cases"]] == ["linecache", "encoding_utf7", "manifest_renamed"]


def test_verb_says_when_nothing_matches():
    result = CliRunner().invoke(app, ["redteam", "no_such_case"])
    assert result.exit_code != 0 and "no_such_case" in str(result.exception)
