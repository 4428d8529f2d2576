"""One reviewer at work on a library: the queue, the cards, the decisions."""

from __future__ import annotations

import getpass
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from agent import tips
from generated.library import Conflict, Library, LibraryError
from generated.passport import Decision, Passport, State, Verb
from reference_kernels.tasks import Suite
from verifier.verdict import HarnessError

from .blind import Mask, alias
from .compare import base_of, resources, speed, timing_rows, unified
from .notes import DEAF
from .recheck import Recheck

PAST = {
    "accept": "accepted", "reject": "rejected", "request changes": "asked for changes to", "retire": "retired",
    "restore": "restored",
}  # fmt: skip


class Refused(Exception):
    """A decision is not made; the message says why and what to do."""


@dataclass
class Card:
    """Everything a reviewer needs to decide about one kernel. ``origin`` is None in blind review."""

    name: str  # task/kernel, or its alias in blind review
    task: str
    state: str
    status: str
    summary: str
    math: str
    ops: list[str]
    source: str
    base: dict[str, Any]  # {"what", "why", "name", "source"}
    diff: list[str]  # unified, with whole texts as context
    verdicts: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    resources: dict[str, dict[str, int | None]]
    isolation: str
    toolchain: dict[str, str]
    origin: dict[str, Any] | None
    history: list[dict[str, Any]]
    problems: list[str]  # why it cannot be decided about, if so
    seen: str  # for a decision that rests on this card

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Entry:
    """A kernel in the queue."""

    name: str
    passport: Passport
    speed: float  # against the bare GEMM; 0 when nothing was timed

    def as_dict(self) -> dict[str, Any]:
        p = self.passport
        return {
            "id": self.name, "task": p.task, "state": p.state, "status": p.status_text,
            "speed_vs_gemm": round(self.speed, 3) or None, "sizes_timed": len(p.timings),
        }  # fmt: skip


@dataclass
class Outcome:
    """A decision as it was made or refused."""

    name: str
    verb: Verb
    done: bool
    state: str
    says: str
    decision: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def default_reviewer() -> str:
    """``git config user.name``, else the login name, else "human"."""
    try:
        named = subprocess.run(
            ["git", "config", "user.name"], capture_output=True, text=True, timeout=10
        ).stdout.strip()
        return named or getpass.getuser()
    except (OSError, KeyError, subprocess.TimeoutExpired):
        return "human"


