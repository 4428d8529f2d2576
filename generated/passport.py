"""The passport: the record beside every kernel, with everything people decided about it."""

from __future__ import annotations

import datetime
import hashlib
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Status = Literal["checked", "measured"]
State = Literal["proposed", "changes requested", "rejected", "accepted", "retired"]
Verb = Literal["accept", "request changes", "reject", "retire", "restore"]

STATUS_TEXT = {"checked": "checked, not measured", "measured": "measured"}
# what a decision makes of a kernel; "restore" takes back the last decision that still holds
_BECOMES: dict[str, State] = {
    "accept": "accepted", "request changes": "changes requested", "reject": "rejected", "retire": "retired"
}  # fmt: skip
_ALLOWED: dict[State, tuple[str, ...]] = {
    "proposed": ("accept", "request changes", "reject"),
    "changes requested": ("accept", "reject", "restore"),
    "rejected": ("accept", "restore"),
    "accepted": ("retire",),
    "retired": ("accept", "restore"),
}


def now() -> str:
    """This moment in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Decision(BaseModel):
    """One step of a kernel's review history; never changed after it is written."""

    model_config = ConfigDict(extra="forbid")

    verb: Verb
    reviewer: str = Field(min_length=1)  # a person's name, or "rule:<name>" for an automatic decision
    reason: str = Field(min_length=1)
    at: str = Field(default_factory=now)
    blind: bool = False  # the author was hidden until the decision
    evidence: dict[str, Any] = {}  # what was checked again at the moment of deciding


class Passport(BaseModel):
    """The record beside every kernel: where it came from, what was proven, how fast it is, who accepted it."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[2] = 2
    kernel: str  # id: <author>-<first 8 of the source hash>
    task: str
    author: str
    source_sha256: str
    status: Status = "checked"
    created: str = Field(default_factory=now)
    run: str | None = None
    model: str | None = None
    prompt_sha256: str | None = None
    tips: list[str] = []
    attempts: int | None = None
    cost: dict[str, Any] = {}
    isolation: str = ""
    toolchain: dict[str, str] = {}
    check: list[dict] = []  # verdicts of the GPU-free stages
    measure: list[dict] = []  # verdicts of the GPU stages
    timings: list[dict] = []  # the newest row per device and shape
    device: dict[str, Any] = {}
    ceilings: dict[str, Any] = {}
    history: list[Decision] = []

    @model_validator(mode="before")
    @classmethod
    def _older(cls, data: Any) -> Any:
        """Format 1 had one reviewer and review, never filled by any version."""
        if isinstance(data, dict) and data.get("format") == 1:
            data = {k: v for k, v in data.items() if k not in ("reviewer", "review")} | {"format": 2}
        return data

    @model_validator(mode="after")
    def _possible(self) -> Passport:
        """A history is a walk through the states; anything else was written by hand."""
        steps, self.history = self.history, []
        for step in steps:
            if refusal := self.refusal(step.verb):
                raise ValueError(f"history: cannot {step.verb}, {refusal}")
            self.history = [*self.history, step]
        return self

    @property
    def status_text(self) -> str:
        return STATUS_TEXT[self.status]

    @property
    def standing(self) -> list[Decision]:
        """Decisions that still hold, oldest first: each "restore" takes back the one before it."""
        held: list[Decision] = []
        for decision in self.history:
            if decision.verb == "restore":
                held.pop()
            else:
                held.append(decision)
        return held

    @property
    def state(self) -> State:
        return _BECOMES[self.standing[-1].verb] if self.standing else "proposed"

    @property
    def reviewer(self) -> str | None:
        return self.standing[-1].reviewer if self.standing else None

    @property
    def review(self) -> str | None:
        return self.standing[-1].reason if self.standing else None

    def refusal(self, verb: str) -> str:
        """Why this decision is not possible now, or an empty string."""
        if verb in _ALLOWED[self.state]:
            return ""
        return f"{self.task}/{self.kernel} is {self.state}; possible now: {', '.join(_ALLOWED[self.state])}"


def kernel_id(author: str, source: str) -> str:
    """``composer-1a2b3c4d``: stable for the same author and text."""
    slug = re.sub(r"[^a-z0-9.]+", "-", author.lower()).strip("-")
    return f"{slug}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
