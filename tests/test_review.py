"""Review by script: ten proposed kernels, conflicts, a corrupt passport, evidence that no longer reproduces, rules."""

import json
import re

import pytest
from review_proposals import AUTHORS, TEXTS, checked, interval, propose, suite_in, tamper, timed
from test_cli import ERROR, FAIL, PASS, cli, fails, inside  # noqa: F401

from agent.composer import compose
from agent.prompt import examples, render
from agent.review.blind import HIDDEN, alias
from agent.review.compare import aligned, base_of, similarity, timing_rows, unified
from agent.review.present import whole
from agent.review.recheck import Recheck, recheck
from agent.review.rule import judge, read_rule
from agent.review.session import Refused, Review, default_reviewer
from generated.library import Library
from generated.passport import Decision
from reference_kernels.tasks import load_suite
from verifier.verdict import HarnessError


@pytest.fixture(scope="session")
def made(tmp_path_factory, pool):
    return checked(tmp_path_factory.mktemp("made"), pool)


@pytest.fixture
def lib(tmp_path, made):
    suite_in(tmp_path)
    return propose(tmp_path / "lib", made)


@pytest.fixture
def suite(lib):
    return load_suite(lib.root.parent / "suite.yaml")


@pytest.fixture
def review(lib, suite):
    return Review(lib, suite, "Ann")


def options(lib):
    return "--library", lib.root, "--tasks", lib.root.parent / "suite.yaml"


def by(lib, author, task="first_scale"):
    return next(p for p in lib.passports(task) if p.author == author)


def one_line(text):
    return " ".join(text.split())


def decide(lib, p, verb, reviewer="bert", reason="because"):
    p = lib.find(f"{p.task}/{p.kernel}")
    return lib.decide(p, Decision(verb=verb, reviewer=reviewer, reason=reason), lib.seen(p))


# --- ten kernels, by script -----------------------------------------------------------------------


def test_ten_kernels_by_script(lib):
    """Each decision by a process of its own, as a script makes them; the first acceptance with the recheck."""
    queue = cli("review", "--json", *options(lib)).json["queue"]
    assert len(queue) == 10 and {e["state"] for e in queue} == {"proposed"}
    ids = {t: [e["id"] for e in queue if e["task"] == t] for t in TEXTS}
    first, second = ids["first_scale"], ids["second_bias"]

    done = cli(
        "review", "--accept", first[0], "--reason", "short and right", "--reviewer", "Ann", "--json", *options(lib)
    )
    assert done.code == PASS, done
    (made,) = done.json
    assert made["done"] and made["decision"]["evidence"]["reproduces"] and made["state"] == "accepted"
    says = [f["says"] for f in made["decision"]["evidence"]["findings"]]
    assert "compiles to the very object that was timed (128x128_c21_pp_s8)" in says

    done = cli(
        "review", "--accept", first[1], "--accept", second[0], "--reason", "faster", "--no-recheck", *options(lib)
    )
    assert done.code == PASS and done.out.count("accepted ") == 2, done
    done = cli("review", "--reject", first[2], "--reject", second[1], "--reason", "spills", *options(lib))
    assert done.code == PASS, done
    notes = cli(
        "review", "--request-changes", first[3], "--request-changes", second[2], "--reason", "name it", *options(lib)
    )
    assert notes.code == PASS, notes
    rest = [x for i in (first[4], second[3], second[4]) for x in ("--reject", i)]
    assert cli("review", *rest, "--reason", "no better", *options(lib)).code == PASS
    assert cli("review", "--json", *options(lib)).json == {"queue": [], "problems": []}
    states = sorted(p.state for p in lib.passports())
    assert states == sorted(["accepted"] * 3 + ["rejected"] * 5 + ["changes requested"] * 2)
    kept = lib.find(first[1])
    assert (
        kept.review == "faster"
        and kept.reviewer
        and kept.history[0].evidence == {"rechecked": False, "why": "--no-recheck"}
    )
    assert lib.best("first_scale", "NVIDIA H200", (4096, 4096, 4096))["kernel"]  # accepted, hence served


