"""One ``generate`` invocation: from what was asked for to an open run that can be started and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from generated.library import Library
from reference_kernels.tasks import Suite, SuiteError, load_suite
from verifier.pool import Pool
from verifier.verdict import HarnessError

from . import tips
from .authors import Author, make_author
from .budget import Ledger, Limits, price_of, read_limits, write_limits
from .conversation import Interrupted
from .generate import Job, NoGpu, Outcome, Progress, generate, measure_here, require_gpu
from .run import Run

DEFAULT_DOLLARS = 5.0  # of a run by a paid model; enough for the whole suite with room to spare


@dataclass
class Settings:
    """What the user asked for; stands in the journal's first event, so that a resume needs no flags."""

    tasks: list[str]
    author: str = "composer"
    model: str | None = None
    attempts: int = 6
    samples: int = 1
    jobs: int = 1
    dollars: float | None = None
    tokens: int | None = None
    minutes: float | None = None
    price: str | None = None
    thinking: str = "adaptive"
    effort: str | None = None
    no_measure: bool = False
    suite: str | None = None
    library: str | None = None
    tips: str | None = None

    def limits(self, author: Author) -> Limits:
        """Limits of a new run; 0 dollars means none, and no answer means the default for a model."""
        dollars = self.dollars
        if dollars is None and author.model and (price_of(author.model, self.price) or not self.tokens):
            dollars = DEFAULT_DOLLARS
        return Limits(dollars or None, self.tokens, self.minutes, self.attempts)


class Campaign:
    """A run with everything it needs, open and locked."""

    def __init__(self, run: Run, settings: Settings, author: Author, limits: Limits):
        self.run, self.settings, self.author = run, settings, author
        self.suite: Suite = load_suite(Path(settings.suite) if settings.suite else None)
        self.library = Library(Path(settings.library) if settings.library else None)
        price = price_of(author.model, settings.price) if author.model else None
        self.ledger = Ledger(limits, price, run.limits, run.active_seconds())
        for event in run.events():
            if event["event"] == "call":
                self.ledger.enter_earlier(event["usage"], event["dollars"])

    def go(self, pool: Pool, progress: Progress, done: Callable[[Outcome], None]) -> dict[str, Any]:
        """Hold the conversations that are still to be held, keep and measure; returns the summary.

        Raises:
            KeyboardInterrupt: also when a conversation in another thread was stopped.
        """
        settings, run = self.settings, self.run
        # what ended for want of budget, or by a fault of the provider, is taken up again
        ended = {
            n: e["outcome"]
            for n, e in run.finished_tasks().items()
            if e["outcome"]["ending"] not in ("budget", "error")
        }
        results = {n: ended[n] for n in settings.tasks if n in ended}

        def keep(outcome: Outcome) -> None:
            run.log("task_end", task=outcome.task, outcome=outcome.as_dict())
            results[outcome.task] = outcome.as_dict()
            done(outcome)

        job = Job(
            self.author, self.suite, self.library, pool, run, self.ledger, progress, settings.samples, settings.jobs,
            gpu=bool(self.author.model) and not settings.no_measure and _has_gpu(),
            tips_log=Path(settings.tips) if settings.tips else tips.LOG,
        )  # fmt: skip
        try:
            generate(job, [self.suite[n] for n in settings.tasks if n not in ended], keep)
        except Interrupted:
            raise KeyboardInterrupt from None
        measured, why = self._measure(results, pool, progress)
        run.log("end", measured=measured, not_measured_because=why)
        return {
            "run": run.id, "library": str(self.library.root), "measured": measured, "not_measured_because": why,
            "tokens": self.ledger.used.total, "dollars": self.ledger.dollars,
            "tasks": {n: results[n] for n in settings.tasks},
        }  # fmt: skip

    def _measure(self, results: dict[str, dict], pool: Pool, progress: Progress) -> tuple[bool, str]:
        kept = [n for n in self.settings.tasks if results[n]["ending"] == "kept"]
        if not kept or self.settings.no_measure:
            return False, "asked not to"
        kernels = [
            (self.suite[n], self.library.source(self.library.find(f"{n}/{results[n]['kernel']}")), self.author.name)
            for n in kept
        ]
        try:
            measure_here(kernels, self.suite, self.library, pool, progress)
        except NoGpu as e:
            return False, str(e).split(". Measure")[0]
        return True, ""


def _has_gpu() -> bool:
    try:
        require_gpu()
    except NoGpu:
        return False
    return True


def start_run(root: Path, settings: Settings) -> Campaign:
    """Open a new run.

    Raises:
        SuiteError: no task was named.
        HarnessError: the author cannot work here, or the run cannot be written.
    """
    if not settings.tasks:
        raise SuiteError("name at least one task, or use --all")
    author = make_author(settings.author, settings.model, settings.thinking, settings.effort)
    settings.model = author.model
    limits = settings.limits(author)
    Ledger(
        limits, price_of(author.model, settings.price) if author.model else None
    )  # refuses before anything is written
    for field in ("suite", "tips"):  # a resume may come from another directory
        if getattr(settings, field):
            setattr(settings, field, str(Path(getattr(settings, field)).resolve()))
    settings.library = str(Library(Path(settings.library) if settings.library else None).root.resolve())
    run = Run.start(root, **asdict(settings))
    return Campaign(run, settings, author, limits)


def resume_run(root: Path, name: str, asked: Settings, given: set[str]) -> Campaign:
    """Open an earlier run with its own settings; limits that are ``given`` now replace the old ones.

    Raises:
        HarnessError: no such run, or the author cannot work here.
    """
    run = Run.resume(root, name)
    try:
        started = next((e for e in run.events() if e["event"] == "start"), None)
        if started is None or "tasks" not in started:
            raise HarnessError(f"run {run.id} holds no start: it was cut off as it began; start a new one")
        known = {f.name for f in fields(Settings)}
        settings = Settings(**{k: v for k, v in started.items() if k in known})
        for field in ("suite", "library", "tips"):
            setattr(settings, field, getattr(asked, field) or getattr(settings, field))
        settings.no_measure = asked.no_measure or settings.no_measure
        for field in given & {"jobs", "price"}:
            setattr(settings, field, getattr(asked, field))
        author = make_author(settings.author, settings.model, settings.thinking, settings.effort)
        limits = read_limits(run.limits) if run.limits.exists() else settings.limits(author)
        changed = {k: getattr(asked, k) for k in given & {f.name for f in fields(Limits)}}
        if changed.get("dollars") == 0:
            limits, changed = (
                Limits(None, limits.tokens, limits.minutes, limits.attempts),
                {k: v for k, v in changed.items() if k != "dollars"},
            )
        limits = limits.raised(**changed)
        campaign = Campaign(run, settings, author, limits)
        write_limits(run.limits, limits)
        run.log("resume", limits=asdict(limits))
    except BaseException:
        run.close()
        raise
    return campaign
