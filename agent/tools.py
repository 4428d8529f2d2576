"""The tools of an author model, and the desk that carries them out for one conversation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_kernels.tasks import Suite, Task
from verifier.bundle import CONFIGS, build
from verifier.check import Report, check
from verifier.gpu import GpuWorker
from verifier.manifest import toolchain
from verifier.measure import Measurement, Session, read_bundle
from verifier.pool import Pool
from verifier.verdict import HarnessError, Verdict

from . import tips
from .authors import Call, Tool
from .composer import CannotCompose
from .feedback import on_check, on_measurement
from .pages import page
from .prompt import example_source, same_mathematics
from .redact import redact

QUICK_CONFIGS = 3  # configurations that measure_kernel tries


def _schema(required: str = "", **properties: dict) -> dict:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
READ_DOCS = Tool(
    "read_docs",
    "The documentation page of one name of the vocabulary: meaning, cost, limits, an example.",
    _schema("name", name={**_TEXT, "description": "For example ColVecReduce, silu, pairs or epilogue."}),
)
READ_EXAMPLE = Tool(
    "read_example",
    "A complete, working kernel file of another task.",
    _schema("task", task={**_TEXT, "description": "Name of the other task."}),
)
CHECK_KERNEL = Tool(
    "check_kernel",
    "Check a kernel file without a GPU: the rules, numerics on CPU tensors, compilation for sm_90a, resources.",
    _schema("source", source={**_TEXT, "description": "The whole file."}),
)
MEASURE_KERNEL = Tool(
    "measure_kernel",
    "Time the kernel that passed last on this machine's GPU, at the task's smallest timed size.",
    _schema(),
)
PROPOSE_TIP = Tool(
    "propose_tip",
    "Propose one fact about this stack for the tips log. A person decides whether it is kept.",
    _schema(
        "claim evidence",
        claim={**_TEXT, "description": "One sentence."},
        evidence={**_TEXT, "description": "What you saw."},
    ),
)
FINISH = Tool(
    "finish",
    "End the work: hand in the kernel that passed last, or give up.",
    _schema("note", note={**_TEXT, "description": "One sentence for the reviewer."}, give_up=_FLAG),
)


@dataclass
class Candidate:
    """A checked kernel text; ``attempt`` counts from 1 within its conversation."""

    attempt: int
    report: Report
    measured: Measurement | None = None


class Refused(Exception):
    """A tool cannot do what was asked; the message goes back to the author."""


class Desk:
    """Carries out the calls of one conversation and remembers its candidates.

    Args:
        log: journals an event of this conversation.
        attempts: calls of check_kernel allowed, read before each; None for no limit.
        gpu: whether measure_kernel is offered.
        without: source hashes of kernels that are no examples.
    """

    def __init__(
        self,
        task: Task,
        suite: Suite,
        pool: Pool,
        author: str,
        log: Callable[..., None],
        progress: Callable[[str], None],
        attempts: Callable[[], int | None] = lambda: None,
        gpu: bool = False,
        tips_log: Path = tips.LOG,
        without: frozenset[str] = frozenset(),
    ):
        self.task, self.suite, self.pool, self.author = task, suite, pool, author
        self.log, self.progress, self.attempts, self.gpu, self.tips_log = log, progress, attempts, gpu, tips_log
        self.without = without
        self.checked = 0
        self.last: Candidate | None = None
        self.passed: Candidate | None = None
        self.last_reason = "nothing was checked"
        self.over: tuple[str, str] | None = None  # (ending, reason), once finish was called

    @property
    def tools(self) -> list[Tool]:
        measure = [MEASURE_KERNEL] if self.gpu else []
        return [READ_DOCS, READ_EXAMPLE, CHECK_KERNEL, *measure, PROPOSE_TIP, FINISH]

    def restore(self, events: list[dict]) -> None:
        """Take up the candidates of an earlier process from the journal."""
        sources = {e["attempt"]: e["source"] for e in events if e["event"] == "candidate"}
        for e in (e for e in events if e["event"] == "check"):
            verdicts = [Verdict(**v) for v in e["verdicts"]]
            report = Report(
                e["task"], sources[e["attempt"]], verdicts, e["program"], isolation=e["isolation"], seconds=e["seconds"]
            )
            self._remember(Candidate(e["attempt"], report))

    def _remember(self, candidate: Candidate) -> None:
        self.checked, self.last = candidate.attempt, candidate
        if candidate.report.passed:
            self.passed = candidate
        else:
            failure = candidate.report.failure
            self.last_reason = f"{failure.stage}: {failure.reason}"

    def answer(self, call: Call) -> dict:
        """Carry out one call; every fault of the caller becomes an error text for it."""
        try:
            text, error = self._run(call)
        except Refused as e:
            text, error = str(e), True
        return {"id": call.id, "text": text, "error": error}

    def _run(self, call: Call) -> tuple[str, bool]:
        if call.problem:
            raise Refused(f"{call.name} was not carried out: {call.problem}")
        tool = next((t for t in self.tools if t.name == call.name), None)
        if tool is None:
            raise Refused(f"no tool {call.name!r}; there is: {', '.join(t.name for t in self.tools)}")
        arguments = _validated(tool, call.arguments)
        if self.over:
            raise Refused("the conversation is over: finish was called before this")
        return getattr(self, f"_{call.name}")(**arguments)

    # --- one method per tool; each returns (text, is an error) ---

    def _read_docs(self, name: str) -> tuple[str, bool]:
        try:
            return page(name), False
        except HarnessError as e:
            raise Refused(str(e)) from None

    def _read_example(self, task: str) -> tuple[str, bool]:
        allowed = [t.name for t in self.suite.tasks.values() if not same_mathematics(t, self.task)]
        if task not in allowed:
            raise Refused(f"no example {task!r}; there is: {', '.join(allowed)}")
        try:
            return example_source(self.suite[task], self.without), False
        except CannotCompose as e:
            raise Refused(f"no example for {task}: {e}") from None

    def _check_kernel(self, source: str) -> tuple[str, bool]:
        if self.last and self.last.report.source == source:  # also: the answer was lost in a crash
            report = self.last.report
            return (
                f"The same file as attempt {self.checked}; not counted again.\n{on_check(report, self.task)}",
                not report.passed,
            )
        allowed = self.attempts()
        if allowed is not None and self.checked >= allowed:
            raise Refused(f"all {allowed} calls of check_kernel are used; call finish")
        attempt = self.checked + 1
        self.log("candidate", attempt=attempt, author=self.author, source=source)
        report = check(
            source, self.task, self.pool, author=self.author, suite_path=self.suite.path,
            progress=lambda stage: self.progress(f"attempt {attempt}: {stage}"),
        )  # fmt: skip
        self.log("check", attempt=attempt, **{k: v for k, v in report.as_dict().items() if k != "task"})
        self._remember(Candidate(attempt, report))
        left = f"\n{allowed - attempt} calls of check_kernel left." if allowed is not None else ""
        return on_check(report, self.task) + left, not report.passed

    def _measure_kernel(self) -> tuple[str, bool]:
        if self.passed is None:
            raise Refused("nothing has passed the check yet; there is nothing to measure")
        self.progress("measuring")
        self.passed.measured = quick_measure(self.passed.report.source, self.task, self.suite, self.pool, self.author)
        self.log("measure", attempt=self.passed.attempt, **self.passed.measured.as_dict())
        return on_measurement(self.passed.measured), not self.passed.measured.passed

    def _propose_tip(self, claim: str, evidence: str) -> tuple[str, bool]:
        claim, evidence = redact(claim), redact(evidence)
        self.log("tip_proposed", claim=claim, evidence=evidence)
        try:
            tip = tips.add_tip(
                claim, f"{evidence} (proposed by {self.author} on {self.task.name})", _versions(), self.tips_log
            )
        except HarnessError as e:
            raise Refused(str(e)) from None
        return f"kept as {tip.id}, to be judged by a person", False

    def _finish(self, note: str, give_up: bool = False) -> tuple[str, bool]:
        if self.passed is None and not give_up:
            raise Refused("no kernel has passed the check; check one first, or finish with give_up")
        self.over = ("accepted", note) if self.passed else ("gave up", note)
        return "done", False


def _versions() -> str:
    have = toolchain()
    return ", ".join(f"{name} {have[name]}" for name in ("nvidia-cutlass-dsl", "quack-kernels") if name in have)


def _validated(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` if they fit the tool's schema (flat: required names, known names, plain types)."""
    types = {"string": str, "integer": int, "boolean": bool}
    known = tool.schema["properties"]
    for name in tool.schema["required"]:
        if name not in arguments:
            raise Refused(f"{tool.name} needs the argument {name!r}")
    for name, value in arguments.items():
        if name not in known:
            raise Refused(f"{tool.name} has no argument {name!r}; it takes {', '.join(known) or 'none'}")
        if not isinstance(value, types[known[name]["type"]]):
            raise Refused(f"{tool.name}: {name!r} must be a {known[name]['type']}")
    return arguments


def quick_measure(source: str, task: Task, suite: Suite, pool: Pool, author: str) -> Measurement:
    """Numerics and timing of one kernel on this machine's GPU: few configurations, the smallest timed size.

    Raises:
        NoGpu: there is none.
    """
    with tempfile.TemporaryDirectory(prefix="coda-agent-bundle-") as folder:
        build(
            [(task, source, author)],
            Path(folder),
            pool,
            configs=CONFIGS[:QUICK_CONFIGS],
            experts=False,
            suite=suite.path,
        )
        with GpuWorker() as worker:
            session = Session(worker, read_bundle(Path(folder)))
            return session.measure_task(task.name, (), [task.timed[0]])[0]