def test_retire_and_restore_keep_the_history(lib, inside):  # noqa: F811
    p = by(lib, "composer")
    decide(lib, p, "accept")
    done = inside("retire", p.kernel, "--reason", "wrong at M = 1", "--reviewer", "Cleo", "--json", *options(lib))
    assert done.code == PASS and done.json[0]["state"] == "retired", done
    assert inside("retire", p.kernel, "--reason", "again", *options(lib)).code == FAIL
    done = inside("restore", p.kernel, "--reason", "it was the driver", "--no-recheck", *options(lib))
    assert done.code == PASS and "now accepted" in done.out
    assert [(d.verb, d.reviewer) for d in lib.find(p.kernel).history][:2] == [("accept", "bert"), ("retire", "Cleo")]
    shown = inside("show", p.kernel, *options(lib)[:2])
    assert "accepted" in shown.out and "retire by Cleo: wrong at M = 1" in shown.out
    assert inside("show", p.kernel, "--json", *options(lib)[:2]).json["state"] == "accepted"


def test_restoring_into_service_does_the_evidence_again(lib, inside):  # noqa: F811
    p = by(lib, "composer")
    decide(lib, p, "accept"), decide(lib, p, "retire")
    tamper(lib, p.kernel, timings=[{**timed(p, 0.9), "object_sha256": "0" * 64}])
    done = inside("restore", p.kernel, "--reason", "back", *options(lib))
    assert done.code == FAIL and "another object than the one that was timed" in one_line(done.err), done
    assert lib.find(p.kernel).state == "retired"


def test_without_a_terminal_the_list_is_printed_and_says_how_to_go_on(lib):
    done = cli("review", *options(lib))
    assert done.code == PASS and "first_scale/composer-" in done.out and "--accept" in done.out, done


def test_list_by_state_and_task(lib, inside):  # noqa: F811
    decide(lib, by(lib, "composer"), "reject")
    assert len(inside("review", "--list", "--json", *options(lib)).json["queue"]) == 9
    assert len(inside("review", "second_bias", "--list", "--json", *options(lib)).json["queue"]) == 5
    rejected = inside("review", "--list", "--state", "rejected", "--json", *options(lib)).json["queue"]
    assert [e["id"] for e in rejected] == [f"first_scale/{by(lib, 'composer').kernel}"]
    fails(inside("review", "third", "--list", *options(lib)), "no kernel in", "third")
    assert "nothing is retired" in inside("review", "--list", "--state", "retired", *options(lib)).out
    fails(inside("review", "--list", "--state", "retierd", *options(lib)), "no state 'retierd'", "changes requested")


def test_faults_of_the_call(lib, inside):  # noqa: F811
    name = by(lib, "composer").kernel
    both = [p.kernel for p in lib.passports() if p.author == "composer"]
    fails(inside("review", "--accept", name, *options(lib)), "needs a reason", "--reason TEXT")
    fails(inside("review", "--reject", name, "--reason", "  ", *options(lib)), "needs a reason")
    fails(inside("review", "--accept", name, "--reason", "x", "--reviewer", "", *options(lib)), "--reviewer NAME")
    fails(inside("review", "--accept", name, "--reason", "x", "--reviewer", "rule:x", *options(lib)), "--reviewer NAME")
    fails(inside("review", "--show", name, "--accept", name, "--reason", "x", *options(lib)), "give one of")
    fails(
        inside("review", "--reject", *both[:1], "--reject", *both[1:], "--seen", "x", "--reason", "x", *options(lib)),
        "one decision",
    )
    done = inside("review", "--reject", "nothing", "--reject", name, "--reason", "x", "--json", *options(lib))
    assert done.code == ERROR and [r["done"] for r in done.json] == [False, True]  # one fault hinders no other
    assert "no kernel 'nothing'" in done.json[0]["says"]


def test_the_reviewer_is_named_by_git(monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.name")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "Grace")
    assert default_reviewer() == "Grace"
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "")
    monkeypatch.setenv("LOGNAME", "gh")
    assert default_reviewer() == "gh"


# --- what changes under a reviewer ----------------------------------------------------------------


