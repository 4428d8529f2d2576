"""Money, tokens and minutes: prices, limits that can be changed while a run goes on, and the verbs that show them."""

import json
import sys

import pytest

from agent.budget import LEAST_OUTPUT, Ledger, Limits, Price, Usage, price_list, price_of, read_limits, write_limits
from agent.run import Run
from verifier.verdict import HarnessError


def test_price_file_is_dated_and_sane():
    date, prices = price_list()
    assert date.startswith("20") and len(prices) >= 8
    for price in prices.values():
        assert 0 < price.cache_read < price.input < price.cache_write < price.output


def test_dollars_of_a_call():
    price = Price(4, 20, 5, 0.2)
    assert price.dollars(Usage(1_000_000, 0, 0, 0)) == 4 and price.dollars(Usage(0, 1_000_000)) == 20
    assert price.dollars(Usage(0, 0, 1_000_000, 1_000_000)) == pytest.approx(5.2)


def test_long_prompts_of_some_models_are_dearer():
    price = price_of("claude-haiku-5-5")
    short, long = Usage(99_000, 1000), Usage(1000, 1000, 0, 100_000)
    assert price.dollars(short) == pytest.approx(99_000 * 0.1e-6 + 1000 * 0.5e-6)
    assert price.dollars(long) == pytest.approx(1000 * 0.5e-6 + 1000 * 2.5e-6 + 100_000 * 0.05e-6)


def test_given_price_counts_and_unknown_stays_unknown():
    assert price_of("no-such-model") is None
    assert price_of("no-such-model", "1,2").dollars(Usage(10**6, 10**6)) == 3
    with pytest.raises(HarnessError, match="IN,OUT"):
        price_of("x", "cheap")
    with pytest.raises(HarnessError, match="--price"):
        Ledger(Limits(dollars=1), None)


def test_room_shrinks_with_what_is_spent():
    ledger = Ledger(Limits(tokens=10_000), Price(4, 20, 5, 0.2))
    assert ledger.room(2000) == 8000 and ledger.exhausted(2000) is None
    ledger.charge(Usage(5000, 1000))
    assert ledger.room(2000) == 2000 and ledger.exhausted(2000) is None
    assert "tokens" in ledger.exhausted(4001 - LEAST_OUTPUT)
    assert "minutes" in Ledger(Limits(minutes=1), None, earlier_seconds=61).exhausted(0)


def test_limits_are_read_again_before_each_call(tmp_path):
    path = tmp_path / "limits.json"
    ledger = Ledger(Limits(tokens=5000), None, path)
    ledger.charge(Usage(4500, 100))
    assert ledger.exhausted(4500)
    write_limits(path, ledger.limits.raised(tokens=50_000))
    assert ledger.exhausted(4500) is None
    path.write_text("{")
    with pytest.raises(HarnessError, match="limits"):
        ledger.exhausted(0)


@pytest.fixture
def verb(monkeypatch, capsys):
    from agent.cli import main

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["coda-agent", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, capsys.readouterr().out

    return call


def test_runs_list_show_extend(tmp_path, verb):
    run = Run.start(tmp_path, tasks=["t"], author="claude", model="m")
    Ledger(Limits(dollars=1.0, attempts=6), Price(4, 20, 5, 0.2), run.limits)
    run.log("call", task="t", sample=1, usage=vars(Usage(100, 50)), dollars=0.25, failed=None)
    run.log("candidate", task="t", sample=1, attempt=1, author="claude:m", source="a = 1\n")
    verdict = {"stage": "policy", "passed": False, "reason": "line 1: no kernel"}
    run.log("check", task="t", sample=1, attempt=1, passed=False, seconds=0.1, verdicts=[verdict])
    # listing and extending work while another process holds the run
    code, told = verb("runs", "list", "--runs", tmp_path, "--json")
    assert code == 0 and json.loads(told)[0] == json.loads(told)[0] | {
        "run": run.id,
        "tokens": 150,
        "dollars": 0.25,
        "state": "unfinished",
    }
    code, told = verb("runs", "show", run.id, "--runs", tmp_path)
    assert code == 0 and "attempt 1 FAILED" in told and "line 1: no kernel" in told and "$0.250" in told
    assert verb("runs", "extend", "last", "--dollars", "7", "--runs", tmp_path)[0] == 0
    assert read_limits(run.limits) == Limits(dollars=7, attempts=6)
    assert verb("runs", "show", "nothing", "--runs", tmp_path)[0] == 2
