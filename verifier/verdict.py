"""Verdicts: what a stage says about a candidate."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Stage = Literal["policy", "interpret", "compile", "resources", "numerics", "timing"]


class Verdict(BaseModel):
    """One stage's judgement: passed or not, a reason for people and prompts, the evidence."""

    stage: Stage
    passed: bool
    reason: str
    evidence: dict[str, Any] = Field(default_factory=dict)
    seconds: float = 0.0


class HarnessError(RuntimeError):
    """The harness itself failed (not the candidate); the message says what to do next."""
