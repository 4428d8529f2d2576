"""Does a kernel's evidence still hold? Its text, the policy, its numerics and the object that was timed, all again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from generated.library import Library, LibraryError
from generated.passport import Passport, now
from primitives.declare import Program
from reference_kernels.tasks import Suite, Task
from verifier.bundle import CONFIGS
from verifier.check import DEFAULT_CONFIG, submit_compile
from verifier.interpretation import cases, dtype_names, judge_interpretation, precisions
from verifier.manifest import config_key, other_compilers, sha256
from verifier.policy import check_policy
from verifier.pool import Pool


@dataclass
class Recheck:
    """What was done again; ``ok`` of a finding is None where nothing can be said."""

    findings: list[dict[str, Any]] = field(default_factory=list)  # {"what", "ok", "says"}
    seed: int = 0
    seconds: float = 0.0
    at: str = field(default_factory=now)

    @property
    def reproduces(self) -> bool:
        return bool(self.findings) and all(f["ok"] is not False for f in self.findings)

    @property
    def says(self) -> str:
        """What does not reproduce, or a line about what was done."""
        failed = [f"{f['what']}: {f['says']}" for f in self.findings if f["ok"] is False]
        return "; ".join(failed or [f["says"] for f in self.findings])

    def as_dict(self) -> dict[str, Any]:
        return {
            "rechecked": True, "reproduces": self.reproduces, "findings": self.findings, "seed": self.seed,
            "seconds": round(self.seconds, 1), "at": self.at,
        }  # fmt: skip


def not_rechecked(why: str) -> dict[str, Any]:
    """Evidence of a decision made without a recheck."""
    return {"rechecked": False, "why": why}


@dataclass(frozen=True)
class Recorded:
    """The object that the evidence in a passport is about."""

    config: str
    act: str
    sha256: str
    how: str  # "timed" or "checked"


def recorded(passport: Passport) -> Recorded | None:
    """Of several timed objects the one nearest the floor; None when the passport names none.

    One object stands for all: configurations are the harness's, only the text is the author's.
    """
    rows = [r for r in passport.timings if r.get("object_sha256")]
    if rows:
        best = max(rows, key=lambda r: r["share_of_floor"])
        return Recorded(best["config"], best.get("act", "bf16"), best["object_sha256"], "timed")
    for verdict in passport.check:
        evidence = verdict.get("evidence", {})
        if verdict["stage"] == "compile" and "object_sha256" in evidence:
            return Recorded(config_key(DEFAULT_CONFIG), evidence["act"], evidence["object_sha256"], "checked")
    return None


def recheck(
    passport: Passport,
    library: Library,
    suite: Suite,
    worker: Callable[[], Pool],
    progress: Callable[[str], None] = lambda stage: None,
) -> Recheck:
    """Do the GPU-free part of the evidence again, with fresh inputs; the first thing that fails ends it.

    Args:
        worker: gives the compile worker when it is first needed.

    Raises:
        HarnessError: the compile worker is lost.
        SuiteError: the suite's reference cannot be loaded.
    """
    start = time.perf_counter()
    done = Recheck(seed=secrets.randbits(31))

    def found(what: str, ok: bool | None, says: str) -> bool:
        done.findings.append({"what": what, "ok": ok, "says": says})
        done.seconds = time.perf_counter() - start
        return ok is not False

    progress("source")
    try:
        source = library.source(passport)
    except LibraryError as e:
        found("source", False, str(e))
        return done
    task = suite.tasks.get(passport.task)
    if task is None:
        found("task", False, f"{suite.path} has no task {passport.task}; give its suite with --tasks FILE")
        return done
    torch.set_num_threads(1)  # the tensors are small; a second OpenMP thread only waits, and stalls under load
    progress("starting the compile worker")
    pool, then = worker(), recorded(passport)
    config = next((c for c in CONFIGS if then and config_key(c) == then.config), None)
    compiling = submit_compile(pool, source, task, then.act, config) if config else None
    progress("policy")
    policy = check_policy(source)
    if not found("policy", policy.passed, policy.reason) or not found("declarations", *_declared(source, task, pool)):
        return done
    progress("interpret")
    began = time.perf_counter()
    inputs = {act: cases(task, act, done.seed) for act in precisions(task)}
    plain = {a: [{k: v for k, v in case.items() if k != "style"} for case in inputs[a]] for a in inputs}
    runs = {a: pool.submit("interpret", source, inputs=plain[a], dtypes=dtype_names(task, a)) for a in inputs}
    for act, run in runs.items():
        verdict = judge_interpretation(task, act, inputs[act], run.result(), suite.path, done.seed, began)
        if not found("interpret", verdict.passed, verdict.reason):
            return done
    progress("compile")
    if compiling is None:
        found("object", None, "no object hash is in the passport: nothing to compare with")
        return done
    answer = compiling.result()
    if answer.ok:
        found("object", *_compared(sha256(answer.directory / "kernel.o"), then, passport))
    else:
        found("object", False, f"does not compile for sm_90a in {then.act} ({then.config}): {answer.describe()}")
    return done


def _declared(source: str, task: Task, pool: Pool) -> tuple[bool, str]:
    answer = pool.submit("declare", source).result()
    if not answer.ok:
        return False, f"the declarations do not load: {answer.describe()}"
    mismatch = task.mismatch(Program.from_description(answer.result))
    return not mismatch, mismatch or "declares what the task says"


def _compared(digest: str, then: Recorded, passport: Passport) -> tuple[bool | None, str]:
    if digest == then.sha256:
        return True, f"compiles to the very object that was {then.how} ({then.config})"
    changed = other_compilers(passport.toolchain)
    if changed:
        return None, f"another toolchain than then ({changed}), so its object cannot be compared"
    again = "measure" if then.how == "timed" else "check"
    cause = "the harness or the passport changed since"
    return (
        False,
        f"compiles to another object than the one that was {then.how} ({then.config}): {cause}; {again} it again",
    )
