"""Run the red team where there is no GPU: which stage rejected what, and why."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from reference_kernels.tasks import Suite, Task

from .. import sandbox
from ..check import DEFAULT_CONFIG, check, submit_compile
from ..interpretation import cases as interpret_cases
from ..interpretation import dtype_names
from ..pool import Pool
from ..resources import check_resources
from .attacks import ATTACKS, Attack
from .case import OWN_SUITE, Case, load_cases, suites

SEED = 4711


@dataclass
class Outcome:
    """What became of one case: which stage had which reason, and whether that is what must happen."""

    name: str
    codes: list[str]
    what: str
    expected: str
    got: str
    reason: str
    ok: bool
    seconds: float = 0.0
    skipped: bool = False  # this machine cannot show it; neither passed nor failed

    def as_dict(self) -> dict:
        return dict(vars(self))


class _OnDemand:
    """A compile that is not started before somebody asks for its result."""

    def __init__(self, submit: Callable[[], Future]):
        self._submit, self._future = submit, None

    def result(self, timeout: float | None = None):
        self._future = self._future or self._submit()
        return self._future.result(timeout)

    def cancel(self) -> bool:
        return self._future is None


class FrugalPool:
    """A pool that compiles only for cases that get that far; most exploits do not."""

    def __init__(self, pool: Pool):
        self.pool = pool

    def submit(self, kind: str, source: str = "", **fields):
        if kind == "compile":
            return _OnDemand(lambda: self.pool.submit(kind, source, **fields))
        return self.pool.submit(kind, source, **fields)


def run(
    pool: Pool,
    chosen: Iterable[Case] | None = None,
    attacks: Iterable[Attack] | None = None,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Every case and every attack, as many at once as the pool has workers."""
    listed, own = suites()
    todo: list[Callable[[], Outcome]] = []
    for case in load_cases() if chosen is None else chosen:
        todo.append(lambda case=case: _case(case, pool, listed, own))
    for attack in ATTACKS if attacks is None else attacks:
        todo.append(lambda attack=attack: run_attack(attack, pool))
    with ThreadPoolExecutor(max_workers=pool.parallel) as threads:
        outcomes = []
        for outcome in threads.map(lambda job: job(), todo):
            progress(outcome)
            outcomes.append(outcome)
    return outcomes


def find_task(name: str, listed: Suite, own: Suite) -> tuple[Task, Path | None]:
    """The task and the suite file its reference belongs to."""
    return (own[name], OWN_SUITE) if name in own.tasks else (listed[name], None)


def _case(case: Case, pool: Pool, listed: Suite, own: Suite) -> Outcome:
    start = time.perf_counter()
    level = sandbox.level()[0]
    if case.needs_sandbox and level != sandbox.FULL:
        reason = f"not run: isolation is {level!r} here, see 'coda-agent doctor'"
        return Outcome(case.name, case.codes, case.what, case.stage, "not run", reason, False, skipped=True)
    task, suite_path = find_task(case.task, listed, own)
    if case.dtypes:
        task = task.model_copy(update={"dtypes": case.dtypes})
    stage, reason = {"check": _checked, "worker": _in_worker, "compiled": _compiled}[case.how](
        case, task, suite_path, pool
    )
    return judged(case, stage, reason, time.perf_counter() - start)


def judged(case: Case, stage: str, reason: str, seconds: float) -> Outcome:
    """Rejected where and for what it must be?"""
    ok = stage == case.stage and bool(re.search(case.reason, reason, re.S))
    return Outcome(case.name, case.codes, case.what, case.stage, stage, reason, ok, seconds)


def _checked(case: Case, task: Task, suite_path: Path | None, pool: Pool) -> tuple[str, str]:
    report = check(case.text, task, FrugalPool(pool), suite_path=suite_path, seed=SEED)
    if report.failure:
        return report.failure.stage, report.failure.reason
    for config in case.configs:
        wanted = {**DEFAULT_CONFIG, **config}
        answer = submit_compile(pool, case.text, task, task.dtypes[0], wanted).result()
        if not answer.ok:
            return "compile", f"{config}: {answer.describe()}"
        verdict = check_resources(answer.directory / "kernel.o", answer.result["launch"].get("shared_bytes"))
        if not verdict.passed:
            return verdict.stage, f"{config}: {verdict.reason}"
    return "accepted", report.verdicts[-1].reason


def _in_worker(case: Case, task: Task, suite_path: Path | None, pool: Pool) -> tuple[str, str]:
    """What an exploit reaches once its Python runs; it raises BREACH where it got through."""
    act = task.dtypes[0]
    fields: dict = {}
    if case.job == "interpret":
        inputs = interpret_cases(task, act, SEED)[:1]
        fields = {
            "inputs": [{k: v for k, v in c.items() if k != "style"} for c in inputs],
            "dtypes": dtype_names(task, act),
        }
    if case.job == "compile":
        answer = submit_compile(pool, case.text, task, act, DEFAULT_CONFIG).result()
    else:
        answer = pool.submit(case.job, case.text, wall_seconds=case.wall_seconds, **fields).result()
    if answer.ok:
        return "accepted", "the worker ran it to the end"
    if "BREACH" in answer.error["message"]:
        return "accepted", answer.describe()
    return "worker", answer.describe()


def _compiled(case: Case, task: Task, suite_path: Path | None, pool: Pool) -> tuple[str, str]:
    answer = submit_compile(pool, case.text, task, task.dtypes[0], DEFAULT_CONFIG).result()
    if not answer.ok:
        return "compile", answer.describe()
    verdict = check_resources(answer.directory / "kernel.o", answer.result["launch"].get("shared_bytes"))
    return ("accepted" if verdict.passed else "resources"), verdict.reason


def run_attack(attack: Attack, pool: Pool) -> Outcome:
    """An attack returns what stopped it, or an empty string where nothing did."""
    start = time.perf_counter()
    stopped = attack.run(pool)
    ok = bool(stopped) and bool(re.search(attack.reason, stopped, re.S))
    got, reason = (attack.stage, stopped) if stopped else ("accepted", "nothing stopped it")
    return Outcome(attack.name, attack.codes, attack.what, attack.stage, got, reason, ok, time.perf_counter() - start)
