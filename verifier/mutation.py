"""Do the tests of a task notice mistakes? Every mutant faces the rules that candidates face.

A mutant is judged by the stages before the compile: policy, the comparison of
declarations with the task, and the interpreter's outputs on the inputs of
``interpretation.cases``. The kernels are our own, so they run in this process.
"""

from __future__ import annotations

import linecache
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from primitives.declare import Program
from reference_kernels.tasks import Task

from .execution_mutants import Execution, Outputs, execution_mutants
from .interpretation import cases, judge_outputs, precisions, truths
from .mutants import source_mutants
from .policy import check_policy
from .verdict import HarnessError

EQUIVALENTS = Path(__file__).resolve().parent.parent / "reference_kernels" / "equivalents.yaml"
SEED = 20260101  # fixed: a kill rate is a property of the task, not of the day


@dataclass
class Fate:
    """What became of one mutant.

    ``how`` is ``numerics`` (an output was judged wrong), ``construction`` (it does
    not pass the policy, does not fit the task or does not run), ``survived``.
    """

    mutant: str
    family: str  # source or execution
    operator: str
    how: str
    reason: str = ""
    output: str = ""
    case: str = ""
    equivalent: str = ""  # why it counts as equivalent, when it is listed

    @property
    def killed(self) -> bool:
        return self.how != "survived"


@dataclass
class Tally:
    """All mutants of one task."""

    task: str
    fates: list[Fate] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)  # equivalents that no longer exist
    seconds: float = 0.0

    @property
    def counted(self) -> list[Fate]:
        """Mutants that count: no equivalents, and nothing that dies before it computes."""
        return [f for f in self.fates if not f.equivalent and f.how != "construction"]

    @property
    def survivors(self) -> list[Fate]:
        return [f for f in self.counted if not f.killed]

    @property
    def not_equivalent(self) -> list[Fate]:
        """Listed as equivalent, yet killed: the list is wrong."""
        return [f for f in self.fates if f.equivalent and f.killed]

    @property
    def rate(self) -> float:
        return sum(f.killed for f in self.counted) / len(self.counted) if self.counted else 0.0

    @property
    def passed(self) -> bool:
        return self.rate == 1.0 and not self.not_equivalent and not self.stale

    def as_dict(self) -> dict:
        return {
            "task": self.task,
            "passed": self.passed,
            "rate": self.rate,
            "mutants": len(self.fates),
            "killed": sum(f.killed for f in self.counted),
            "counted": len(self.counted),
            "by_construction": sum(f.how == "construction" for f in self.fates),
            "equivalent": sum(bool(f.equivalent) for f in self.fates),
            "survivors": [f.mutant for f in self.survivors],
            "equivalent_but_killed": [f.mutant for f in self.not_equivalent],
            "equivalent_but_gone": self.stale,
            "seconds": round(self.seconds, 2),
            "fates": [vars(f) for f in self.fates],
        }


def load_equivalents(path: Path = EQUIVALENTS) -> dict[str, dict[str, str]]:
    """Task -> mutant -> the reason why no test could tell it from the right kernel.

    Raises:
        HarnessError: unreadable, or an entry without a reason.
    """
    try:
        content = yaml.safe_load(path.read_text())
        listed = {
            t: {e["mutant"]: e["reason"].strip() for e in entries} for t, entries in content["equivalents"].items()
        }
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as e:
        raise HarnessError(f"cannot read {path}: {e}; each entry needs 'mutant' and 'reason'") from e
    bare = [m for entries in listed.values() for m, reason in entries.items() if len(reason) < 20]
    if bare:
        raise HarnessError(f"{path}: say why these are equivalent: {bare}")
    return listed


