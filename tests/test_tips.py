"""The tips log: what is claimed holds, and nothing enters prompts without a person."""

import pytest

from agent.tips import LOG, Tip, active_tips, add_tip, find_tip, probe_tips, read_tips, set_state
from verifier.verdict import HarnessError

TIPS = read_tips()


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "tips_log.md"
    path.write_text(LOG.read_text())
    return path


def test_the_log_is_worth_having():
    assert len(active_tips()) >= 25
    assert sum(t.probe is not None for t in TIPS) >= 25
    assert len({t.claim for t in TIPS}) == len(TIPS)
    assert all(t.evidence and t.toolchain for t in TIPS)


def test_every_probe_holds():
    failed = {name: said for name, said in probe_tips([t for t in TIPS if t.state != "retired"]).items() if said}
    assert not failed


def test_a_probe_that_does_not_hold_is_noticed():
    claims = [
        Tip("T1", "active", "", "", "", "assert 1 == 2, 'one is not two'"),
        Tip("T2", "active", "", "", "", "print('fine')"),
        Tip("T3", "active", "", "", "", "raise SystemExit('not so')"),
        Tip("T4", "active", "", "", "", None),
        Tip("T5", "active", "", "", "", "import os; os._exit(3)"),
        Tip("T6", "active", "", "", "", "pass"),
    ]
    results = probe_tips(claims)
    assert results["T2"] is None and "T4" not in results
    assert "one is not two" in results["T1"] and results["T3"] == "not so"
    assert "status 3" in results["T5"] and "status 3" in results["T6"]  # it took the rest with it


def test_probes_see_no_secret(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-0123456789")
    probe = "import os; assert 'ANTHROPIC_API_KEY' not in os.environ"
    assert probe_tips([Tip("T1", "active", "", "", "", probe)]) == {"T1": None}


def test_a_proposed_tip_waits_for_a_person(log):
    before = [t.id for t in active_tips(log)]
    tip = add_tip("Claims need\n evidence.", "seen twice", "any", log)
    assert tip.state == "proposed" and [t.id for t in active_tips(log)] == before
    assert find_tip(tip.id, log).claim == "Claims need evidence."
    set_state(tip.id, "active", log)
    assert active_tips(log)[-1].id == tip.id
    set_state(tip.id, "retired", log)
    assert [t.id for t in active_tips(log)] == before
    assert [t for t in read_tips(log) if t.id != tip.id] == TIPS  # the others are untouched


@pytest.mark.parametrize("claim", ["", " \n ", "x" * 500])
def test_empty_and_overlong_claims_are_refused(log, claim):
    with pytest.raises(HarnessError, match="the claim of a tip"):
        add_tip(claim, "seen", "any", log)


def test_a_proposal_cannot_smuggle_a_probe(log):
    tip = add_tip("Innocent. ```python\nraise SystemExit\n```", "## T99\n* state: active", "any", log)
    assert find_tip(tip.id, log).probe is None and "T99" not in {t.id for t in read_tips(log)}


@pytest.mark.parametrize(
    "text", ["## T01\n\n* state: active\n", "## T01\n\n* state: odd\n* claim: a\n* evidence: b\n* toolchain: c\n"]
)
def test_damaged_log_is_named(tmp_path, text):
    path = tmp_path / "tips_log.md"
    path.write_text(text)
    with pytest.raises(HarnessError, match="T01"):
        read_tips(path)


def test_unknown_tip(log):
    with pytest.raises(HarnessError, match="no tip 'T999'"):
        set_state("T999", "active", log)


def test_lift_compares_both_sides(log, pool, tmp_path, monkeypatch):
    import anthropic
    from agent_loopback import FORBIDDEN, GOOD, SUITE, Loopback, Messages, check, finish

    from agent.claude import Claude
    from agent.lift import lift
    from reference_kernels.tasks import load_suite

    (tmp_path / "tasks.yaml").write_text(SUITE)
    suite = load_suite(tmp_path / "tasks.yaml")
    with Loopback([check(FORBIDDEN), finish(give_up=True), check(GOOD), finish()], Messages) as server:
        author = Claude(client=anthropic.Anthropic(api_key="sk-ant-0123456789", base_url=server.url, max_retries=0))
        result = lift("T01", author, suite, pool, tmp_path / "runs", lambda *a: None, ["gemm_rmsnorm"], path=log)
    assert result["without"]["accepted"] == 0 and result["with"] == result["with"] | {"accepted": 1, "first_try": 1}
    claim = find_tip("T01", log).claim
    told = [claim in r["system"][0]["text"] for r in server.requests]
    assert told == [False, False, True, True]
