"""Runs of a model author: resume, budgets over a resume, parallel samples, stories, secrets. Real SDK, loopback server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent_loopback import FORBIDDEN, GOOD, SUITE, Loopback, Messages, Reply, check, finish

from agent.campaign import Settings, resume_run, start_run
from agent.conversation import Interrupted
from agent.redact import MASK
from agent.run import read_events
from agent.story import as_text, story
from generated.library import Library
from verifier.verdict import HarnessError

ROOT = Path(__file__).resolve().parent.parent
KEY = "sk-ant-very-secret-0123456789abcdef"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A suite, a library, a tips log; the key in the environment, as a user has it."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    (tmp_path / "tasks.yaml").write_text(SUITE)
    (tmp_path / "tips_log.md").write_text("# Tips\n")
    return tmp_path


def settings(place, **options) -> Settings:
    paths = {"suite": str(place / "tasks.yaml"), "library": str(place / "lib"), "tips": str(place / "tips_log.md")}
    return Settings(tasks=["gemm_rmsnorm"], author="claude", no_measure=True, **paths, **options)


def go(campaign, pool):
    outcomes = []
    try:
        return campaign.go(pool, lambda *a: None, outcomes.append), outcomes
    finally:
        campaign.run.close()


@pytest.fixture
def server(monkeypatch):
    def start(script):
        loopback = Loopback(script, Messages)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", loopback.url)
        return loopback

    return start


def test_passport_holds_what_is_known(place, pool, server):
    with server([check(FORBIDDEN), check(GOOD), finish()]):
        result, _ = go(start_run(place / "runs", settings(place)), pool)
    outcome = result["tasks"]["gemm_rmsnorm"]
    assert outcome["ending"] == "kept" and outcome["attempts"] == 2 and outcome["tokens"] == 450
    passport = Library(place / "lib").find("gemm_rmsnorm")
    assert passport.author == f"claude:{passport.model}" and passport.attempts == 2 and passport.run == result["run"]
    assert passport.cost["tokens"] == 450 and passport.cost["dollars"] == pytest.approx(result["dollars"])
    kept = json.loads((place / "runs" / result["run"] / "prompts" / f"{passport.prompt_sha256}.json").read_text())
    assert "gemm_rmsnorm" in kept["task"] and passport.tips == kept["tips"]
    told = as_text(story(place / "runs" / result["run"]))
    assert (
        "attempt 1 FAILED" in told
        and "policy" in told
        and "-import os" in told
        and "attempt 2 passed" in told
        and "450 tokens" in told
    )


def test_resume_goes_on_and_spent_stays_spent(place, pool, server):
    limited = settings(place, tokens=12_000)
    costly = Reply(calls=check(FORBIDDEN).calls, usage=(7000, 100, 0, 0))
    with server([costly]):
        first = start_run(place / "runs", limited)
        result, _ = go(first, pool)
    assert result["tasks"]["gemm_rmsnorm"]["ending"] == "budget" and result["tokens"] == 7100
    asked = settings(place, tokens=60_000)
    with server([check(GOOD), finish()]) as second:
        result, _ = go(resume_run(place / "runs", "last", asked, {"tokens"}), pool)
    assert result["tasks"]["gemm_rmsnorm"]["ending"] == "kept" and result["tokens"] == 7100 + 300
    # the history of the first process was sent, with the answer to its call
    assert "FAILED at policy" in json.dumps(second.requests[0]["messages"])
    assert result["tasks"]["gemm_rmsnorm"]["attempts"] == 2


def test_crash_between_a_check_and_its_answer_loses_nothing(place, pool, server):
    with server([check(FORBIDDEN), Reply(status=401, message="gone")]):
        go(start_run(place / "runs", settings(place)), pool)
    journal = next((place / "runs").glob("*/journal.jsonl"))
    lines = journal.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"event": "check"' in line)
    journal.write_text("\n".join(lines[: at + 1]) + '\n{"time": "2026", "eve')  # the power went here
    with server([finish(give_up=True)]) as again:
        result, _ = go(resume_run(place / "runs", "last", settings(place), set()), pool)
    assert result["tasks"]["gemm_rmsnorm"] | {"ending": "gave up", "attempts": 1} == result["tasks"]["gemm_rmsnorm"]
    assert "not counted again" in json.dumps(again.requests[0]["messages"][-1])


def test_interrupt_is_resumed(place, pool, server):
    with server([check(FORBIDDEN), finish(give_up=True)]):
        campaign = start_run(place / "runs", settings(place))
        campaign.ledger.stopped.set()
        with pytest.raises(KeyboardInterrupt):
            go(campaign, pool)
        assert not [e for e in read_events(campaign.run.directory) if e["event"] == "conversation_end"]
        result, _ = go(resume_run(place / "runs", "last", settings(place), set()), pool)
    assert result["tasks"]["gemm_rmsnorm"]["ending"] == "gave up"
    assert issubclass(Interrupted, Exception)


def test_best_of_parallel_samples_is_kept(place, pool, server):
    longer = GOOD.replace("    return", "    z = acc * 1.0\n    return").replace("acc * rstd", "z * rstd")
    with server([check(longer), check(GOOD), finish(), finish()]):
        result, _ = go(start_run(place / "runs", settings(place, samples=2, jobs=2)), pool)
    events = read_events(place / "runs" / result["run"])
    assert {e["sample"] for e in events if e["event"] == "conversation_end"} == {1, 2}
    assert Library(place / "lib").source(Library(place / "lib").find("gemm_rmsnorm")) == GOOD


def test_unpriced_model_needs_a_price_or_a_token_budget(place):
    with pytest.raises(HarnessError, match="--price IN,OUT"):
        start_run(place / "runs", settings(place, model="claude-unheard-of"))
    assert not (place / "runs").exists()
    campaign = start_run(place / "runs", settings(place, model="claude-unheard-of", tokens=1000))
    campaign.run.close()
    assert campaign.ledger.dollars is None and campaign.ledger.limits.tokens == 1000


def test_no_key_says_what_to_do(place, monkeypatch):
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    monkeypatch.setenv("ANTHROPIC_CONFIG_DIR", str(place / "none"))
    monkeypatch.setenv("HOME", str(place))
    with pytest.raises(HarnessError, match="ANTHROPIC_API_KEY.*coda-agent prompt"):
        start_run(place / "runs", settings(place))


def test_the_key_is_nowhere_but_in_the_request(place, server):
    """End to end in a process of its own, with a provider that quotes the key back."""
    script = [check(FORBIDDEN), Reply(status=500, message=f"bad key {KEY}"), check(GOOD), finish(note=f"used {KEY}")]
    with server(script) as loopback:
        command = [sys.executable, "-m", "agent.cli", "generate", "gemm_rmsnorm", "--author", "claude", "--no-measure",
                   "--tasks", place / "tasks.yaml", "--library", place / "lib", "--runs", place / "runs",
                   "--tips", place / "tips_log.md"]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
        done = subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert any(KEY in str(h) for h in loopback.headers)  # it was used
    assert KEY not in json.dumps(loopback.requests[:-1])  # and in no prompt
    written = [p for p in place.rglob("*") if p.is_file()]
    assert len(written) > 5 and not [p for p in written if KEY.encode() in p.read_bytes()]
    assert any(MASK.encode() in p.read_bytes() for p in written)
    assert KEY not in done.stdout + done.stderr


def test_workers_get_no_key(place, pool, monkeypatch):
    from verifier.pool import Pool

    with Pool(1) as fresh:  # started with the key in our environment
        assert fresh.submit("declare", GOOD).result().ok
        environment = Path(f"/proc/{fresh._process.pid}/environ").read_bytes()
    assert KEY.encode() in str(os.environ).encode() and KEY.encode() not in environment
