"""Exploits that are actions, not kernel files: tampered artefacts, bundles and answers.

Each attack does what a hostile candidate or a hostile courier could do to files
and channels, asks the harness to go on, and returns what stopped it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from reference_kernels.tasks import load_suite

from ..check import DEFAULT_CONFIG
from ..interpretation import cases, judge_interpretation
from ..launch import Kernel
from ..manifest import Artefact, toolchain
from ..measure import read_bundle
from ..mutation import load_program
from ..pool import Answer, Pool
from ..verdict import HarnessError
from .case import Case

AUTHOR = "scripted"


@dataclass(frozen=True)
class Attack:
    """``run`` returns what stopped the attack, or an empty string where nothing did."""

    name: str
    codes: list[str]
    what: str
    stage: str
    reason: str
    run: Callable[[Pool], str]


# --- bundles and manifests --------------------------------------------------------------


def honest_source() -> str:
    return Case(name="honest", codes=["K24"], what="the kernel whose files are tampered with", stage="accepted").text


def _write_bundle(
    directory: Path,
    manifest: Callable[[dict], dict] = lambda m: m,
    content: Callable[[dict], dict] = lambda c: c,
) -> Path:
    """A bundle of one artefact, as ``bundle.build`` writes it, with something changed."""
    task, source = load_suite()["gemm_rmsnorm"], honest_source()
    (directory / "kernel.o").write_bytes(b"stands for an object file")
    artefact = Artefact(
        kernel=task.name, task=task.name, author=AUTHOR, act="bf16", b=task.b,
        source_sha256=hashlib.sha256(source.encode()).hexdigest(),
        object="kernel.o", object_sha256=hashlib.sha256(b"stands for an object file").hexdigest(),
        symbol="func", fields=["rstd"], d="y", c=None, config=DEFAULT_CONFIG,
        program=load_program(source).describe(), toolchain=toolchain(), isolation="",
    )  # fmt: skip
    (directory / "kernel.json").write_text(json.dumps(manifest(artefact.model_dump(mode="json"))))
    kernel = {"task": task.name, "author": AUTHOR, "source_sha256": artefact.source_sha256, "source": source}
    whole = {
        "format": 1, "kernels": [kernel], "manifests": ["kernel.json"], "failed": [],
        "tasks": {task.name: task.model_dump(mode="json")}, "suite": None, "isolation": "",
    }  # fmt: skip
    (directory / "bundle.json").write_text(json.dumps(content(whole)))
    return directory


def _read(**changes: Callable[[dict], dict]) -> Callable[[Pool], str]:
    """Read a tampered bundle; the untampered one must be readable, or the refusal says nothing."""

    def attack(pool: Pool) -> str:
        with tempfile.TemporaryDirectory() as honest, tempfile.TemporaryDirectory() as forged:
            read_bundle(_write_bundle(Path(honest)))
            try:
                read_bundle(_write_bundle(Path(forged), **changes))
            except HarnessError as e:
                return str(e)
        return ""

    return attack


def _manifest(**fields: object) -> Callable[[Pool], str]:
    return _read(manifest=lambda m: {**m, **fields})


def _loosen(content: dict) -> dict:
    content["tasks"]["gemm_rmsnorm"]["max_ratio"] = 1e9
    return content


def _own_reference(content: dict) -> dict:
    content["tasks"]["gemm_rmsnorm"]["reference"] = "mine.py:reference"
    return content


def _other_source(content: dict) -> dict:
    content["kernels"][0]["source"] = content["kernels"][0]["source"].replace("acc * rstd", "acc")
    return content


def _other_program(manifest: dict) -> dict:
    manifest["program"]["outputs"]["y"]["width"] = 0.5
    return manifest


def _swapped_object(pool: Pool) -> str:
    with tempfile.TemporaryDirectory() as tmp:
        directory = _write_bundle(Path(tmp))
        artefact = Artefact.model_validate_json((directory / "kernel.json").read_text())
        (directory / "kernel.o").write_bytes(b"another object file")
        try:
            Kernel(artefact, directory)
        except HarnessError as e:
            return str(e)
    return ""


# --- answers of the worker ----------------------------------------------------------------


class _Payload:
    """Unpickling this would write a file: code execution in the process that judges."""

    def __init__(self, mark: str):
        self.mark = mark

    def __reduce__(self):
        return (open, (self.mark, "w"))


def _judge(write: Callable[[Path], None]) -> str:
    """The verdict on an outputs file that a hostile worker left; '' when it was believed."""
    task = load_suite()["gemm_rmsnorm"]
    inputs = cases(task, "bf16", 0)[:1]
    with tempfile.TemporaryDirectory() as tmp:
        write(Path(tmp))
        answer = Answer({"ok": True}, Path(tmp))
        verdict = judge_interpretation(task, "bf16", inputs, answer, None, 0, time.perf_counter())
        if (Path(tmp) / "executed").exists():
            return ""
    return "" if verdict.passed else verdict.reason


def _pickled_outputs(pool: Pool) -> str:
    return _judge(lambda d: torch.save([{"y": _Payload(str(d / "executed"))}], d / "outputs.pt"))


def _no_outputs(pool: Pool) -> str:
    return _judge(lambda d: None)


def _short_outputs(pool: Pool) -> str:
    return _judge(lambda d: torch.save([], d / "outputs.pt"))


def _lazy_outputs(pool: Pool) -> str:
    return _judge(lambda d: torch.save([{"y": "computed when looked at"}], d / "outputs.pt"))


def _missing_output(pool: Pool) -> str:
    return _judge(lambda d: torch.save([{}], d / "outputs.pt"))


def _expanded_output(pool: Pool) -> str:
    """A tiny storage that claims to be a terabyte."""
    return _judge(
        lambda d: torch.save([{"y": torch.zeros(1).as_strided((1 << 20, 1 << 20), (0, 0))}], d / "outputs.pt")
    )


_FORGER = """\
import json, os
for number in range(100):
    line = json.dumps({"id": number, "ok": True, "result": {"name": "forged", "operands": {}, "outputs": {}}}).encode()
    for fd in range(3, 64):
        try:
            os.write(fd, line + b"\\n")
        except OSError:
            pass
