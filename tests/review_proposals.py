"""Ten proposed kernels for the review tests: texts that really pass the check, with the objects they really compile to.

Two kernels go through the check; the others are the same programs with other comments, names and authors, so they
compile to the same objects. Their times are invented.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from agent.handoff import Known, submit
from generated.library import Library, Passport, kernel_id
from reference_kernels.tasks import load_suite

FIXTURES = Path(__file__).resolve().parent / "fixtures"
TEXTS = {
    "first_scale": '''"""y = acc * r, {remark}."""

from primitives import ColVecLoad, TileStore, epilogue


@epilogue(r=ColVecLoad(), y=TileStore())
def first_scale(acc, r):
    {name} = acc * r
    return {{"y": {name}}}
''',
    "second_bias": '''"""y = acc + bias, {remark}."""

from primitives import RowVecLoad, TileStore, epilogue


@epilogue(bias=RowVecLoad(), y=TileStore())
def second_bias(acc, bias):
    {name} = acc + bias
    return {{"y": {name}}}
''',
}
# author, remark in the docstring, local name, ratio to the bare GEMM
VARIANTS = (
    ("claude:opus-9", "as Claude would write it", "scaled", 0.90),
    ("claude:sonnet-9", "by claude-sonnet-9", "value", 0.95),
    ("human:ada lovelace", "hand-made by Ada Lovelace", "result", 0.92),
    ("openai:gpt-9-mini", "GPT-9's idea", "out", 0.85),
    ("composer", "one line an op", "y", 0.91),
)
# what gives an author away
AUTHORS = ("claude", "opus", "sonnet", "ada", "lovelace", "gpt", "openai", "composer", "run-7", "T01")


def suite_in(folder: Path) -> Path:
    """The two small tasks with their references, in a folder of the test's own."""
    for name in ("suite.yaml", "reference.py"):
        shutil.copy(FIXTURES / name, folder)
    return folder / "suite.yaml"


def checked(folder: Path, pool) -> dict[str, Passport]:
    """One kernel of each task, through the whole check."""
    suite, library, kept = load_suite(suite_in(folder)), Library(folder / "checked"), {}
    for task, text in TEXTS.items():
        source = text.format(remark="checked", name="y")
        done = submit(source, suite[task], suite, library, pool, Known("human:base"), lambda stage: None)
        assert done.passport, done.feedback
        kept[task] = done.passport
    return kept


def interval(median: float, half: float = 0.004) -> dict:
    return {"median": median, "low": median - half, "high": median + half}


def timed(passport: Passport, speed: float) -> dict:
    """A row as the GPU worker writes it, of the object that the check compiled."""
    digest = next(v["evidence"]["object_sha256"] for v in passport.check if v["stage"] == "compile")
    gemm = 100.0
    return {
        "task": passport.task, "shape": [4096, 4096, 4096], "act": "bf16", "config": "128x128_c21_pp_s8",
        "object_sha256": digest, "kernel_us": gemm / speed, "total_us": gemm / speed, "finish_us": 0.0,
        "tax_us": gemm / speed - gemm, "share_of_floor": 0.8 * speed, "device": "NVIDIA H200", "session": "s1",
        "baselines": {"gemm": {"us": gemm}, "torch.compile": {"us": 1.2 * gemm, "version": "torch 2.11.0"}},
        "ratios": {"gemm": interval(speed), "torch.compile": interval(1.2 * speed)}, "left_out": {},
    }  # fmt: skip


def propose(root: Path, made: dict[str, Passport]) -> Library:
    """A library of ten proposed, measured kernels."""
    library = Library(root)
    for task, text in TEXTS.items():
        for author, remark, name, speed in VARIANTS:
            source = text.format(remark=remark, name=name)
            passport = made[task].model_copy(
                update={
                    "kernel": kernel_id(author, source), "author": author, "model": author.partition(":")[2] or None,
                    "source_sha256": hashlib.sha256(source.encode()).hexdigest(), "status": "measured",
                    "isolation": "bubblewrap+landlock", "tips": ["T01"], "run": "run-7", "attempts": 2,
                    "cost": {"tokens": 12345, "dollars": 0.31}, "timings": [timed(made[task], speed)],
                    "measure": [{"stage": s, "passed": True, "reason": "fine"} for s in ("numerics", "timing")],
                }
            )  # fmt: skip
            library.add(source, passport)
    return library


def tamper(library: Library, kernel: str, **changes) -> None:
    """Write other facts into a passport, as a careless hand would."""
    path = library.path(library.find(kernel)).with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