class Review:
    """The library as one reviewer sees it. Everything is read afresh on every call.

    Args:
        blind: authors are hidden, kernels go by aliases.

    Raises:
        HarnessError: no name, or the name of a rule, for a person.
    """

    def __init__(self, library: Library, suite: Suite, reviewer: str, blind: bool = False, tips_log: Path = tips.LOG):
        self.reviewer = reviewer.strip()
        if not self.reviewer or self.reviewer.startswith("rule:"):
            raise HarnessError("a decision needs the name of a reviewer: --reviewer NAME (not 'rule:...')")
        self.library, self.suite, self.blind, self.tips_log = library, suite, blind, tips_log

    # --- looking ---

    def name(self, passport: Passport) -> str:
        return alias(passport.task, passport.kernel) if self.blind else f"{passport.task}/{passport.kernel}"

    def told(self, value: Any, passports: list[Passport] | None = None) -> Any:
        """A text or JSON value as this reviewer may see it."""
        return Mask(self.library, passports or self.library.scan()[0])(value) if self.blind else value

    def queue(self, tasks: list[str] | None = None, state: str = "proposed") -> tuple[list[Entry], list[str]]:
        """Kernels in a state (or "all"), and what is wrong with unreadable passports.

        Raises:
            LibraryError: there is no such state, or a task has no kernel in the library.
        """
        if state not in (states := (*get_args(State), "all")):
            raise LibraryError(f"no state {state!r}; there is: {', '.join(states)}")
        passports, problems = self.library.scan()
        here = {p.parent.name for p in self.library.root.glob("*/*.json")}
        if unknown := set(tasks or ()) - here:
            raise LibraryError(f"no kernel in {self.library.root} for {', '.join(sorted(unknown))}")
        wanted = [p for p in passports if (not tasks or p.task in tasks) and state in ("all", p.state)]
        entries = [Entry(self.name(p), p, speed(p)) for p in wanted]
        if self.blind:  # ids sort by author
            entries.sort(key=lambda e: e.name)
            hint = " (leave blind review to see the path)"
            problems = [self.told(p, passports) + hint for p in problems]
        return entries, problems

    def find(self, name: str) -> Passport:
        """A kernel by the name that the queue shows, or by its bare id.

        Raises:
            LibraryError: none or several match, or its passport is corrupt.
        """
        passports, problems = self.library.scan()
        if self.blind:
            found = [p for p in passports if self.name(p) == name]
            if not found and any(name in (p.kernel, f"{p.task}/{p.kernel}") for p in passports):
                raise LibraryError(
                    "in blind review kernels go by aliases; 'coda-agent review --blind --list' shows them"
                )
        else:
            found = [p for p in passports if name in (p.kernel, f"{p.task}/{p.kernel}", alias(p.task, p.kernel))]
        if not found:
            stem = name.rpartition("/")[2]
            if broken := [p for p in problems if f"/{stem}.json " in p]:
                raise LibraryError(self.told(broken[0]))
            raise LibraryError(
                f"no kernel {name!r} in {self.library.root}; 'coda-agent review --list' shows what there is"
            )
        if len(found) > 1:
            raise LibraryError(f"{name!r} names several kernels: {', '.join(map(self.name, found))}")
        return found[0]

    def card(self, passport: Passport) -> Card:
        """What there is to know about a kernel, at this moment."""
        passports, _ = self.library.scan()
        passport = next((p for p in passports if (p.task, p.kernel) == (passport.task, passport.kernel)), passport)
        task, problems, source = self.suite.tasks.get(passport.task), [], ""
        try:
            source = self.library.source(passport)
        except LibraryError as e:
            problems.append(str(e))
        if task is None:
            problems.append(f"{self.suite.path} has no task {passport.task}; give its suite with --tasks FILE")
        base = base_of(passport, source, self.library, passports)
        names = self.name(base.passport) if base.passport else "nothing accepted", self.name(passport)
        card = Card(
            name=names[1],
            task=passport.task,
            state=passport.state,
            status=passport.status_text,
            summary=task.summary if task else "",
            math=task.math.rstrip() if task else "",
            ops=list(map(str, task.ops)) if task else [],
            source=source,
            base={"what": base.what, "why": base.why, "name": names[0], "source": base.source},
            diff=unified(base.source, source, names),
            verdicts=[{k: v[k] for k in ("stage", "passed", "reason")} for v in (*passport.check, *passport.measure)],
            timings=timing_rows(passport, base, task),
            resources=resources(base.passport, passport),
            isolation=passport.isolation,
            toolchain=passport.toolchain,
            origin=None if self.blind else self._origin(passport),
            history=[d.model_dump() for d in passport.history],
            problems=problems,
            seen=self.library.seen(passport),
        )
        return Card(**self.told(card.as_dict(), passports)) if self.blind else card

    def _origin(self, p: Passport) -> dict[str, Any]:
        claims = {t.id: t.claim for t in tips.read_tips(self.tips_log)}
        used = [{"id": i, "claim": claims.get(i, "no longer in the tips log")} for i in p.tips]
        kept = ("author", "model", "run", "attempts", "cost", "prompt_sha256", "created")
        return {**{k: getattr(p, k) for k in kept}, "tips": used}

    # --- deciding ---

    def leads_to_service(self, passport: Passport, verb: Verb) -> bool:
        """Whether this decision puts the kernel into the library's service, so that its evidence must hold."""
        if passport.refusal(verb):
            return False
        after = passport.model_copy(update={"history": [*passport.history, self._decision(verb, "?", {}, False)]})
        return after.state == "accepted"

    def _decision(self, verb: Verb, reason: str, evidence: dict, blind: bool, reviewer: str = "") -> Decision:
        return Decision(verb=verb, reviewer=reviewer or self.reviewer, reason=reason, evidence=evidence, blind=blind)

    def decide(
        self, passport: Passport, verb: Verb, reason: str, seen: str, evidence: Recheck | dict | None = None, *,
        blind: bool | None = None, reviewer: str = "",
    ) -> Passport:  # fmt: skip
        """Write one decision at once.

        Args:
            seen: the card's, so that nobody decides on what has changed since.
            evidence: the recheck that it rests on, or why there was none.
            blind: whether the author was hidden until now (default: the mode of this review).
            reviewer: instead of this reviewer, for a rule.

        Raises:
            Refused: no reason given, the evidence does not reproduce, not possible in this
                state, or the library changed since ``seen``.
            LibraryError: it cannot be written.
        """
        if not reason.strip():
            raise Refused("a decision needs a reason: it is what the author and the next reviewer read")
        if isinstance(evidence, Recheck) and not evidence.reproduces:
            raise Refused(
                f"{self.name(passport)} was not {PAST[verb]}: its evidence does not reproduce: {evidence.says}"
            )
        if passport.refusal(verb):
            raise Refused(passport.refusal(verb))
        facts = evidence.as_dict() if isinstance(evidence, Recheck) else evidence or {}
        hidden = self.blind if blind is None else blind
        try:
            return self.library.decide(passport, self._decision(verb, reason.strip(), facts, hidden, reviewer), seen)
        except Conflict as e:
            raise Refused(str(e)) from e

    @staticmethod
    def said(passport: Passport) -> str:
        """What to say of the decision just made; the author is no longer hidden."""
        last, name = passport.history[-1], f"{passport.task}/{passport.kernel}"
        who = f" (written by {passport.author})" if last.blind else ""
        text = f"{PAST[last.verb]} {name}{who}" + (f", now {passport.state}" if last.verb == "restore" else "")
        if last.verb == "request changes":
            if passport.author.partition(":")[0] == DEAF:
                return f"{text}; the {DEAF} is built in and reads no notes: another author has to take the task up"
            return f"{text}; the note is in the next prompt for {passport.task}"
        return text