def load_program(source: str, name: str = "kernel") -> Program:
    """The one Program of a kernel file of ours, executed in this process."""
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[module.__file__] = (len(source), None, lines, module.__file__)
    exec(compile(source, module.__file__, "exec"), module.__dict__)  # our own text, never a candidate's
    programs = [v for v in vars(module).values() if isinstance(v, Program)]
    if len(programs) != 1:
        raise ValueError(f"a kernel file has exactly one @epilogue function, this one has {len(programs)}")
    return programs[0]


class Bench:
    """The inputs of one task and the judgement of whatever was computed from them."""

    def __init__(self, task: Task, suite_path: Path | None = None, seed: int = SEED):
        self.task, self.seed = task, seed
        self.inputs = {act: cases(task, act, seed) for act in precisions(task)}
        self.truths = {act: list(truths(task, act, inputs, suite_path)) for act, inputs in self.inputs.items()}

    def fate(self, execute: Callable[[str, dict], Outputs]) -> tuple[str, str, str, str]:
        """(how, reason, output, case) of an execution judged on every case, until one kills it."""
        for act, inputs in self.inputs.items():
            for case, truth in zip(inputs, self.truths[act], strict=True):
                try:
                    outputs = [execute(act, case)]
                except Exception as e:  # a mutant may do anything; not to run is one way to be noticed
                    return "construction", f"does not run: {type(e).__name__}: {str(e)[:200]}", "", ""
                verdict = judge_outputs(self.task, act, [case], outputs, [truth], self.seed, time.perf_counter())
                if not verdict.passed:
                    return self._told(verdict)
        return "survived", "", "", ""

    @staticmethod
    def _told(verdict) -> tuple[str, str, str, str]:
        shape, style = verdict.evidence.get("shape"), verdict.evidence.get("style", "")
        where = f"{'x'.join(map(str, shape))} {verdict.evidence['act']} {style}" if shape else verdict.evidence["act"]
        return "numerics", verdict.reason, verdict.evidence.get("finding", {}).get("output", ""), where


def mutate(
    task: Task,
    source: str,
    equivalents: dict[str, str] | None = None,
    suite_path: Path | None = None,
    seed: int = SEED,
) -> Tally:
    """Judge every mutant of a known-good kernel of ``task``.

    Raises:
        HarnessError: the kernel itself does not pass, so its mutants say nothing.
    """
    start = time.perf_counter()
    equivalents = equivalents or {}
    tally = Tally(task.name)
    bench = Bench(task, suite_path, seed)
    program = load_program(source, task.name)
    how, reason, _, _ = bench.fate(lambda act, case: Execution(task, program, act, case).run())
    if how != "survived":
        raise HarnessError(f"{task.name}: the kernel to be mutated fails itself: {reason}")
    for family, operator, name, told in _all_fates(bench, task, source, program):
        tally.fates.append(Fate(name, family, operator, *told, equivalent=equivalents.get(name, "")))
    names = {f.mutant for f in tally.fates}
    tally.stale = [m for m in equivalents if m not in names]
    tally.seconds = time.perf_counter() - start
    return tally


def _all_fates(bench: Bench, task: Task, source: str, program: Program) -> Iterator[tuple[str, str, str, tuple]]:
    for mutant in source_mutants(source):
        yield "source", mutant.operator, mutant.name, _source_fate(bench, task, mutant.source)
    for mutant in execution_mutants(task, program):
        told = bench.fate(lambda act, case, run=mutant.run: run(Execution(task, program, act, case)))
        yield "execution", mutant.operator, mutant.name, told


def _source_fate(bench: Bench, task: Task, source: str) -> tuple[str, str, str, str]:
    policy = check_policy(source)
    if not policy.passed:
        return "construction", f"policy: {policy.reason}", "", ""
    try:
        program = load_program(source, f"{task.name}_mutant")
    except Exception as e:
        return "construction", f"does not load: {type(e).__name__}: {e}", "", ""
    mismatch = task.mismatch(program)
    if mismatch:
        return "construction", mismatch, "", ""
    return bench.fate(lambda act, case: Execution(task, program, act, case).run())