def test_somebody_else_accepted_meanwhile(lib, inside):  # noqa: F811
    """Another process decides between the card and the decision that rests on it."""
    p, rival = by(lib, "composer"), by(lib, "human:ada lovelace")
    card = inside("review", "--show", p.kernel, "--json", *options(lib)).json
    other = cli("review", "--accept", rival.kernel, "--reason", "first", "--no-recheck", *options(lib))
    assert other.code == PASS
    late = ("review", "--accept", p.kernel, "--reason", "mine", "--no-recheck", "--seen", card["seen"], *options(lib))
    done = inside(*late)
    assert done.code == FAIL and "another kernel of first_scale was accepted or retired meanwhile" in one_line(done.err)
    decide(lib, p, "reject", reason="spills")
    done = inside(
        "review", "--request-changes", p.kernel, "--reason", "x", "--seen", card["seen"], "--json", *options(lib)
    )
    assert done.code == FAIL and "possible now: accept, restore" in done.json[0]["says"]
    assert lib.find(p.kernel).review == "spills"


def test_a_decision_during_the_recheck_is_a_conflict(review, lib):
    p = by(lib, "composer")
    card = review.card(p)
    decide(lib, p, "request changes", reason="shorter")
    with pytest.raises(Refused, match=r"bert decided meanwhile \(request changes: shorter\)"):
        review.decide(p, "accept", "fine", card.seen, Recheck([{"what": "object", "ok": True, "says": "same"}]))
    assert lib.find(p.kernel).state == "changes requested"


def test_a_corrupt_passport_is_listed_and_hinders_nobody(lib, inside):  # noqa: F811
    broken = lib.path(by(lib, "claude:opus-9")).with_suffix(".json")
    broken.write_text('{"format": 2, "kernel"')
    listed = inside("review", "--json", *options(lib)).json
    assert len(listed["queue"]) == 9 and len(listed["problems"]) == 1
    assert str(broken) in listed["problems"][0] and "restore it or delete it" in listed["problems"][0]
    assert "unreadable" in inside("review", "--list", *options(lib)).out
    fails(inside("review", "--show", broken.stem, *options(lib)), str(broken), "not a valid passport")
    done = inside("review", "--reject", by_scan(lib, "composer").kernel, "--reason", "x", *options(lib))
    assert done.code == PASS, done
    blind = inside("review", "--blind", "--json", *options(lib)).json["problems"][0]
    assert "opus" not in blind and alias("first_scale", broken.stem) in blind


def by_scan(lib, author):
    return next(p for p in lib.scan()[0] if p.author == author and p.task == "first_scale")


# --- evidence -------------------------------------------------------------------------------------


def test_another_object_than_the_one_timed_is_refused(lib, suite, pool):
    p = by(lib, "composer")
    tamper(lib, p.kernel, timings=[{**timed(p, 0.9), "object_sha256": "0" * 64}])
    done = recheck(lib.find(p.kernel), lib, suite, lambda: pool)
    assert not done.reproduces and "compiles to another object than the one that was timed" in done.says
    assert "measure it again" in done.says
    tamper(lib, p.kernel, toolchain={**p.toolchain, "quack-kernels": "0.6.4"})
    done = recheck(lib.find(p.kernel), lib, suite, lambda: pool)  # nothing can be said, and that is said
    assert done.reproduces and "quack-kernels 0.6.4, here" in done.says and done.findings[-1]["ok"] is None


def test_a_changed_reference_is_refused(lib, inside):  # noqa: F811
    """The task's reference changed since: the kernel is no longer right."""
    reference = lib.root.parent / "reference.py"
    reference.write_text(reference.read_text().replace("acc * r[:, None]", "acc * r[:, None] + 0.5"))
    name = by(lib, "composer").kernel
    done = inside("review", "--accept", name, "--reason", "fine", "--json", *options(lib))
    assert done.code == FAIL, done
    assert "does not reproduce: interpret: y: " in done.json[0]["says"] and lib.find(name).state == "proposed"


def test_a_changed_text_is_refused(lib, inside):  # noqa: F811
    p = by(lib, "composer")
    lib.path(p).write_text(lib.source(p) + "\n")
    shown = inside("review", "--show", p.kernel, "--json", *options(lib)).json
    assert "was changed after it was checked" in shown["problems"][0]
    done = inside("review", "--accept", p.kernel, "--reason", "x", *options(lib))
    assert done.code == FAIL and "source: " in done.err and "was changed after it was checked" in one_line(done.err)


