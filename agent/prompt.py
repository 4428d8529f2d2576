"""What an author model is told: one static part for all tasks, one part for the task at hand.

The static part depends on nothing but the templates in ``prompts/``, the author
documentation and the active tips: the same bytes in every call, so providers can cache it.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

import jinja2

from generated.library import Library
from primitives.shapes import shape_of, traffic
from reference_kernels.tasks import ACT_DTYPES, Suite, Task, TensorSpec

from .composer import CannotCompose, compose
from .pages import page
from .review.notes import open_requests, withdrawn
from .tips import Tip, active_tips

FOLDER = Path(__file__).parent / "prompts"
EXAMPLES = 3
MATMUL_FLOPS, COPY_BYTES = 7e14, 4.2e12  # what an H200 reaches, per second; only for the floor shown to authors


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt and what went into it."""

    static: str
    task: str
    tips: tuple[str, ...]  # ids
    examples: tuple[str, ...]  # tasks whose kernels are shown

    @property
    def text(self) -> str:
        return f"{self.static}\n\n{self.task}"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown, not HTML
        keep_trailing_newline=False,
    )


def render(
    task: Task,
    suite: Suite,
    *,
    tools: bool = False,
    can_measure: bool = False,
    attempts: int = 0,
    tips: list[Tip] | None = None,
    library: Library | None = None,
    author: str | None = None,
) -> Prompt:
    """The prompt for one task.

    Args:
        tools: the reader can call the harness's tools; otherwise it answers with the file.
        attempts: calls of check_kernel it may make, told to readers with tools.
        tips: instead of the active ones of the tips log.
        library: whose reviewers are heard: their open requests for changes to kernels of the
            task are told, and what they rejected or retired is no example.
        author: only requests to this kind of author are told.
    """
    tips = active_tips() if tips is None else tips
    static = _templates().get_template("static.md.j2").render(page=page, tips=tips)
    shown = examples(task, suite, without=withdrawn(library) if library else frozenset())
    body = (
        _templates()
        .get_template("task.md.j2")
        .render(
            task=task,
            tensors=[_tensor_row(task, name, spec) for name, spec in task.tensors.items()],
            traffic=[_traffic_row(task, shape) for shape in task.timed],
            pages=[page(kind) for kind in dict.fromkeys(s.kind for s in task.tensors.values())],
            examples=[{"task": t.name, "summary": t.summary, "source": source} for t, source in shown],
            requests=open_requests(library, task.name, author) if library else [],
            closing="closing_tools.md.j2" if tools else "closing_handoff.md.j2",
            can_measure=can_measure,
            attempts=attempts,
        )
    )
    return Prompt(static.strip(), body.strip(), tuple(t.id for t in tips), tuple(t.name for t, _ in shown))


def same_mathematics(a: Task, b: Task) -> bool:
    """Whether a kernel for one task gives the other away: the same task, or its lean or full variant."""

    def stem(task: Task) -> str:
        return task.name.removesuffix("_lean")

    def steps(task: Task) -> list[str]:
        return [line.op for line in task.ops if line.op != "store"]

    return stem(a) == stem(b) or steps(a) == steps(b)


def nearest(task: Task, suite: Suite) -> list[Task]:
    """Tasks whose kernels may be shown for ``task``, most alike first: shared ops and kinds over all of both."""

    def features(t: Task) -> set[str]:
        return {line.op for line in t.ops} | {f"{s.kind} {s.width:g}" for s in t.tensors.values()}

    mine = features(task)
    others = [t for t in suite.tasks.values() if not same_mathematics(task, t)]
    return sorted(others, key=lambda t: -len(mine & features(t)) / len(mine | features(t)))


def examples(
    task: Task, suite: Suite, count: int = EXAMPLES, without: frozenset[str] = frozenset()
) -> list[tuple[Task, str]]:
    """The few-shot examples of a task, with the built-in author's kernels; one of each family of lookalikes.

    Args:
        without: source hashes of kernels that are not shown.
    """
    found: list[tuple[Task, str]] = []
    for other in nearest(task, suite):
        if len(found) == count:
            break
        if any(same_mathematics(other, shown) for shown, _ in found):
            continue
        try:
            found.append((other, example_source(other, without)))
        except CannotCompose:
            continue
    return found


def example_source(task: Task, without: frozenset[str]) -> str:
    """The built-in author's kernel, to be shown to others.

    Raises:
        CannotCompose: there is none, or a reviewer does not stand behind it (``without``).
    """
    source = compose(task)
    if hashlib.sha256(source.encode()).hexdigest() in without:
        raise CannotCompose(f"a reviewer withdrew the kernel for {task.name}")
    return source


def _tensor_row(task: Task, name: str, spec: TensorSpec) -> dict:
    role = "operand" if name in task.operands else "output"
    shape = {0: "one number"}.get(len(shape_of(spec.declared, 1, 1))) or _shape_text(spec)
    if spec.dtype == "int32":
        declaration = "nothing: not declared, not a parameter; `ColVecSelect` names it"
    elif spec.kind == "HeadRstd":
        declaration, shape = f"`{name}={_call(spec)}`", "computed"
    else:
        declaration = f"`{name}={_call(spec)}`"
    dtype = spec.dtype or ("act" if spec.kind.startswith("Tile") else "fp32")
    return {"name": name, "role": role, "declaration": declaration, "shape": shape,
            "dtype": "bf16 or fp16" if dtype == "act" else dtype}  # fmt: skip


def _shape_text(spec: TensorSpec) -> str:
    if spec.kind.startswith("Tile"):
        return {0.5: "(M, N/2)", 1: "(M, N)", 2: "(M, 2N)"}[spec.width]
    return "(N,)" if spec.kind.startswith("RowVec") else "(M,)"


def _call(spec: TensorSpec) -> str:
    options = {}
    if spec.width != 1:
        options["width"] = "1 / 2" if spec.width == 0.5 else "2"
    if spec.combine != "add":
        options["combine"] = f'"{spec.combine}"'
    if spec.kind == "ColVecSelect":
        options["index"] = f'"{spec.index}"'
    if spec.kind == "HeadRstd":
        options |= {"head_dim": str(spec.head_dim), "eps": repr(spec.eps)}
    return f"{spec.kind}({', '.join(f'{k}={v}' for k, v in options.items())})"


def _traffic_row(task: Task, shape: tuple[int, int, int]) -> dict:
    act = ACT_DTYPES[task.dtypes[0]]
    t = traffic(task.kinds, task.torch_dtypes(act), act, *shape)
    matrices = t.reads["A"] + t.reads["B"]
    compute, memory = t.flops / MATMUL_FLOPS, t.bytes / COPY_BYTES
    return {
        "shape": " x ".join(map(str, shape)),
        "matrices": round(matrices / 1e6),
        "epilogue": round((t.bytes - matrices) / 1e6),
        "floor": round(1e6 * max(compute, memory)),
        "bound": "the tensor cores" if compute >= memory else "memory traffic",
    }
