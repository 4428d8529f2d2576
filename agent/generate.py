"""The main job: an author writes, the verifier checks, survivors are measured and kept."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from generated.library import Library, Passport, kernel_id
from leaderboard.records import append, record, results_file
from reference_kernels.tasks import Suite, Task
from verifier.bundle import build
from verifier.check import Report
from verifier.gpu import GpuWorker, NoGpu, require_gpu
from verifier.manifest import toolchain
from verifier.measure import Measurement, Session, read_bundle
from verifier.pool import Pool
from verifier.resources import spills

from . import tips
from .authors import Author
from .budget import Ledger
from .composer import CannotCompose
from .conversation import Conversation, Ending
from .prompt import Prompt, render
from .review.notes import withdrawn
from .run import Run
from .tools import Desk

Progress = Callable[[str, str], None]  # (task, what is happening)


@dataclass
class Outcome:
    """How one task of a run ended."""

    task: str
    ending: str  # "kept", or why not: "failed", "cannot compose", "budget", "gave up", "refused", "error"
    reason: str
    attempts: int
    kernel: str | None = None
    seconds: float = 0.0  # of checking
    tokens: int = 0
    dollars: float | None = None

    def as_dict(self) -> dict:
        return dict(vars(self))


@dataclass
class Job:
    """What all conversations of one run share.

    ``samples`` conversations are held per task, ``jobs`` at once over all tasks.
    """

    author: Author
    suite: Suite
    library: Library
    pool: Pool
    run: Run
    ledger: Ledger
    progress: Progress
    samples: int = 1
    jobs: int = 1
    gpu: bool = False  # offer measure_kernel
    tips_log: Path = tips.LOG
    first_wait: float = 1.0  # seconds before the first retry of a failed call

    def prompt(self, task: Task, earlier: list[dict]) -> Prompt | None:
        """What the author is told, kept in the run; None for an author that reads no prompt.

        A conversation that goes on keeps the prompt it began with.
        """
        if self.author.model is None:
            return None
        begun = next((e["sha256"] for e in earlier if e["event"] == "prompt"), None)
        if begun:
            return self.run.prompt(begun)
        attempts = self.ledger.limits.attempts or 0
        prompt = render(
            task, self.suite, tools=True, can_measure=self.gpu, attempts=attempts,
            tips=tips.active_tips(self.tips_log), library=self.library, author=self.author.name,
        )  # fmt: skip
        self.run.keep_prompt(prompt)
        return prompt


def generate(job: Job, tasks: list[Task], done: Callable[[Outcome], None]) -> None:
    """Hold the conversations for every task, keep the best kernel of each; ``done`` hears each outcome.

    An interrupt ends the running conversations before their next step and is raised again.
    """
    earlier: dict[tuple[str, int], list[dict]] = {}
    for event in job.run.events():
        if "sample" in event:
            earlier.setdefault((event["task"], event["sample"]), []).append(event)

    def one(task: Task, sample: int) -> Ending | CannotCompose:
        return converse(job, task, sample, earlier.get((task.name, sample), []))

    try:
        if job.jobs == 1:  # in this thread: Ctrl-C ends the step in flight
            for task in tasks:
                done(keep_best(job, task, [one(task, s) for s in range(1, job.samples + 1)]))
            return
        with ThreadPoolExecutor(job.jobs) as executor:
            try:
                futures = {t.name: [executor.submit(one, t, s) for s in range(1, job.samples + 1)] for t in tasks}
                for task in tasks:
                    done(keep_best(job, task, [f.result() for f in futures[task.name]]))
            except BaseException:
                job.ledger.stopped.set()
                executor.shutdown(wait=False, cancel_futures=True)
                raise
    except BaseException:
        job.ledger.stopped.set()
        raise


def converse(job: Job, task: Task, sample: int, earlier: list[dict]) -> Ending | CannotCompose:
    """One conversation about one task; an op that the composer has no rule for is returned, not raised."""
    log = partial(job.run.log, task=task.name, sample=sample)
    label = task.name if job.samples == 1 else f"{task.name} #{sample}"
    desk = Desk(
        task, job.suite, job.pool, job.author.name, log, lambda text: job.progress(label, text),
        attempts=lambda: job.ledger.limits.attempts, gpu=job.gpu, tips_log=job.tips_log, without=withdrawn(job.library),
    )  # fmt: skip
    prompt = job.prompt(task, earlier)
    if prompt and not any(e["event"] == "prompt" for e in earlier):
        log("prompt", sha256=prompt.sha256, tips=prompt.tips, examples=prompt.examples)
    try:
        return Conversation(job.author, prompt, desk, job.ledger, log, earlier, job.first_wait).run()
    except CannotCompose as e:
        log("cannot_compose", reason=str(e))
        return e


def keep_best(job: Job, task: Task, endings: list[Ending | CannotCompose]) -> Outcome:
    """Put the best accepted candidate of a task into the library and say how the task ended."""
    first = endings[0]
    if isinstance(first, CannotCompose):
        return Outcome(task.name, "cannot compose", str(first), 1)
    tokens, costs = sum(e.usage.total for e in endings), [e.dollars for e in endings]
    accepted = [e for e in endings if e.candidate]
    if not accepted:
        # an author without a model has one kernel per task: it fails rather than gives up
        ending = first.name if job.author.model else "failed"
        reason = first.reason if job.author.model else first.last_failure
        return Outcome(task.name, ending, reason, sum(e.attempts for e in endings), tokens=tokens, dollars=total(costs))
    best = min(accepted, key=lambda e: _rank(e.candidate.report))
    report = best.candidate.report
    passport = passport_of(report, task, job.author.name, job.run.id, best.candidate.attempt)
    if job.author.model:
        passport.model, passport.prompt_sha256, passport.tips = (
            job.author.model,
            best.prompt.sha256,
            list(best.prompt.tips),
        )
        passport.cost = {
            "tokens": best.usage.total,
            **vars(best.usage),
            "dollars": best.dollars,
            "samples": len(endings),
        }
    keep(job.library, report.source, passport)
    seconds = sum(e.candidate.report.seconds for e in accepted)
    reason = report.verdicts[-1].reason
    return Outcome(
        task.name, "kept", reason, sum(e.attempts for e in endings), passport.kernel, seconds, tokens, total(costs)
    )


def total(costs: list[float | None]) -> float | None:
    """Sum of dollars; None when any is unknown."""
    return None if None in costs else sum(costs)


def _rank(report: Report) -> tuple:
    """Order of accepted kernels before they are measured: fewer spills, special functions, instructions, characters."""
    used = next(v.evidence for v in report.verdicts if v.stage == "resources")
    counts = used["counts"]
    return (
        spills(counts),
        sum(used["mufu"].values()),
        used["instructions"],
        len(report.source),
    )


def keep(library: Library, source: str, passport: Passport) -> None:
    """Add a checked kernel; what was measured of the same text before stays with it."""
    before = next((p for p in library.passports(passport.task) if p.kernel == passport.kernel), None)
    if before:
        measured = ("status", "measure", "timings", "device", "ceilings", "history", "created")
        passport = passport.model_copy(update={f: getattr(before, f) for f in measured})
    library.add(source, passport)


def passport_of(report: Report, task: Task, author: str, run: str | None, attempts: int | None) -> Passport:
    """The passport of a candidate that passed the check."""
    return Passport(
        kernel=kernel_id(author, report.source),
        task=task.name,
        author=author,
        source_sha256=hashlib.sha256(report.source.encode()).hexdigest(),
        run=run,
        attempts=attempts,
        isolation=report.isolation,
        toolchain=toolchain(),
        check=[v.model_dump() for v in report.verdicts],
    )


def measure_bundle(
    directory: Path,
    library: Library,
    baselines: tuple[str, ...],
    progress: Callable[[str], None],
    tasks: list[str] | None = None,
    shapes: list | None = None,
) -> tuple[dict, list[Measurement]]:
    """Measure a bundle on this machine's GPU and write the results into the library.

    Every task's results are written before the next is measured: passports, and records in the library's results file.

    Returns:
        Session facts and one measurement per kernel.
    """
    bundle = read_bundle(directory)
    command = measure_command(baselines, tasks, shapes)
    measured: list[Measurement] = []
    with GpuWorker() as worker:
        session = Session(worker, bundle, progress, adapters="leaderboard.baselines")
        chosen = tasks or list(bundle.tasks)
        facts = {"session": session.id, "device": session.device, "ceilings": session.ceilings, "seed": session.seed}
        facts["a_a"] = session.resolution(chosen[0])
        origin = {"session": facts, "commit": bundle.content.get("commit"), "command": command}
        for name in chosen:
            records = []
            for m in session.measure_task(name, baselines, shapes):
                measured.append(m)
                passport = keep_measurement(m, session, bundle.content, library)
                records += [record(row, passport, **origin) for row in m.rows]
            append(results_file(library.root), records)
    return facts, measured


def measure_command(baselines: tuple[str, ...], tasks: list[str] | None, shapes: list | None) -> str:
    """The command that measures like this; the bundle's place is left to who repeats it."""
    options = {"task": tasks or [], "shape": ["x".join(map(str, s)) for s in shapes or []], "baseline": baselines}
    return " ".join(["coda-agent measure BUNDLE", *(f"--{o} {v}" for o, values in options.items() for v in values)])