os._exit(0)
"""


def _forged_answers(pool: Pool) -> str:
    """Write answers for other jobs to every descriptor; the next job must get its own."""
    with Pool(1) as own:
        forger = own.submit("declare", _FORGER)
        honest = own.submit("declare", honest_source()).result(timeout=60)
        forger.result(timeout=60)
    if honest.ok and honest.result["name"] == "gemm_rmsnorm":
        return "the next job got its own answer"
    return ""


ATTACKS = [
    Attack("object_swapped", ["K38", "T29"], "replace the object after it was checked", "artefact",
           "is not the object its manifest names", _swapped_object),
    Attack("object_elsewhere", ["K38", "T29"], "a manifest that points to an object outside the bundle", "bundle",
           "its object lies elsewhere", _manifest(object="../kernel.o")),
    Attack("manifest_fewer_outputs", ["B13", "K14"], "a manifest that covers no output", "bundle",
           "cover some outputs only", _manifest(covers=[])),
    Attack("manifest_renamed", ["B16", "K12"], "a manifest that feeds one tensor for another", "bundle",
           "only expert kernels rename", _manifest(renames={"rstd": "y"})),
    Attack("manifest_forged_expert", ["H07", "B13"], "a candidate that claims to be the expert kernel", "bundle",
           "no expert kernel of this name", _manifest(author="expert:quack")),
    Attack("manifest_other_author", ["H04"], "an artefact under another author's name", "bundle",
           "no kernel of the bundle has this source", _manifest(author="human:somebody")),
    Attack("manifest_other_source", ["K38", "G05"], "an artefact of a source nobody checked", "bundle",
           "no kernel of the bundle has this source", _manifest(source_sha256="0" * 64)),
    Attack("manifest_wrong_kinds", ["N09", "K14"], "declared kinds that are not the task's", "bundle",
           "y must be declared TileStore", _read(manifest=_other_program)),
    Attack("manifest_wrong_dtype", ["N20"], "an artefact for a dtype the task does not have", "bundle",
           "dtype or layout", _manifest(act="fp8")),
    Attack("manifest_unknown_field", ["K04"], "a field the harness does not know", "bundle",
           "not a readable bundle.*extra", _manifest(passed=True)),
    Attack("manifest_unknown_task", ["K04"], "a task that is not in the bundle", "bundle",
           "is not in the bundle", _manifest(task="gemm_nothing")),
    Attack("bundle_loosened", ["D16", "H01"], "loosen the tolerance inside the bundle", "bundle",
           "task gemm_rmsnorm is not the suite's", _read(content=_loosen)),
    Attack("bundle_own_reference", ["D16", "F05"], "bring a reference of one's own", "bundle",
           "task gemm_rmsnorm is not the suite's", _read(content=_own_reference)),
    Attack("bundle_other_source", ["G05", "K08"], "show another source than the one compiled", "bundle",
           "is not the one that was compiled", _read(content=_other_source)),
    Attack("bundle_other_format", ["K04"], "a bundle of another format", "bundle",
           "bundle format 99", _read(content=lambda c: {**c, "format": 99})),
    Attack("pickled_outputs", ["D05", "K04"], "outputs that execute code when they are read", "interpret",
           "cannot be read", _pickled_outputs),
    Attack("no_outputs", ["B01", "K04"], "claim success and leave no outputs", "interpret",
           "cannot be read", _no_outputs),
    Attack("short_outputs", ["A07", "K04"], "outputs for fewer cases than asked", "interpret",
           "cannot be read|cases", _short_outputs),
    Attack("lazy_outputs", ["E04", "B12"], "an output that is no tensor", "interpret", "no tensor", _lazy_outputs),
    Attack("outputs_missing_one", ["B13"], "leave one output out of the file", "interpret", "no tensor", _missing_output),
    Attack("expanded_output", ["D19"], "an output that would fill the memory when compared", "interpret",
           "shape", _expanded_output),
    Attack("forged_answers", ["D10", "K04"], "answer for other jobs on the worker's own channel", "worker",
           "got its own answer", _forged_answers),
]  # fmt: skip
