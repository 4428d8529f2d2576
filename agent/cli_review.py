"""Verbs of review: ``review``, ``retire``, ``restore``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from generated.library import LibraryError
from verifier.verdict import HarnessError

from .cli import (
    ERROR,
    FAIL,
    PASS,
    JsonOption,
    LibraryOption,
    Progress,
    TasksOption,
    _library,
    _suite,
    app,
    emit,
    err,
    out,
)  # fmt: skip

ReasonOption = Annotated[str | None, typer.Option("--reason", help="Why; it is kept in the passport.")]
ReviewerOption = Annotated[
    str | None, typer.Option("--reviewer", help="Your name (default: git's user.name, else $USER).")
]
RecheckOption = Annotated[
    bool, typer.Option("--recheck/--no-recheck", help="Do the GPU-free evidence again before accepting.")
]


@app.command()
def review(
    tasks: Annotated[list[str] | None, typer.Argument(help="Only kernels of these tasks.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the queue.")] = False,
    state: Annotated[
        str, typer.Option(help="With --list: proposed, 'changes requested', rejected, accepted, retired, all.")
    ] = "proposed",
    show: Annotated[list[str] | None, typer.Option("--show", help="Print one card.", metavar="ID")] = None,
    accept: Annotated[list[str] | None, typer.Option("--accept", metavar="ID")] = None,
    reject: Annotated[list[str] | None, typer.Option("--reject", metavar="ID")] = None,
    request_changes: Annotated[
        list[str] | None, typer.Option("--request-changes", metavar="ID", help="The reason is the note to the author.")
    ] = None,
    reason: ReasonOption = None,
    reviewer: ReviewerOption = None,
    seen: Annotated[
        str | None, typer.Option(help="Refuse if anything changed since the card with this 'seen' value was printed.")
    ] = None,
    auto_accept: Annotated[
        str | None, typer.Option("--auto-accept", metavar="RULE", help="Accept what satisfies a declared rule.")
    ] = None,
    rule_file: Annotated[Path | None, typer.Option("--rule", help="Rules instead of the built-in ones.")] = None,
    blind: Annotated[bool, typer.Option("--blind", help="Hide who wrote it until the decision.")] = False,
    recheck: RecheckOption = True,
    tasks_file: TasksOption = None,
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Review proposed kernels: on a terminal by keys, in a script by options."""
    from .review.session import Review, default_reviewer

    desk = Review(_library(library), _suite(tasks_file), default_reviewer() if reviewer is None else reviewer, blind)
    wanted = [("accept", n) for n in accept or []] + [("reject", n) for n in reject or []]
    wanted += [("request changes", n) for n in request_changes or []]
    if bool(wanted) + bool(show) + (auto_accept is not None) + listing > 1:
        raise HarnessError(
            "give one of --list, --show, --auto-accept, or decisions (--accept, --reject, --request-changes)"
        )
    if seen and len(wanted) != 1:
        raise HarnessError("--seen goes with exactly one decision")
    if wanted:
        raise typer.Exit(_decide(desk, wanted, reason, seen, recheck, as_json))
    if auto_accept is not None:
        raise typer.Exit(_auto_accept(desk, auto_accept, rule_file, tasks, recheck, as_json))
    if show:
        return _show(desk, show, as_json)
    if listing or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _list(desk, tasks, state, as_json)
    from .review.screen import ReviewScreen

    screen = ReviewScreen(desk, tasks, recheck)
    screen.run()
    for line in screen.decisions:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(screen.return_code or PASS)