def keep_measurement(m: Measurement, session: Session, content: dict, library: Library) -> Passport:
    """Add a measurement to the kernel's passport; the newest session replaces rows of the same device and shape.

    The samples of every round are the record's; they would make the passport long.
    """
    source = next(k["source"] for k in content["kernels"] if k["source_sha256"] == m.source_sha256)
    kernel = kernel_id(m.author, source)
    existing = next((p for p in library.passports(m.task) if p.kernel == kernel), None)
    # the versions of the machine that compiled, which need not be this one
    made = (a.toolchain for _, a in session.bundle.artefacts if a.source_sha256 == m.source_sha256)
    compiled_with = next(made, {})  # nothing of it compiled
    passport = existing or Passport(
        kernel=kernel, task=m.task, author=m.author, source_sha256=m.source_sha256, isolation=content["isolation"],
        toolchain=compiled_with,
    )  # fmt: skip
    device = session.device["device"]
    rows = [{k: v for k, v in r.items() if k != "samples_us"} | {"device": device} for r in m.rows]
    replaced = {(r["device"], *r["shape"]) for r in rows}
    passport.timings = [r for r in passport.timings if (r["device"], *r["shape"]) not in replaced] + rows
    passport.measure = [v.model_dump() for v in m.verdicts]
    passport.device, passport.ceilings = session.device, session.ceilings
    if m.passed:
        passport.status, passport.toolchain = "measured", compiled_with
    library.add(source, passport)
    return passport


def measure_here(
    kernels: list[tuple[Task, str, str]], suite: Suite, library: Library, pool: Pool, progress: Progress
) -> None:
    """Bundle freshly checked kernels in a temporary directory and measure them.

    Raises:
        NoGpu: this machine has no usable GPU; the kernels stay "checked, not measured".
    """
    require_gpu()  # fail before compiling hundreds of configurations
    directory = Path(tempfile.mkdtemp(prefix="coda-agent-bundle-"))
    try:
        build(
            kernels, directory, pool, suite=suite.path, progress=lambda d, t: progress("bundle", f"{d} of {t} compiled")
        )
        measure_bundle(directory, library, ("torch.compile",), lambda text: progress("measure", text))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


__all__ = [
    "Job",
    "NoGpu",
    "Outcome",
    "generate",
    "keep",
    "keep_measurement",
    "measure_bundle",
    "measure_here",
    "passport_of",
]
