"""The loop: an author answers, its calls are carried out, every step is journalled first.

The history is linear and only grows: what is stored is what was sent, so a run that
was cut off goes on from its journal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .authors import Author, Call, Fatal, Transient, Turn
from .budget import CHARS_PER_TOKEN, Ledger, Usage
from .prompt import Prompt
from .redact import redact
from .tools import Candidate, Desk

EndingName = Literal["accepted", "budget", "gave up", "refused", "error"]
IDLE_TURNS = 3  # answers without a call before the author counts as having given up
RETRIES = 8  # of one call; with doubling waits that is several minutes of overload
LONGEST_WAIT = 60.0  # seconds between two tries, unless the provider asks for more
LONGEST_ASKED = 900.0  # seconds; a provider that asks for more is better resumed later
FINAL = ("accepted", "gave up", "refused")  # endings that a resume leaves alone


class Interrupted(Exception):
    """The run was stopped from outside; the conversation goes on with a resume."""


@dataclass
class Ending:
    """How a conversation ended. ``accepted``: a candidate passed, whatever stopped the conversation afterwards."""

    name: EndingName
    reason: str
    candidate: Candidate | None
    attempts: int
    usage: Usage
    dollars: float | None  # None: the model's price is unknown
    last_failure: str  # of the last check that failed
    prompt: Prompt | None

    def as_dict(self) -> dict:
        return {
            "ending": self.name, "reason": self.reason, "attempts": self.attempts,
            "accepted_attempt": self.candidate.attempt if self.candidate else None,
            "tokens": self.usage.total, "usage": vars(self.usage), "dollars": self.dollars,
        }  # fmt: skip


class Conversation:
    """One author at work on one task.

    Args:
        log: journals an event of this conversation.
        earlier: the events of this conversation from before a resume.
        first_wait: seconds before the first retry; doubles with each.
    """

    def __init__(
        self,
        author: Author,
        prompt: Prompt | None,
        desk: Desk,
        ledger: Ledger,
        log: Callable[..., None],
        earlier: list[dict] = (),
        first_wait: float = 1.0,
    ):
        self.author, self.prompt, self.desk, self.ledger, self.log = author, prompt, desk, ledger, log
        self.first_wait = first_wait
        self.history = [e["entry"] for e in earlier if e["event"] == "message"]
        calls = [e for e in earlier if e["event"] == "call"]
        self.usage = sum((Usage(**e["usage"]) for e in calls), Usage())
        self.dollars = sum(e["dollars"] or 0 for e in calls) if ledger.price else None
        self._last_prompt = calls[-1]["usage"] if calls else None
        self._over = next(
            (e for e in reversed(earlier) if e["event"] == "conversation_end" and e["ending"] in FINAL), None
        )
        desk.restore(earlier)

    def run(self) -> Ending:
        """Go on until the conversation ends; whatever the author or its provider does becomes an ending.

        Raises:
            Interrupted: the ledger was stopped.
        """
        if self._over:  # finished before a resume
            e = self._over
            return self._ending(e["ending"], e["reason"])
        try:
            name, reason = self._steps()
        except Fatal as e:
            name, reason = "error", str(e)
        passed = self.desk.passed
        if passed and name != "accepted":
            name, reason = (
                "accepted",
                f"attempt {passed.attempt} had passed when the conversation ended ({name}: {reason})",
            )
        ending = self._ending(name, reason)
        self.log("conversation_end", **ending.as_dict())
        return ending

    def _ending(self, name: EndingName, reason: str) -> Ending:
        desk = self.desk
        return Ending(
            name, redact(reason), desk.passed, desk.checked, self.usage, self.dollars, desk.last_reason, self.prompt
        )

    def _steps(self) -> tuple[EndingName, str]:
        idle = 0
        if not self.history:
            self._add({"role": "user", "text": self.prompt.task if self.prompt else self.desk.task.name})
        while True:
            last = self.history[-1]
            if last["role"] == "assistant" and last["calls"]:  # open calls, also after a resume
                results = [self.desk.answer(Call(**c)) for c in last["calls"]]
                self._add({"role": "results", "results": results})
                if self.desk.over:
                    return self.desk.over
            elif last["role"] == "assistant":
                self._add({"role": "user", "text": _nudge(last["stop"])})
            if stop := self._spent():
                return stop
            turn = self._ask()
            if turn.stop == "refused":
                return "refused", turn.text
            idle = 0 if turn.calls else idle + 1
            if turn.calls or turn.text.strip():
                self._add(turn.entry())
            else:  # an empty answer cannot be sent back
                self.log("empty_answer", entry=turn.entry())
                self._add({"role": "user", "text": _nudge(turn.stop)})
            if idle > IDLE_TURNS:
                return "gave up", f"{idle} answers in a row called no tool"

    def _add(self, entry: dict) -> None:
        self.log("message", entry=entry)
        self.history.append(entry)

    def _spent(self) -> tuple[EndingName, str] | None:
        """The reason not to ask again, checked before every call."""
        allowed = self.ledger.limits.attempts
        if allowed is not None and self.desk.checked >= allowed:
            if self.desk.passed:
                return "accepted", f"all {allowed} attempts used"
            return "budget", f"all {allowed} attempts used; the last: {self.desk.last_reason}"
        if self.ledger.stopped.is_set():
            raise Interrupted
        reason = self.ledger.exhausted(self._next_prompt())
        return ("budget", reason) if reason else None

    def _next_prompt(self) -> int:
        """Estimate of the tokens that the next call reads."""
        if self.author.model is None:
            return 0
        if self._last_prompt:
            last = Usage(**self._last_prompt)
            return last.total + int(len(str(self.history[-1])) / CHARS_PER_TOKEN)
        return int(len(self.prompt.text) / CHARS_PER_TOKEN)

    def _ask(self) -> Turn:
        """One turn, tried again while the failure may pass. Every try is paid for and journalled."""
        wait = self.first_wait
        for tries in range(RETRIES + 1):
            room = self.ledger.room(self._next_prompt())
            self.desk.progress("finishing" if self.desk.passed else f"attempt {self.desk.checked + 1}: writing")
            try:
                turn = self.author.reply(
                    self.desk.task, self.prompt, self.desk.tools, self.history, room, self.desk.progress
                )
            except Transient as e:
                self._pay(e.usage, failed=e.reason)
                if tries == RETRIES:
                    raise Fatal(f"{e.reason}; given up after {RETRIES} retries") from e
                if e.wait and e.wait > LONGEST_ASKED:
                    raise Fatal(f"{e.reason}; the provider asks to wait {e.wait:.0f} s, resume the run later") from e
                pause = max(e.wait or 0.0, min(wait, LONGEST_WAIT) * random.uniform(0.5, 1.0))
                wait *= 2
                minutes = self.ledger.limits.minutes
                if minutes is not None and self.ledger.seconds + pause > 60 * minutes:
                    raise Fatal(f"{e.reason}; the next try would be after the {minutes:g} minutes of the budget") from e
                self.desk.progress(f"{redact(e.reason)}; trying again in {pause:.0f} s")
                if self.ledger.stopped.wait(pause):
                    raise Interrupted from e
            else:
                self._pay(turn.usage)
                return turn
        raise AssertionError("unreachable")

    def _pay(self, usage: Usage, failed: str | None = None) -> None:
        dollars = self.ledger.charge(usage)
        self.usage += usage
        if self.dollars is not None:
            self.dollars += dollars or 0.0
        if usage.total:
            self._last_prompt = vars(usage)
        if usage.total or failed:
            self.log("call", usage=vars(usage), dollars=dollars, failed=failed)


def _nudge(stop: str) -> str:
    """What to say after an answer without a call."""
    if stop == "length":
        return "Your answer reached its length limit before any call. Think less, and call check_kernel with the whole file."
    return "That answer called no tool, so nothing happened. Call check_kernel with the whole file, or finish."