@app.command()
def retire(
    kernel: Annotated[str, typer.Argument(help="An accepted kernel.", metavar="ID")],
    reason: ReasonOption = None,
    reviewer: ReviewerOption = None,
    tasks_file: TasksOption = None,
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take an accepted kernel out of service; it stays in the library with its history."""
    _one("retire", kernel, reason, reviewer, False, tasks_file, library, as_json)


@app.command()
def restore(
    kernel: Annotated[
        str, typer.Argument(help="A retired or rejected kernel, or one with changes requested.", metavar="ID")
    ],
    reason: ReasonOption = None,
    reviewer: ReviewerOption = None,
    recheck: RecheckOption = True,
    tasks_file: TasksOption = None,
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take back the last decision about a kernel; the history keeps both."""
    _one("restore", kernel, reason, reviewer, recheck, tasks_file, library, as_json)


def _one(verb: str, kernel: str, reason, reviewer, recheck: bool, tasks_file, library, as_json: bool) -> None:
    from .review.session import Review, default_reviewer

    desk = Review(_library(library), _suite(tasks_file), default_reviewer() if reviewer is None else reviewer)
    raise typer.Exit(_decide(desk, [(verb, kernel)], reason, None, recheck, as_json))


# --- deciding ---


class _Rechecks:
    """The worker that evidence is done again with; started for the first kernel that needs it."""

    def __init__(self, desk: Any, stack: ExitStack, progress: Progress):
        self.desk, self.stack, self.progress, self.pool = desk, stack, progress, None

    def __call__(self, passport: Any) -> Any:
        from verifier.pool import Pool

        from .review.recheck import recheck

        def worker() -> Any:
            self.pool = self.pool or self.stack.enter_context(Pool())
            return self.pool

        name = self.desk.name(passport)
        say = lambda stage: self.progress(name, f"doing the evidence again: {stage}")  # noqa: E731
        try:
            return recheck(passport, self.desk.library, self.desk.suite, worker, say)
        finally:
            self.progress.done(name)


def _decide(
    desk: Any, wanted: list[tuple[str, str]], reason: str | None, seen: str | None, again: bool, as_json: bool
) -> int:
    """Carry out decisions one by one; one that is refused hinders no other."""
    from .review.recheck import not_rechecked
    from .review.session import Outcome, Refused

    if not (reason or "").strip():
        raise HarnessError("a decision needs a reason: --reason TEXT")
    results, code = [], PASS
    with ExitStack() as stack, Progress(as_json) as progress:
        rechecks = _Rechecks(desk, stack, progress)
        for verb, name in wanted:
            state = "unknown"
            try:
                passport = desk.find(name)
                state, token, evidence = passport.state, seen or desk.library.seen(passport), None
                if desk.leads_to_service(passport, verb):
                    evidence = rechecks(passport) if again else not_rechecked("--no-recheck")
                passport = desk.decide(passport, verb, reason, token, evidence)
                last = passport.history[-1].model_dump()
                results.append(
                    Outcome(f"{passport.task}/{passport.kernel}", verb, True, passport.state, desk.said(passport), last)
                )
            except Refused as e:
                code = max(code, FAIL)
                results.append(Outcome(name, verb, False, state, desk.told(str(e))))
            except LibraryError as e:
                code = ERROR
                results.append(Outcome(name, verb, False, state, desk.told(str(e))))
    if as_json:
        emit([r.as_dict() for r in results])
    for r in results:
        if not r.done:
            err.print(Text.assemble(("not done: ", "red"), r.says), soft_wrap=True)
        elif not as_json:
            out.print(r.says, markup=False, highlight=False, soft_wrap=True)
    return code


def _auto_accept(desk: Any, name: str, file: Path | None, tasks: list[str] | None, again: bool, as_json: bool) -> int:
    """Hold every proposed kernel against a rule, the fastest first, so that of two rivals the better one wins.

    Of two that are the same code the older one wins.
    """
    from .review.rule import judge, read_rule
    from .review.session import Refused

    rule, results, code = read_rule(name, file), [], PASS
    if rule.evidence and not again:
        raise HarnessError(f"rule {name} asks for evidence that reproduces; leave out --no-recheck")
    entries, problems = desk.queue(tasks)
    with ExitStack() as stack, Progress(as_json) as progress:
        rechecks = _Rechecks(desk, stack, progress)
        for entry in sorted(entries, key=lambda e: (-e.speed, e.passport.created)):
            passport = desk.find(entry.name)
            card = desk.card(passport)
            conditions, done = judge(rule, card, passport, lambda p=passport: rechecks(p))
            result = {"id": entry.name, "accepted": False, "conditions": [desk.told(c.as_dict()) for c in conditions]}
            results.append(result)
            if all(c.holds for c in conditions):
                reason = "; ".join(c.says for c in conditions)
                try:
                    kept = desk.decide(passport, "accept", reason, card.seen, done, reviewer=f"rule:{name}")
                    result |= {"accepted": True, "says": desk.said(kept)}
                except Refused as e:
                    code, result["says"] = FAIL, desk.told(str(e))
            else:
                missed = "; ".join(c["says"] for c in result["conditions"] if not c["holds"])
                result["says"] = f"left {entry.name}: {missed}"
    if as_json:
        emit({"rule": name, "about": rule.about, "kernels": results, "problems": problems})
    else:
        for line in [*(r["says"] for r in results), *problems]:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        count = sum(r["accepted"] for r in results)
        out.print(
            f"rule {name} ({rule.about}): {count} of {len(results)} accepted",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return code


# --- looking ---


def _show(desk: Any, names: list[str], as_json: bool) -> None:
    from .review.present import whole

    cards = [desk.card(desk.find(n)) for n in names]
    if as_json:
        return emit([c.as_dict() for c in cards] if len(cards) > 1 else cards[0].as_dict())
    for card in cards:
        out.print(whole(card, out.width, "its evidence is done again when it is accepted"))
    return None


def _list(desk: Any, tasks: list[str] | None, state: str, as_json: bool) -> None:
    entries, problems = desk.queue(tasks, state)
    if as_json:
        return emit({"queue": [e.as_dict() for e in entries], "problems": problems})
    table = Table(Column("kernel", overflow="fold"), "state", "evidence", "sizes", "vs GEMM", box=None)
    for e in entries:
        p = e.passport
        # a name is there to be copied, so it is never cut off; its id alone names it, too
        name = e.name if out.width >= 100 else e.name.replace("/", "/\n  ")
        table.add_row(name, p.state, p.status_text, str(len(p.timings) or "-"), f"{e.speed:.2f}" if e.speed else "-")
    out.print(table if entries else f"nothing is {state} in {desk.library.root}", highlight=False)
    for problem in problems:
        out.print(Text.assemble(("unreadable: ", "red"), problem), soft_wrap=True)
    if entries and state == "proposed":
        say: Callable[[str], None] = lambda text: out.print(text, markup=False, highlight=False, soft_wrap=True)
        say("Read one: coda-agent review --show ID. Decide: --accept, --reject, --request-changes ID, --reason TEXT.")
        say("On a terminal, 'coda-agent review' shows one after the other.")
    return None