def test_a_task_of_another_suite_is_said(lib, inside):  # noqa: F811
    done = inside("review", "--accept", by(lib, "composer").kernel, "--reason", "x", *options(lib)[:2])
    assert done.code == FAIL and "has no task first_scale; give its suite with --tasks FILE" in one_line(done.err)


def test_help_of_the_verbs(inside):  # noqa: F811
    for verb in ("review", "retire", "restore"):
        done = inside(verb, "--help")
        assert done.code == PASS and "--json" in done.out and "--reason" in done.out


# --- cards ----------------------------------------------------------------------------------------


def test_the_incumbent_is_the_fastest_accepted_kernel(review, lib):
    slow, fast, third = (by(lib, a) for a in ("openai:gpt-9-mini", "claude:sonnet-9", "composer"))
    assert review.card(third).base["what"] == "nothing" and "every line is new" in review.card(third).base["why"]
    decide(lib, by(lib, "composer", "second_bias"), "accept")
    assert review.card(third).base["what"] == "nearest" and "none accepted" in review.card(third).base["why"]
    decide(lib, slow, "accept"), decide(lib, fast, "accept")
    card = review.card(third)
    assert card.base["name"].endswith(fast.kernel) and card.base["what"] == "incumbent"
    assert [line for line in card.diff if line.startswith(("-    ", "+    "))] == [
        "-    value = acc * r", '-    return {"y": value}', "+    y = acc * r", '+    return {"y": y}',
    ]  # fmt: skip
    assert review.card(lib.find(fast.kernel)).base["name"].endswith(slow.kernel)  # nobody is its own incumbent


def test_the_most_similar_program_of_another_task_is_found_whatever_its_layout():
    library = Library()
    suite = load_suite()
    passports = [
        p.model_copy(update={"history": [Decision(verb="accept", reviewer="a", reason="b")]})
        for p in library.passports()
    ]
    passports = [p for p in passports if p.task != "gemm_swiglu"]
    base = base_of(
        passports[0].model_copy(update={"task": "gemm_swiglu"}), compose(suite["gemm_swiglu"]), library, passports
    )
    assert base.what == "nearest" and base.passport.task in ("gemm_swiglu_lean", "gemm_rmsnorm_swiglu")
    text = compose(suite["gemm_swiglu"])
    assert similarity(text, text.replace("\n\n\n", "\n# remark\n").replace("GEMM", "gemm")) == 1.0


def test_ratios_to_the_incumbent_go_through_the_bare_gemm(made):
    p = made["first_scale"]
    mine, its = {**timed(p, 0.98), "object_sha256": "1"}, timed(p, 0.90)
    old = p.model_copy(update={"timings": [its]})
    base = base_of_(old)
    (row,) = timing_rows(p.model_copy(update={"timings": [mine]}), base, None)
    r = row["versus"]["incumbent"]
    assert r["median"] == pytest.approx(0.98 / 0.90) and r["us"] == pytest.approx(100 / 0.9) and not r["same_code"]
    # independent errors: wider than either, narrower than their sum
    assert 0.004 / 0.9 < (r["high"] - r["median"]) / r["median"] < 0.004 / 0.9 + 0.004 / 0.98
    (same,) = timing_rows(old, base, None)
    assert same["versus"]["incumbent"] == {
        "us": its["total_us"],
        "median": 1.0,
        "low": 1.0,
        "high": 1.0,
        "same_code": True,
    }
    (elsewhere,) = timing_rows(p.model_copy(update={"timings": [{**mine, "device": "H100"}]}), base, None)
    assert list(elsewhere["versus"]) == ["torch.compile", "gemm"]


def base_of_(passport):
    from agent.review.compare import Base

    return Base("incumbent", "", passport, "")


