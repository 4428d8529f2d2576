"""Review by keys: the real command in a pseudo-terminal, its screen read back."""

from __future__ import annotations

import sys
import time

import pexpect
import pyte
import pytest
from review_proposals import propose, suite_in, tamper, timed
from test_cli import INTERRUPTED, PASS, ROOT, environment
from test_review import by, decide, leaks, made  # noqa: F401

SECONDS = 30  # for one thing to appear; the machine may be busy


class Terminal:
    """A pseudo-terminal with the command in it; ``seen`` is every byte it wrote."""

    def __init__(self, *arguments, size=(24, 80), **variables):
        rows, columns = size
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.seen = b""
        env = {**environment(), "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows), **variables}
        command = ["-c", "from agent.cli import main; main()", "review", *map(str, arguments)]
        self.child = pexpect.spawn(sys.executable, command, dimensions=size, env=env, cwd=str(ROOT), timeout=SECONDS)
        self.child.delaybeforesend = None

    @property
    def text(self):
        return "\n".join(self.screen.display)

    def _read(self):
        """Take in what was written; False when the command has ended."""
        try:
            chunk = self.child.read_nonblocking(1 << 16, timeout=0.1)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.seen += chunk
        self.stream.feed(chunk)
        return True

    def until(self, *texts, gone=False):
        """Wait until all texts are on the screen (or none of them is), wherever their lines break."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and self._read():
            shown = " ".join(self.text.split())
            if all((text in shown) != gone for text in texts):
                return self
        raise AssertionError(f"{'still' if gone else 'never'} {texts} in\n{self.text}")

    def press(self, *keys):
        for key in keys:
            self.child.send(key)
        return self

    def decide(self, key, reason, asked):
        """One decision: key, reason, Enter."""
        return self.press(key).until(asked).press(reason).until(reason).press("\r")

    def end(self):
        """Wait for the command to end; its exit code."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and self._read():
            pass
        self.child.close()
        return self.child.exitstatus


@pytest.fixture
def lib(tmp_path, made):  # noqa: F811
    suite_in(tmp_path)
    return propose(tmp_path / "lib", made)


@pytest.fixture
def open_review(lib):
    """Opens reviews of the library; ends them with the test."""
    opened = []

    def start(*arguments, **options):
        where = ("--library", lib.root, "--tasks", lib.root.parent / "suite.yaml", "--reviewer", "Ann")
        opened.append(Terminal(*where, *arguments, **options))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.child.close(force=True)


def queue(lib):
    return list(lib.passports())


def test_ten_kernels_by_keys(lib, open_review):
    """Every key, on a small terminal without colours; the decisions are in the passports at once."""
    kernels = queue(lib)
    name = [f"{p.task}/{p.kernel}" for p in kernels]
    t = open_review("--no-recheck", NO_COLOR="1").until(
        "1 of 10", name[0], "registers", "vs torch.compile", "every line is new"
    )
    t.press("?").until("take your last decision back").press("x").until("take your last decision", gone=True)
    t.press("a").until("accept: why?").press("\r").until("a decision needs a reason")
    t.press("\x1b").until("nothing was decided")
    t.decide("a", "short and right", "accept: why?").until(f"accepted {name[0]}", "2 of 10", "the incumbent")
    assert lib.find(name[0]).state == "accepted" and lib.find(name[0]).review == "short and right"
    t.press("d").until("import 3 from primitives").press("d")
    t.decide("r", "no better", "reject: why?").until(f"rejected {name[1]}", "3 of 10")
    t.press("u").until(f"taken back: {name[1]} is proposed", "2 of 10")
    assert [d.verb for d in lib.find(name[1]).history] == ["reject", "restore"]
    t.decide("r", "spills", "reject: why?").until("3 of 10")
    t.decide("c", "name it y", "request changes: the note").until("composer is built in and reads no notes", "4 of 10")
    t.press("n").until("5 of 10").press("p").until("4 of 10")
    t.decide("c", "no remarks", "request changes: the note").until("the note is in the next prompt", "5 of 10")
    for at in range(4, 10):
        verb = "accept" if at % 2 else "reject"
        t.decide(verb[0], f"reason {at}", f"{verb}: why?").until(f"{verb}ed {name[at]}")
        assert lib.find(name[at]).review == f"reason {at}"  # written when it is said, not at the end
    t.press("u").until(f"taken back: {name[9]}").press("q")
    assert t.end() == PASS
    states = {p.state for p in lib.passports()}
    assert states == {"accepted", "rejected", "changes requested", "retired"}
    assert [d.verb for d in lib.find(name[9]).history] == ["accept", "retire"]
    assert all(d.reviewer == "Ann" for p in lib.passports() for d in p.history)
    assert f"retired {name[9]}" in " ".join(t.text.split())  # what was decided stays in the terminal


def test_evidence_is_done_again_while_the_reviewer_reads(lib, open_review):
    """One kernel whose evidence reproduces; one that compiles to another object than the one that was timed."""
    good, bad = queue(lib)[:2]
    tamper(lib, bad.kernel, timings=[{**timed(bad, 0.9), "object_sha256": "0" * 64}])
    t = open_review("first_scale", size=(60, 200)).until("1 of 5", "doing the evidence again")
    t.press("agood\r").until("as soon as its evidence reproduces").press("q").until(
        f"not yet accepted, the evidence is still being done: first_scale/{good.kernel}", "2 of 5"
    )
    t.until(f"accepted first_scale/{good.kernel}")
    kept = lib.find(good.kernel)
    assert kept.state == "accepted" and kept.history[0].evidence["reproduces"]
    t.until("the incumbent", "evidence does not reproduce")  # the card follows what was accepted
    t.decide("a", "good, too", "accept: why?").until("was not accepted: its evidence does not reproduce")
    t.until("another object than the one that was timed")
    assert lib.find(bad.kernel).state == "proposed"
    t.press("q")
    assert t.end() == PASS


def test_leaving_before_the_evidence_is_done_accepts_nothing(lib, open_review):
    """Typed faster than any screen could follow: the reason is a reason, not commands."""
    t = open_review("first_scale").until("1 of 5").press("areason with r, c, u and q\r")
    t.until("as soon as its evidence reproduces").press("q").until("q again leaves without").press("q")
    start = time.monotonic()
    assert t.end() == PASS and time.monotonic() - start < 20
    assert {p.state for p in lib.passports()} == {"proposed"}


def test_somebody_else_decides_while_the_card_is_shown(lib, open_review):
    first, second = queue(lib)[:2]
    t = open_review("--no-recheck").until("1 of 10")
    decide(lib, first, "reject", reason="spills at 8k")
    t.decide("a", "fine", "accept: why?").until("bert decided meanwhile (reject: spills at 8k)", "✗ rejected")
    assert [d.reviewer for d in lib.find(first.kernel).history] == ["bert"]
    t.press("n").until("2 of 10").decide("r", "slow", "reject: why?").until("3 of 10")
    decide(lib, second, "restore", reason="not slow")
    t.press("u").until("bert decided meanwhile (restore: not slow)").press("q")
    assert t.end() == PASS and [d.verb for d in lib.find(second.kernel).history] == ["reject", "restore"]


def test_a_corrupt_passport_is_shown_with_what_to_do(lib, open_review):
    broken = lib.path(by(lib, "composer")).with_suffix(".json")
    broken.write_text("{half")
    t = open_review("--no-recheck", size=(60, 200)).until("1 of 9", "! unreadable passport")
    t.press(*"nnnnnnnnn").until("is not a valid passport", "restore it or delete it", "Nothing can be decided")
    t.press("a").until("there is nothing to decide about here")
    t.press("p").until("9 of 9").decide("r", "x", "reject: why?").until("rejected second_bias")
    t.press("\x03")
    assert t.end() == INTERRUPTED


def test_blind_review_leaks_nothing_until_the_decision(lib, open_review):
    """Every byte that reached the terminal, over all ten kernels, both diffs and a refused decision."""
    decide(lib, by(lib, "claude:sonnet-9"), "accept")
    lib.path(by(lib, "openai:gpt-9-mini", "second_bias")).with_suffix(".json").write_text("{half")
    t = open_review("--blind", "--no-recheck", size=(60, 200)).until("1 of 8 blind", "hidden until the decision")
    for at in range(2, 9):
        t.press("d", "n").until(f"{at} of 8 blind")
    t.press("n").until("leave blind review to see the path").press("p").until("8 of 8 blind")
    before = t.seen.decode(errors="replace")
    assert leaks(before, lib) == [] and "[hidden]" in before
    t.decide("r", "not convinced", "reject: why?").until("written by")
    done = next(p for p in lib.scan()[0] if p.state == "rejected")
    assert done.history[0].blind and f"(written by {done.author})" in " ".join(t.text.split())
    t.press("b").until("authors are shown").press("b").until("blind review: authors are hidden")
    shown = {p.kernel for p in lib.scan()[0] if p.state == "rejected"}
    t.decide("r", "seen before", "reject: why?").until("rejected")
    other = next(p for p in lib.scan()[0] if p.state == "rejected" and p.kernel not in shown)
    assert not other.history[0].blind  # its author was on the screen in between
    t.press("q")
    assert t.end() == PASS


@pytest.mark.parametrize("size", [(24, 80), (60, 200)])
def test_everything_is_on_one_screen(lib, open_review, size):
    decide(lib, by(lib, "claude:opus-9"), "accept")
    p = by(lib, "composer")
    t = open_review("--no-recheck", "first_scale", size=size)
    t.until(
        "1 of 4",
        p.task,
        "y = (A B) * r[m]",
        "✓ policy",
        "✓ timing",
        "vs incumbent",
        "vs torch.compile",
        "registers",
        "spills 0",
    )
    t.until("2 attempts", "12345 tokens, $0.31", "T01", "- ", "+ ", "a Accept", "q Quit")
    assert (f"   {p.kernel}" in t.text) == (size[1] >= 110)  # the queue is folded when narrow
    t.press("l").until(f" {p.kernel}", gone=size[1] >= 110)


def test_a_killed_review_leaves_every_decision_whole(lib, open_review):
    t = open_review("--no-recheck").until("1 of 10").decide("r", "slow", "reject: why?").until("2 of 10")
    t.press("a").until("accept: why?").press("half a reas")
    t.child.kill(9)
    t.end()
    assert [p.state for p in lib.passports()].count("rejected") == 1 and {len(p.history) for p in lib.passports()} == {
        0,
        1,
    }


def test_an_empty_queue_says_so(tmp_path, open_review, lib):
    for p in queue(lib):
        decide(lib, p, "reject")
    t = (
        open_review("--no-recheck")
        .until("Nothing is proposed")
        .press("a")
        .until("there is nothing to decide about here")
    )
    t.press("n", "p", "d", "u", "q")
    assert t.end() == PASS
