"""What an author is told of a check or a measurement: the reason, where, and what to do; never a traceback."""

from __future__ import annotations

from primitives.shapes import traffic
from reference_kernels.tasks import ACT_DTYPES, Task
from verifier.check import Report
from verifier.measure import Measurement
from verifier.resources import spills

LONGEST = 1800  # characters; the first reason is worth more than a log
_NEXT = {
    "policy": "Only the text was read. Mend that line; read_docs('epilogue') has the rules.",
    "interpret": "The function ran on CPU tensors and one output differs from the fp64 reference. Compare that output's "
    "formula with the task's mathematics, term by term; the pattern of wrong elements often names the cause.",
    "compile": "The mathematics is right (the CPU stage passed); the compiler refuses the form.",
    "resources": "It compiles, but the compiled code is not acceptable.",
}


def on_check(report: Report, task: Task) -> str:
    """The outcome of a check as text for the author."""
    failed = report.failure
    if failed:
        advice = _NEXT.get(failed.stage, "")
        lines = _source_lines(report.source, failed.evidence)
        return _cut(f"FAILED at {failed.stage}: {failed.reason}\n{lines}{advice}".strip())
    lines = ["PASSED: policy, CPU numerics, compile for sm_90a, resources."]
    used = next((v.evidence for v in report.verdicts if v.stage == "resources"), {})
    lines.append(f"Compiled (128x128 tile): {report.verdicts[-1].reason}.")
    lines += _hints(task, used)
    return _cut("\n".join(lines))


def _source_lines(source: str, evidence: dict) -> str:
    """The author's own lines around the one at fault."""
    number = evidence.get("line") or evidence.get("error", {}).get("line")
    lines = source.splitlines()
    if not isinstance(number, int) or not 1 <= number <= len(lines):
        return ""
    shown = range(max(1, number - 1), min(len(lines), number + 1) + 1)
    return "".join(f"{'>' if n == number else ' '} {n:3} | {lines[n - 1]}\n" for n in shown)


def _hints(task: Task, used: dict) -> list[str]:
    """What the resources say about speed."""
    hints = []
    counts, mufu = used.get("counts", {}), sum(used.get("mufu", {}).values())
    spilled = spills(counts)
    if spilled:
        hints.append(f"{spilled} spill instructions: fewer values alive at once, or a simpler formula, would help.")
    if mufu > 256:
        hints.append(f"{mufu} special-function instructions per thread and tile are many; share exp/rcp between terms.")
    act = ACT_DTYPES[task.dtypes[0]]
    t = traffic(task.kinds, task.torch_dtypes(act), act, *task.timed[-1])
    extra = t.bytes - t.reads["A"] - t.reads["B"]
    hints.append(f"At M x N x K = {' x '.join(map(str, task.timed[-1]))} the epilogue must move {extra / 1e6:.0f} MB; "
                 "that is fixed by the task.")  # fmt: skip
    return hints


def on_measurement(measured: Measurement) -> str:
    """The outcome of a quick measurement as text for the author."""
    failed = next((v for v in measured.verdicts if not v.passed), None)
    if failed:
        return _cut(f"FAILED at {failed.stage} on the GPU: {failed.reason}")
    lines = []
    for row in measured.rows:
        shape = " x ".join(map(str, row["shape"]))
        lines.append(
            f"{shape} in {row['config']}: {row['total_us']:.1f} us, of which {row['finish_us']:.1f} us fold partial results; "
            f"bare GEMM {row['gemm_us']:.1f} us, so the epilogue costs {row['tax_us']:+.1f} us; "
            f"{row['share_of_floor']:.0%} of the floor ({row['floor_us']:.1f} us)"
        )
    return _cut("\n".join(lines) or "nothing could be timed")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 15] + " ... (cut here)"