def test_older_rows_are_read(made):
    p = made["first_scale"]
    row = {k: v for k, v in timed(p, 0.9).items() if k not in ("baselines", "left_out")}
    row |= {"gemm_us": 100.0, "expert_us": 99.0, "baseline_us": {"torch.compile": 120.0}}
    row["ratios"] = {**row["ratios"], "expert": {**interval(1.0), "covers": ["z"]}}
    task = load_suite()["gemm_rmsnorm_swiglu"]
    (told,) = timing_rows(p.model_copy(update={"timings": [row]}), base_of_(None), task)
    assert {n: v["us"] for n, v in told["versus"].items()} == {"torch.compile": 120.0, "expert": 99.0, "gemm": 100.0}
    assert told["versus"]["expert"]["partial"] and not told["versus"]["torch.compile"]["partial"]


def test_aligned_rows_give_both_texts_back():
    a, b = "1\n2\n3\n4\n", "1\nx\ny\n3\n"
    rows = aligned(a, b)
    assert [r.before for r in rows if r.before] == [1, 2, 3, 4] and [r.after for r in rows if r.after] == [1, 2, 3, 4]
    assert [(r.before, r.after) for r in rows if not r.changed] == [(1, 1), (3, 4)]
    assert unified(a, b, ("old", "new"))[:2] == ["--- old", "+++ new"]


@pytest.mark.parametrize("width", [80, 200])
def test_every_committed_kernel_fits_its_card(width):
    """The real library at both sizes: nothing fails, nothing is wider than the screen, the numbers are there."""
    from rich.console import Console

    review = Review(Library(), load_suite(), "Ann")
    for entry in review.queue(state="all")[0]:
        card = review.card(entry.passport)
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(whole(card, width, Recheck([{"what": "x", "ok": True, "says": "same"}])))
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= width
        for needed in (card.name, "evidence reproduces", "registers", card.math.splitlines()[0].split()[0]):
            assert needed in text, (card.name, needed)
        json.dumps(card.as_dict())


# --- blind ----------------------------------------------------------------------------------------


def leaks(text, lib):
    """Words that tell the author, in whatever was shown."""
    words = (*AUTHORS, *(p.kernel for p in lib.scan()[0]))
    return [w for w in words if re.search(rf"(?<![^\W_]){re.escape(w)}(?![^\W_])", text, re.I)]


def test_nothing_names_the_author_before_the_decision(lib, inside):  # noqa: F811
    decide(lib, by(lib, "claude:sonnet-9"), "accept", reviewer="Bert")
    everything = (
        inside("review", "--blind", "--json", *options(lib)).out
        + inside("review", "--blind", "--list", *options(lib)).out
    )
    ids = [e["id"] for e in json.loads(everything[: everything.index("\n}") + 2])["queue"]]
    assert len(set(ids)) == 9 and all("#" in i for i in ids)
    for i in ids:
        everything += inside("review", "--blind", "--show", i, "--json", *options(lib)).out
        everything += inside("review", "--blind", "--show", i, *options(lib)).out
    assert leaks(everything, lib) == [] and HIDDEN in everything and "12345" not in everything
    real = by(lib, "composer")
    done = inside("review", "--blind", "--accept", real.kernel, "--reason", "x", *options(lib))
    assert done.code == ERROR and "kernels go by aliases" in one_line(done.err)
    mine = alias(real.task, real.kernel)
    assert mine in ids
    done = inside("review", "--blind", "--reject", mine, "--reason", "x", "--json", *options(lib))
    assert (
        done.code == PASS and "written by composer" in done.json[0]["says"] and lib.find(real.kernel).history[0].blind
    )
    done = inside("review", "--blind", "--reject", mine, "--reason", "x", *options(lib))
    assert done.code == FAIL and "possible now" in done.err


def test_refusals_do_not_name_the_author_either(lib, inside):  # noqa: F811
    p = by(lib, "openai:gpt-9-mini")
    tamper(lib, p.kernel, timings=[{**timed(p, 0.9), "object_sha256": "0" * 64}])
    mine = alias(p.task, p.kernel)
    done = inside("review", "--blind", "--accept", mine, "--reason", "x", "--json", *options(lib))
    assert done.code == FAIL and leaks(done.out + done.err, lib) == [] and mine in done.out
    done = inside("review", "--blind", "--reject", mine, "--reason", "x", "--seen", "old", "--json", *options(lib))
    assert done.code == FAIL and leaks(done.out + done.err, lib) == []


# --- rules ----------------------------------------------------------------------------------------


