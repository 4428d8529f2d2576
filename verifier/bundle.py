"""Compile what a measurement needs: each kernel in every configuration, and the expert kernels.

A bundle is a directory of object files with manifests plus ``bundle.json``; it can be
measured where it was made or carried to a GPU machine that has no compiler.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from primitives import declare
from reference_kernels.expert import EXPERTS, Expert
from reference_kernels.tasks import Task

from . import sandbox
from .check import make_artefact, save_artefact, submit_compile
from .interpretation import dtype_names
from .manifest import Artefact, sha256, toolchain
from .pool import Answer, Pool
from .verdict import HarnessError

FORMAT = 1
EXPERT_AUTHOR = "expert:quack"

# (tile_m, tile_n, cluster_m, cluster_n, pingpong, max_swizzle_size). Chosen from the shapes that fit
# an epilogue's registers and shared memory on Hopper; 192x256 and 256x256 crash or spill.
_TILES = (
    (128, 128, 2, 1, True, 8),
    (128, 128, 1, 2, True, 8),
    (128, 160, 2, 1, True, 8),
    (128, 192, 2, 1, True, 8),
    (192, 128, 2, 1, True, 8),
    (192, 128, 1, 2, True, 8),
    (128, 256, 2, 1, False, 8),
    (128, 256, 1, 2, False, 8),
    (256, 128, 2, 1, False, 8),
    (256, 128, 1, 2, False, 8),
    (256, 192, 2, 1, False, 8),
    (256, 128, 2, 1, False, 4),
)
CONFIGS = [
    dict(zip(("tile_m", "tile_n", "cluster_m", "cluster_n", "pingpong", "max_swizzle_size"), t)) for t in _TILES
]

_ROLES = {
    "RowVecLoad": "row", "ColVecLoad": "col", "ColVecReduce": "colreduce", "OnlineLSEReduce": "colreduce",
    "RowVecReduce": "rowreduce", "ColVecSelect": "select",
}  # fmt: skip
_TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "int32": "int32"}


def _role(task: Task, name: str) -> str:
    spec = task.tensors[name]
    if spec.dtype == "int32":
        return "index"
    return _ROLES.get(spec.kind) or {2: "wide", 0.5: "half"}.get(spec.width, "tile")


def submit_expert(pool: Pool, task: Task, act: str, config: dict) -> Future:
    """Queue the compile of the task's expert kernel in one configuration."""
    expert = EXPERTS[task.name]
    dtypes = dtype_names(task, act)
    spec = {
        "epilogue": expert.epilogue,
        "arguments": expert.arguments,
        "config": config,
        "act": _TORCH[act],
        "b_major": "n" if task.b == "kn" else "k",
        "values": {q: (_role(task, t), _TORCH[dtypes[t]]) for q, t in expert.tensors.items()},
    }
    return pool.submit("expert", expert=spec)


def expert_artefact(answer: Answer, task: Task, act: str, config: dict) -> Artefact:
    """The manifest of a compiled expert kernel."""
    expert: Expert = EXPERTS[task.name]
    launch = answer.result["launch"]
    made = Artefact(
        kernel=f"quack.epilogue.{expert.epilogue.replace(':', '.')}",
        task=task.name,
        author=EXPERT_AUTHOR,
        act=act,
        b=task.b,
        source_sha256=hashlib.sha256(expert.epilogue.encode()).hexdigest(),
        object="",
        object_sha256=sha256(answer.directory / "kernel.o"),
        symbol=launch["symbol"],
        fields=launch["fields"],
        d=launch["d"],
        c=launch["c"],
        renames=expert.tensors,
        covers=expert.covers(task.outputs),
        config=config,
        program={},
        toolchain=toolchain(),
        isolation="trusted",
    )
    return made.model_copy(update={"object": f"{task.name}.expert.{act}.{made.config_key}.o"})


def usable_configs(task: Task, configs: list[dict] = CONFIGS) -> list[dict]:
    """Configurations the task's shape of epilogue can run in (the compiler refuses the rest)."""
    paired = any(s.width == 0.5 for s in task.outputs.values()) or any(
        line.op.startswith(("rope", "swiglu")) for line in task.ops
    )
    usable = [c for c in configs if not paired or c["tile_n"] % 32 == 0]
    for spec in task.operands.values():
        if isinstance(spec.declared, declare.HeadRstd):
            usable = [c for c in usable if c["tile_n"] % spec.head_dim == 0]
    return usable


