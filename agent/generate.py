"""The main job: an author writes, the verifier checks, survivors are measured and kept."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from generated.library import Library, Passport, kernel_id
from reference_kernels.tasks import Suite, Task
from verifier.bundle import build
from verifier.check import Report, check
from verifier.gpu import GpuWorker, NoGpu, require_gpu
from verifier.manifest import toolchain
from verifier.measure import Measurement, Session, read_bundle
from verifier.pool import Pool

from .authors import Author
from .composer import CannotCompose
from .run import Run

Progress = Callable[[str, str], None]  # (task, what is happening)


@dataclass
class Outcome:
    """How one task of a run ended."""

    task: str
    ending: str  # "kept", "failed" or "cannot compose"
    reason: str
    attempts: int
    kernel: str | None = None
    seconds: float = 0.0

    def as_dict(self) -> dict:
        return dict(vars(self))


def generate_task(
    task: Task, author: Author, suite: Suite, library: Library, pool: Pool, run: Run, progress: Progress, attempts: int = 1
) -> Outcome:
    """Write, check and keep a kernel for one task; every step is journalled."""
    feedback, attempt, seconds = None, 0, 0.0
    reason = "the author gave up"
    while attempt < attempts:
        attempt += 1
        progress(task.name, f"attempt {attempt}: writing")
        try:
            source = author.write(task, attempt, feedback)
        except CannotCompose as e:
            run.log("cannot_compose", task=task.name, reason=str(e))
            return Outcome(task.name, "cannot compose", str(e), attempt)
        if source is None:
            break
        run.log("candidate", task=task.name, attempt=attempt, author=author.name, source=source)
        report = check(
            source, task, pool, author=author.name, suite_path=suite.path,
            progress=lambda stage: progress(task.name, f"attempt {attempt}: {stage}"),
        )  # fmt: skip
        seconds += report.seconds
        run.log("check", attempt=attempt, **report.as_dict())
        if report.passed:
            passport = passport_of(report, task, author.name, run.id, attempt)
            library.add(source, passport)
            return Outcome(task.name, "kept", report.verdicts[-1].reason, attempt, passport.kernel, seconds)
        reason = feedback = f"{report.failure.stage}: {report.failure.reason}"
    return Outcome(task.name, "failed", reason, attempt, seconds=seconds)


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

    Returns:
        Session facts and one measurement per kernel.
    """
    bundle = read_bundle(directory)
    measured: list[Measurement] = []
    with GpuWorker() as worker:
        session = Session(worker, bundle, progress)
        chosen = tasks or list(bundle.tasks)
        resolution = session.resolution(chosen[0])
        for name in chosen:
            for m in session.measure_task(name, baselines, shapes):
                measured.append(m)
                keep_measurement(m, session, bundle.content, library)
    facts = {"session": session.id, "device": session.device, "ceilings": session.ceilings, "seed": session.seed,
             "a_a": resolution}
    return facts, measured


def keep_measurement(m: Measurement, session: Session, content: dict, library: Library) -> None:
    """Add a measurement to the kernel's passport; the newest session replaces rows of the same device and shape."""
    source = next(k["source"] for k in content["kernels"] if k["source_sha256"] == m.source_sha256)
    kernel = kernel_id(m.author, source)
    existing = next((p for p in library.passports(m.task) if p.kernel == kernel), None)
    passport = existing or Passport(
        kernel=kernel, task=m.task, author=m.author, source_sha256=m.source_sha256, isolation=content["isolation"],
        toolchain=toolchain(),
    )  # fmt: skip
    device = session.device["device"]
    rows = [{**r, "device": device} for r in m.rows]
    replaced = {(r["device"], *r["shape"]) for r in rows}
    passport.timings = [r for r in passport.timings if (r["device"], *r["shape"]) not in replaced] + rows
    passport.measure = [v.model_dump() for v in m.verdicts]
    passport.device, passport.ceilings = session.device, session.ceilings
    if m.passed:
        passport.status = "measured"
    library.add(source, passport)


def measure_here(kernels: list[tuple[Task, str, str]], suite: Suite, library: Library, pool: Pool, progress: Progress) -> None:
    """Bundle freshly checked kernels in a temporary directory and measure them.

    Raises:
        NoGpu: this machine has no usable GPU; the kernels stay "checked, not measured".
    """
    require_gpu()  # fail before compiling hundreds of configurations
    directory = Path(tempfile.mkdtemp(prefix="coda-agent-bundle-"))
    try:
        build(kernels, directory, pool, suite=suite.path, progress=lambda d, t: progress("bundle", f"{d} of {t} compiled"))
        measure_bundle(directory, library, ("torch.compile",), lambda text: progress("measure", text))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


__all__ = ["NoGpu", "Outcome", "generate_task", "keep_measurement", "measure_bundle", "measure_here", "passport_of"]