def test_auto_accept_takes_the_best_and_says_why_not_the_others(lib):
    done = cli("review", "--auto-accept", "faster", "--json", *options(lib))
    assert done.code == PASS, done
    taken = [k["id"] for k in done.json["kernels"] if k["accepted"]]
    assert sorted(taken) == sorted(f"{t}/{by(lib, 'claude:sonnet-9', t).kernel}" for t in TEXTS)
    kept = by(lib, "claude:sonnet-9")
    assert kept.reviewer == "rule:faster" and kept.history[0].evidence["reproduces"]
    for part in (
        "measured",
        "all verdicts passed",
        "vs torch.compile at worst 1.140 [1.136, 1.144] (needs 1)",
        "no incumbent",
        "spills 0",
    ):
        assert part in kept.review, kept.review
    left = [k for k in done.json["kernels"] if not k["accepted"]]
    assert len(left) == 8 and all("vs incumbent at worst" in k["says"] and "(needs 1.02)" in k["says"] for k in left)


NEVER = lambda: pytest.fail("the recheck takes seconds: not for a kernel that fails anyway")  # noqa: E731


@pytest.mark.parametrize(
    "change, says",
    [
        ({"status": "checked"}, "checked, not measured"),
        ({"isolation": "process limits only"}, "isolation: process limits only"),
        ({"timings": []}, "vs torch.compile: nothing was timed"),
        ({"measure": [{"stage": "numerics", "passed": False, "reason": "y is wrong"}]}, "numerics: y is wrong"),
        ({"check": []}, "the check is not complete"),
    ],
)
def test_each_condition_can_refuse(review, lib, change, says):
    p = by(lib, "composer").model_copy(update=change)
    lib.add(lib.source(p), p)
    found, done = judge(read_rule("faster"), review.card(p), p, NEVER)
    assert done is None and says in "; ".join(c.says for c in found if not c.holds)


def test_a_slower_row_a_missing_baseline_or_a_spill_refuses(review, lib):
    p = by(lib, "composer")
    slow = {**timed(p, 0.9), "shape": [2048, 2048, 2048]}
    slow["ratios"] = {**slow["ratios"], "torch.compile": interval(1.001)}
    cases = {"vs torch.compile at worst 1.001 [0.997, 1.005] (needs 1)": [timed(p, 0.9), slow]}
    without = {**slow, "ratios": {"gemm": interval(0.9)}}
    cases["vs torch.compile: not timed against it at 2048x2048x2048"] = [timed(p, 0.9), without]
    for says, rows in cases.items():
        q = p.model_copy(update={"timings": rows})
        lib.add(lib.source(q), q)
        found, _ = judge(read_rule("faster"), review.card(q), q, NEVER)
        assert [c.says for c in found if not c.holds] == [says]
    check = json.loads(json.dumps(p.check))
    next(v for v in check if v["stage"] == "resources")["evidence"]["counts"]["STL"] = 3
    q = p.model_copy(update={"check": check})
    lib.add(lib.source(q), q)
    found, _ = judge(read_rule("faster"), review.card(q), q, NEVER)
    assert [c.says for c in found if not c.holds] == ["spills 3 (at most 0)"]


@pytest.mark.parametrize(
    "text, says",
    [
        ("rules: {mine: {about: everything}}", "without conditions"),
        ("rules: {mine: {about: x, at_most: {register: 9}}}", "at_most knows no"),
        ("rules: {mine: {about: x, statuss: measured}}", "no valid rules"),
        ("rules: [", "no valid rules"),
        ("rules: {other: {about: x, status: measured}}", "no rule 'mine'"),
    ],
)
def test_rules_that_are_not_rules(tmp_path, text, says):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(HarnessError, match=says):
        read_rule("mine", tmp_path / "r.yaml")
    with pytest.raises(HarnessError, match="cannot read the rules"):
        read_rule("mine", tmp_path / "none.yaml")


