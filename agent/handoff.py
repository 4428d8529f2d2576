"""Hand-off: a kernel written outside of the loop, by any agent or person, through the same gates."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from generated.library import Library, Passport
from reference_kernels.tasks import Suite, Task
from verifier.check import Report, check
from verifier.pool import Pool
from verifier.verdict import HarnessError

from .feedback import on_check
from .generate import keep, passport_of
from .prompt import render

_AUTHOR = re.compile(r"^[a-z][a-z0-9-]*:[A-Za-z0-9][A-Za-z0-9._@/ -]*$")
_PEOPLE = ("human", "expert")  # what stands behind the colon is not a model
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)^```", re.M | re.S)


@dataclass
class Known:
    """What the sender knows of how the kernel came to be; what it does not know stays empty."""

    author: str
    attempts: int | None = None
    prompt_sha256: str | None = None
    tokens: int | None = None
    dollars: float | None = None

    def __post_init__(self) -> None:
        kind = self.author.split(":")[0]
        if not _AUTHOR.match(self.author) or kind == "expert":
            raise HarnessError(f"author {self.author!r}: give KIND:NAME, for example claude:MODEL or human:ada")
        if self.prompt_sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", self.prompt_sha256):
            raise HarnessError("--prompt-sha is the 64 hexadecimal digits that 'coda-agent prompt TASK --sha' prints")

    @property
    def model(self) -> str | None:
        kind, name = self.author.split(":", 1)
        return None if kind in _PEOPLE else name


@dataclass
class Submission:
    """The report of the check, the text for the sender, and the passport when the kernel was kept."""

    report: Report
    feedback: str
    passport: Passport | None
    path: Path | None


def kernel_text(text: str) -> str:
    """The kernel file in what an author sent: the text itself, or its one fenced code block."""
    blocks = _FENCE.findall(text)
    return blocks[0] if len(blocks) == 1 else text


def submit(
    text: str, task: Task, suite: Suite, library: Library, pool: Pool, known: Known, progress: Callable[[str], None]
) -> Submission:
    """Check a kernel and keep it in the library when it passes."""
    source = kernel_text(text)
    report = check(source, task, pool, author=known.author, suite_path=suite.path, progress=progress)
    if not report.passed:
        return Submission(report, on_check(report, task), None, None)
    passport = passport_of(report, task, known.author, None, known.attempts)
    passport.model, passport.prompt_sha256 = known.model, known.prompt_sha256
    if known.prompt_sha256:
        prompt = render(task, suite, library=library)
        if prompt.sha256 == known.prompt_sha256:  # else it was another version of the prompt: its tips are not known
            passport.tips = list(prompt.tips)
    passport.cost = {k: v for k, v in (("tokens", known.tokens), ("dollars", known.dollars)) if v is not None}
    keep(library, source, passport)
    return Submission(report, on_check(report, task), passport, library.path(passport))
