"""Is a bundle what its maker's harness wrote? A bundle travels as plain files, so it is not taken at its word.

The parent refuses, before anything is loaded, manifests that would be measured by
other rules than the candidate they claim to be: fewer outputs, exchanged tensors,
another task's program, a task with other tolerances than the suite's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from reference_kernels.expert import EXPERTS
from reference_kernels.tasks import SuiteError, Task, load_suite

from .manifest import Artefact


def forgery(content: dict, artefacts: list[Artefact], tasks: dict[str, Task]) -> str:
    """What is not as the harness writes it, or an empty string."""
    for kernel in content["kernels"]:
        if hashlib.sha256(kernel["source"].encode()).hexdigest() != kernel["source_sha256"]:
            return f"the source of {kernel['author']} for {kernel['task']} is not the one that was compiled"
    changed = _changed_task(content.get("suite"), tasks)
    if changed:
        return changed
    known = {(k["task"], k["author"], k["source_sha256"]) for k in content["kernels"]}
    for artefact in artefacts:
        problem = _problem(artefact, tasks, known)
        if problem:
            return f"manifest of {artefact.object}: {problem}"
    return ""


def _changed_task(suite: str | None, tasks: dict[str, Task]) -> str:
    if suite and not Path(suite).exists():
        return ""  # a person's own suite that was left at home: its tasks travel in the bundle only
    try:
        listed = load_suite(Path(suite) if suite else None).tasks
    except SuiteError as e:
        return str(e)
    for name, task in tasks.items():
        if listed.get(name) != task:
            return f"task {name} is not the suite's: make the bundle again"
    return ""


def _problem(artefact: Artefact, tasks: dict[str, Task], known: set[tuple[str, str, str]]) -> str:
    task = tasks.get(artefact.task)
    if task is None:
        return f"task {artefact.task!r} is not in the bundle"
    if Path(artefact.object).name != artefact.object:
        return "its object lies elsewhere"
    if artefact.act not in task.dtypes or artefact.b != task.b:
        return "dtype or layout are not the task's"
    if artefact.author.startswith("expert:"):
        expert = EXPERTS.get(task.name)
        digest = hashlib.sha256(expert.epilogue.encode()).hexdigest() if expert else ""
        if not expert or artefact.source_sha256 != digest:
            return "no expert kernel of this name"
        if artefact.renames != expert.tensors or artefact.covers != expert.covers(task.outputs):
            return "tensors are not the expert kernel's"
        return ""
    if artefact.renames or artefact.covers is not None:
        return "only expert kernels rename tensors or cover some outputs only"
    if (artefact.task, artefact.author, artefact.source_sha256) not in known:
        return "no kernel of the bundle has this source and author"
    return task.mismatch(artefact.declared) or ""