def _keep(about: dict, answer: Answer, directory: Path, content: dict) -> Artefact | None:
    """Save one compiled object with its manifest, or note why there is none."""
    task, act, config = about["task"], about["act"], about["config"]
    if not answer.ok:
        failed = {"task": task.name, "author": about["author"], "act": act, "config": config}
        content["failed"].append({**failed, "reason": answer.describe()[:300]})
        return None
    if "source" in about:
        artefact = make_artefact(answer, about["source"], task, act, about["author"], config)
    else:
        artefact = expert_artefact(answer, task, act, config)
    content["manifests"].append(save_artefact(artefact, answer.directory / "kernel.o", directory).name)
    return artefact


def build(
    kernels: list[tuple[Task, str, str]],
    directory: Path,
    pool: Pool,
    *,
    acts: tuple[str, ...] = ("bf16",),
    configs: list[dict] = CONFIGS,
    experts: bool = True,
    suite: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """Compile ``kernels`` (task, source, author) and write the bundle.

    The first configuration is built in every dtype, for the numerics. A kernel whose
    objects equal an earlier kernel's is built in no other: its times are that kernel's.

    Returns:
        The content of ``bundle.json``: manifests by kernel, and what did not compile.

    Raises:
        HarnessError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise HarnessError(f"cannot write the bundle to {directory}: {e.strerror}; give another directory") from e
    content = {"format": FORMAT, "kernels": [], "manifests": [], "failed": []}
    usable = {t.name: usable_configs(t, configs) for t, _, _ in kernels}
    objects: dict[tuple, dict[str, str]] = {}  # (task, author, source) -> dtype -> object hash
    done = 0

    def finish(jobs: list[tuple[dict, Future]]) -> None:
        nonlocal done
        total = done + len(jobs)
        for about, future in jobs:
            artefact = _keep(about, future.result(), directory, content)
            if artefact and "source" in about:
                key = (artefact.task, artefact.author, artefact.source_sha256)
                objects.setdefault(key, {})[artefact.act] = artefact.object_sha256
            done += 1
            progress(done, total)

    def submit(task: Task, source: str, author: str, act: str, chosen: list[dict]) -> list[tuple[dict, Future]]:
        about = {"task": task, "source": source, "author": author, "act": act}
        return [({**about, "config": c}, submit_compile(pool, source, task, act, c)) for c in chosen]

    finish([job for t, src, who in kernels for act in t.dtypes for job in submit(t, src, who, act, usable[t.name][:1])])
    jobs: list[tuple[dict, Future]] = []
    seen: set[tuple] = set()
    for task, source, author in kernels:
        made = objects.get((task.name, author, hashlib.sha256(source.encode()).hexdigest()), {})
        code = (task.name, *sorted(made.items()))
        if code in seen and len(made) == len(task.dtypes):
            continue
        seen.add(code)
        for act in (a for a in task.dtypes if a in acts):
            jobs += submit(task, source, author, act, usable[task.name][1:])
    expert_tasks = {t.name: t for t, _, _ in kernels if experts and t.name in EXPERTS}.values()
    for task in expert_tasks:
        for config in usable[task.name]:
            about = {"task": task, "author": EXPERT_AUTHOR, "act": acts[0], "config": config}
            jobs.append((about, submit_expert(pool, task, acts[0], config)))
    finish(jobs)
    for task, source, author in kernels:
        digest = hashlib.sha256(source.encode()).hexdigest()
        content["kernels"].append({"task": task.name, "author": author, "source_sha256": digest, "source": source})
    content["tasks"] = {t.name: t.model_dump(mode="json") for t, _, _ in kernels}
    content["suite"] = str(suite) if suite else None
    content["isolation"] = sandbox.level()[0]
    content["commit"] = commit()
    (directory / "bundle.json").write_text(json.dumps(content, indent=1) + "\n")
    return content


def commit(root: Path = Path(__file__).resolve().parent.parent) -> str | None:
    """The commit of this harness, with ``+dirty`` when code or suite differ from it; None outside a checkout."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed copy may lie inside somebody else's repository
    if git("ls-files", "--error-unmatch", "verifier/bundle.py") is None:
        return None
    head = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--", "*.py", "*.yaml", "pyproject.toml", ":!generated/*/*", ":!tests")
    return head and head + ("+dirty" if changed else "")
