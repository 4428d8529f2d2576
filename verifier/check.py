"""The check: policy, interpret, compile, resources, in that order, without a GPU."""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch

from primitives.declare import Program
from reference_kernels.tasks import Task

from . import sandbox
from .interpretation import cases, dtype_names, judge_interpretation, precisions
from .manifest import Artefact, sha256, toolchain
from .policy import check_policy
from .pool import Answer, Pool
from .resources import check_resources
from .shrink import shrink
from .verdict import Verdict

DEFAULT_CONFIG = {"tile_m": 128, "tile_n": 128, "cluster_m": 2, "cluster_n": 1, "pingpong": True, "max_swizzle_size": 8}


@dataclass
class Report:
    """All verdicts of one check, and what the compile stage left."""

    task: str
    source: str
    verdicts: list[Verdict] = field(default_factory=list)
    program: dict | None = None
    artefacts: list[Artefact] = field(default_factory=list)
    isolation: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.verdicts) and all(v.passed for v in self.verdicts)

    @property
    def failure(self) -> Verdict | None:
        """The first verdict that did not pass."""
        return next((v for v in self.verdicts if not v.passed), None)

    def as_dict(self) -> dict:
        return {
            "task": self.task,
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "isolation": self.isolation,
            "program": self.program,
            "verdicts": [v.model_dump() for v in self.verdicts],
        }


def check(
    source: str,
    task: Task,
    pool: Pool,
    *,
    author: str = "scripted",
    suite_path: Path | None = None,
    keep: Path | None = None,
    seed: int | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Check one candidate for one task.

    Args:
        keep: directory that receives the object files and manifests of the
            default configuration.
        seed: of the inputs; fresh entropy when left out, recorded either way.
        progress: called with the name of each stage as it begins.
    """
    torch.set_num_threads(1)  # the tensors are small; a second OpenMP thread only waits, and stalls under load
    start = time.perf_counter()
    report = Report(task.name, source, isolation=sandbox.level()[0])
    seed = secrets.randbits(31) if seed is None else seed
    try:
        _stages(source, task, pool, author, suite_path, keep, seed, progress, report)
    finally:
        report.seconds = time.perf_counter() - start
    return report


def _stages(source, task, pool, author, suite_path, keep, seed, progress, report: Report) -> None:
    progress("policy")
    policy = check_policy(source)
    report.verdicts.append(policy)
    if not policy.passed:
        return
    declared = pool.submit("declare", source).result()
    mismatch = None
    if declared.ok:
        report.program = declared.result
        mismatch = task.mismatch(Program.from_description(declared.result))
    if mismatch or not declared.ok:
        reason = mismatch or f"the declarations do not load: {declared.describe()}"
        report.verdicts[-1] = policy.model_copy(update={"passed": False, "reason": reason})
        return

    progress("interpret")
    began = time.perf_counter()
    inputs = {act: cases(task, act, seed) for act in precisions(task)}
    runs = {
        act: pool.submit("interpret", source, inputs=_plain(inputs[act]), dtypes=dtype_names(task, act))
        for act in inputs
    }
    compiles = {act: submit_compile(pool, source, task, act, DEFAULT_CONFIG) for act in task.dtypes}
    again = submit_compile(pool, source, task, task.dtypes[0], DEFAULT_CONFIG)
    for act, run in runs.items():
        verdict = judge_interpretation(task, act, inputs[act], run.result(), suite_path, seed, began)
        if not verdict.passed and "finding" in verdict.evidence:
            smallest = shrink(task, source, act, pool, seed, suite_path)
            verdict.evidence["smallest"] = smallest
            verdict.reason += f"; {smallest}" if smallest else ""
        report.verdicts.append(verdict)
        if not verdict.passed:
            return
    progress("compile")
    began = time.perf_counter()
    for act, future in compiles.items():
        answer: Answer = future.result()
        if not answer.ok:
            report.verdicts.append(_compile_failed(answer, act, began))
            return
        artefact = make_artefact(answer, source, task, act, author, DEFAULT_CONFIG)
        if keep:
            save_artefact(artefact, answer.directory / "kernel.o", keep)
        report.artefacts.append(artefact)
        reason = f"compiles for sm_90a in {act} ({artefact.config_key})"
        report.verdicts.append(
            Verdict(stage="compile", passed=True, reason=reason, evidence={"act": act, "object_sha256": artefact.object_sha256},
                    seconds=time.perf_counter() - began)
        )  # fmt: skip
    first = next(iter(compiles.values())).result()
    second = again.result()
    if not second.ok or sha256(second.directory / "kernel.o") != report.artefacts[0].object_sha256:
        reason = "two compiles of the same source differ; a kernel must be a function of its text alone"
        report.verdicts.append(Verdict(stage="compile", passed=False, reason=reason, evidence={"act": task.dtypes[0]}))
        return
    progress("resources")
    report.verdicts.append(check_resources(first.directory / "kernel.o", first.result["launch"].get("shared_bytes")))


def _plain(inputs: list[dict]) -> list[dict]:
    return [{k: v for k, v in case.items() if k != "style"} for case in inputs]


def _compile_failed(answer: Answer, act: str, began: float) -> Verdict:
    log = (answer.directory / "log.txt").read_text(errors="replace")[-800:] if answer.error["type"] in ("signal", "exit") else ""
    reason = f"does not compile for sm_90a in {act}: {answer.describe()}"
    return Verdict(
        stage="compile", passed=False, reason=reason, evidence={"act": act, "error": answer.error, "log": log},
        seconds=time.perf_counter() - began,
    )  # fmt: skip


def submit_compile(pool: Pool, source: str, task: Task, act: str, config: dict) -> Future:
    """Queue the compile of one candidate in one configuration."""
    return pool.submit(
        "compile",
        source,
        act=act,
        dtypes=dtype_names(task, act),
        config=config,
        b_major="n" if task.b == "kn" else "k",
    )


def make_artefact(answer: Answer, source: str, task: Task, act: str, author: str, config: dict) -> Artefact:
    """The manifest of a successful compile."""
    launch = answer.result["launch"]
    program = {k: answer.result[k] for k in ("name", "pairs", "operands", "outputs", "index")}
    made = Artefact(
        kernel=program["name"],
        task=task.name,
        author=author,
        act=act,
        b=task.b,
        source_sha256=hashlib.sha256(source.encode()).hexdigest(),
        object="",
        object_sha256=sha256(answer.directory / "kernel.o"),
        symbol=launch["symbol"],
        fields=launch["fields"],
        d=launch["d"],
        c=launch["c"],
        config=config,
        program=program,
        toolchain=toolchain(),
        isolation=sandbox.level()[0],
    )
    slug = re.sub(r"[^A-Za-z0-9]+", "-", author)
    return made.model_copy(update={"object": f"{task.name}.{slug}-{made.source_sha256[:8]}.{act}.{made.config_key}.o"})


def save_artefact(artefact: Artefact, object_file: Path, directory: Path) -> Path:
    """Copy the object and write its manifest beside it; returns the manifest's path."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(object_file, directory / artefact.object)
    path = (directory / artefact.object).with_suffix(".json")
    path.write_text(artefact.model_dump_json(indent=1) + "\n")
    return path