def test_a_rule_of_ones_own(lib, inside, tmp_path):  # noqa: F811
    file = tmp_path / "r.yaml"
    file.write_text("rules:\n  quick: {about: as fast as the GEMM, at_least: {gemm: 0.94}}\n")
    done = inside("review", "first_scale", "--auto-accept", "quick", "--rule", file, *options(lib))
    assert done.code == PASS and "1 of 5 accepted" in one_line(done.out), done
    assert (
        by(lib, "claude:sonnet-9").reviewer == "rule:quick"
        and by(lib, "claude:sonnet-9", "second_bias").state == "proposed"
    )
    fails(inside("review", "--auto-accept", "quick", *options(lib)), "no rule 'quick'", "it has: faster")
    fails(inside("review", "--auto-accept", "faster", "--no-recheck", *options(lib)), "leave out --no-recheck")


# --- what the author hears ------------------------------------------------------------------------


def test_a_request_for_changes_is_in_the_next_prompt(lib, suite, inside):  # noqa: F811
    p = by(lib, "claude:opus-9")
    before = render(suite["first_scale"], suite, library=lib)
    done = inside("review", "--request-changes", p.kernel, "--reason", "Call it y.\nNo remarks.", *options(lib))
    assert done.code == PASS and "the note is in the next prompt for first_scale" in one_line(done.out)
    after = inside("prompt", "first_scale", "--json", *options(lib)).json
    assert "> Call it y.\n> No remarks." in after["text"] and lib.source(p).rstrip() in after["text"]
    told = render(suite["first_scale"], suite, library=lib)
    assert told.static == before.static and told.sha256 == after["sha256"] != before.sha256  # the cached part stays
    assert render(suite["second_bias"], suite, library=lib).task.count("Call it y") == 0
    same_kind = render(suite["first_scale"], suite, library=lib, author="claude:opus-10")
    other = render(suite["first_scale"], suite, library=lib, author="openai:gpt-9")
    assert "Call it y" in same_kind.task and "Call it y" not in other.task
    decide(lib, p, "reject")
    assert render(suite["first_scale"], suite, library=lib).sha256 == before.sha256


def test_a_run_of_the_same_author_is_told(lib, suite, tmp_path, monkeypatch):
    """Through the job that holds the conversations, as generate does."""
    from agent.budget import Ledger, Limits
    from agent.generate import Job
    from agent.openai_compatible import OpenAICompatible
    from agent.run import Run

    decide(lib, by(lib, "openai:gpt-9-mini"), "request changes", reason="fewer temporaries")
    decide(lib, by(lib, "claude:opus-9"), "request changes", reason="for claude only")
    run = Run.start(tmp_path / "runs", tasks=["first_scale"], author="openai", attempts=2)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")  # nothing is asked
    author = OpenAICompatible("gpt-10")
    job = Job(author, suite, lib, None, run, Ledger(Limits(attempts=2), None, run.limits), lambda *a: None)
    text = job.prompt(suite["first_scale"], []).text
    run.close()
    assert "> fewer temporaries" in text and "for claude only" not in text


def test_the_composer_reads_no_notes_and_says_so(lib, suite, inside):  # noqa: F811
    p = by(lib, "composer")
    done = inside("review", "--request-changes", p.kernel, "--reason", "shorter", *options(lib))
    assert done.code == PASS and "reads no notes" in one_line(done.out)
    assert "shorter" not in render(suite["first_scale"], suite, library=lib).task  # it is the answer to the task


def test_what_a_reviewer_withdrew_is_no_example(tmp_path, pool):
    from test_library import passport

    from agent.authors import Call
    from agent.review.notes import withdrawn
    from agent.tools import Desk

    suite, lib = load_suite(), Library(tmp_path / "lib")
    task = suite["gemm_rmsnorm_swiglu"]
    first = examples(task, suite)[0][0]
    source = compose(first)
    lib.add(source, passport(source, task=first.name))
    assert first.name in render(task, suite, library=lib).examples
    decide(lib, next(lib.passports(first.name)), "reject")
    assert (
        first.name not in render(task, suite, library=lib).examples
        and len(render(task, suite, library=lib).examples) == 3
    )
    desk = Desk(task, suite, pool, "claude:x", lambda *a, **k: None, lambda t: None, without=withdrawn(lib))
    answer = desk.answer(Call("1", "read_example", {"task": first.name}))
    assert answer["error"] and "a reviewer withdrew" in answer["text"]
    assert not desk.answer(Call("2", "read_example", {"task": "gemm_rope"}))["error"]
