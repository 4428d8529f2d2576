"""The author's tools over the Model Context Protocol, for Claude Code and other agents."""

from __future__ import annotations

from pathlib import Path

from generated.library import Library
from reference_kernels.tasks import Suite, SuiteError
from verifier.check import check
from verifier.pool import Pool
from verifier.verdict import HarnessError

from . import tips
from .composer import CannotCompose
from .feedback import on_check, on_measurement
from .handoff import Known, submit
from .pages import page
from .prompt import example_source, nearest, render
from .review.notes import withdrawn
from .tools import _versions, quick_measure

INSTRUCTIONS = (
    "Write fused GEMM-epilogue kernels for NVIDIA Hopper. Call list_tasks, then get_prompt for one task and follow it: "
    "write the kernel file, check_kernel until it passes, then submit_kernel."
)


def make_server(suite: Suite, library: Library, pool: Pool, tips_log: Path = tips.LOG):
    """The server, not yet running.

    Raises:
        HarnessError: the package mcp is missing.
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise HarnessError("'coda-agent mcp' needs the package mcp: pip install 'coda-agent[mcp]'") from None
    server = MCPServer("coda-agent", instructions=INSTRUCTIONS)
    prompted: dict[str, str] = {}  # task -> hash of the prompt this client was given

    @server.tool()
    def list_tasks() -> str:
        """The tasks that kernels can be written for, one a line."""
        return "\n".join(f"{t.name}: {t.summary}" for t in suite.tasks.values())

    @server.tool()
    def get_prompt(task: str) -> str:
        """Everything needed to write the kernel of one task: the format, the vocabulary, the mathematics, examples, tips."""

        def prompt() -> str:
            made = render(suite[task], suite, library=library)
            prompted[task] = made.sha256
            return made.text

        return _told(prompt)

    @server.tool()
    def read_docs(name: str) -> str:
        """The documentation page of one name of the vocabulary, for example ColVecReduce, silu, pairs or epilogue."""
        return _told(lambda: page(name))

    @server.tool()
    def read_example(task: str, other: str) -> str:
        """A complete kernel file of another task, to learn from while writing the one for ``task``."""

        def example() -> str:
            allowed = {t.name: t for t in nearest(suite[task], suite)}
            if other not in allowed:
                raise HarnessError(f"no example {other!r} for {task}; there is: {', '.join(allowed)}")
            return example_source(allowed[other], withdrawn(library))

        return _told(example)

    @server.tool()
    def check_kernel(task: str, source: str) -> str:
        """Check a kernel file without a GPU: the rules, numerics on CPU tensors, compilation for sm_90a, resources."""
        return _told(lambda: on_check(check(source, suite[task], pool, suite_path=suite.path), suite[task]))

    @server.tool()
    def measure_kernel(task: str, source: str) -> str:
        """Time a kernel that passes the check on this machine's Hopper GPU, at the task's smallest timed size."""

        def measured() -> str:
            report = check(source, suite[task], pool, suite_path=suite.path)
            if not report.passed:
                return on_check(report, suite[task])
            return on_measurement(quick_measure(source, suite[task], suite, pool, "mcp"))

        return _told(measured)

    @server.tool()
    def propose_tip(claim: str, evidence: str) -> str:
        """Propose one fact about this stack for the tips log. A person decides whether it is kept."""
        return _told(
            lambda: f"kept as {tips.add_tip(claim, evidence, _versions(), tips_log).id}, to be judged by a person"
        )

    @server.tool()
    def submit_kernel(task: str, source: str, author: str, attempts: int | None = None) -> str:
        """Hand in a kernel: the same check, and into the library when it passes. ``author`` is KIND:NAME, such as claude:MODEL."""

        def handed_in() -> str:
            known = Known(author, attempts, prompted.get(task))
            done = submit(source, suite[task], suite, library, pool, known, lambda stage: None)
            kept = f"\nkept as {done.passport.task}/{done.passport.kernel}" if done.passport else "\nnot kept"
            return done.feedback + kept

        return _told(handed_in)

    return server


def _told(action) -> str:
    """The answer of a tool; what the caller did wrong is an answer too."""
    try:
        return action()
    except (HarnessError, SuiteError, CannotCompose) as e:
        return f"error: {e}"


def serve(suite: Suite, library: Library, tips_log: Path | None = None) -> None:
    """Serve on standard input and output until the client leaves."""
    with Pool() as pool:
        make_server(suite, library, pool, tips_log or tips.LOG).run("stdio")
