"""The part of the red team that needs a GPU: wrong device code and tampered artefacts against the numerics.

Each case is compiled and launched as if the stages before had let it through.
One worker serves all cases in order, so a hang or a fault that outlives its
candidate shows in the next one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference_kernels.tasks import Task

from ..bundle import CONFIGS, build
from ..gpu import GpuWorker
from ..manifest import Artefact, sha256
from ..measure import Bundle, Measurement, Session
from ..pool import Pool
from ..verdict import HarnessError
from .case import OWN_SUITE, Case, load_cases, suites
from .runner import Outcome, find_task, judged

PATIENCE = 45.0  # seconds a command may take: the longest honest one takes a few, a hang takes all

# the honest kernels whose artefacts are tampered with, beside the template's gemm_rmsnorm
_HONEST = {
    "gemm_residual_rmsnorm": """\
from primitives import ColVecReduce, RowVecLoad, TileLoad, TileStore, epilogue


@epilogue(residual=TileLoad(), weight=RowVecLoad(), h=TileStore(), sumsq=ColVecReduce(), y=TileStore())
def gemm_residual_rmsnorm(acc, residual, weight):
    h = acc + residual
    return {"h": h, "sumsq": h * h, "y": h * weight}
""",
    "gemm_residual_rmsnorm_bwd_lean": """\
from primitives import ColVecLoad, RowVecLoad, RowVecReduce, TileLoad, TileStore, epilogue


@epilogue(
    x=TileLoad(),
    dx_in=TileLoad(),
    weight=RowVecLoad(),
    correction=ColVecLoad(),
    dx=TileStore(),
    dweight=RowVecReduce(product=True),
)
def gemm_residual_rmsnorm_bwd_lean(acc, x, dx_in, weight, correction):
    return {"dx": dx_in + acc * weight + x * correction, "dweight": (acc, x)}
""",
}


class _Impatient(GpuWorker):
    """A worker whose hangs are noticed sooner than in a measurement."""

    def call(self, cmd: str, timeout: float = PATIENCE, **fields: Any) -> dict:
        return super().call(cmd, min(timeout, PATIENCE), **fields)


def source_of(case: Case) -> str:
    """Text of a case; the last line makes every case a kernel of its own, whatever it is planted in."""
    text = _HONEST.get(case.task, case.text) if case.source is None else case.text
    return f"{text}# {case.name}\n"


def _task(case: Case) -> Task:
    return find_task(case.task, *suites())[0]


def compile_cases(pool: Pool, directory: Path, cases: list[Case]) -> None:
    """Compile every case in both dtypes; nothing is refused here for what it declares.

    Raises:
        HarnessError: a case does not compile, so it would show nothing.
    """
    kernels = [(_task(c), source_of(c), c.name) for c in cases]
    content = build(kernels, directory, pool, configs=CONFIGS[:1], experts=False, suite=OWN_SUITE)
    if content["failed"]:
        first = content["failed"][0]
        raise HarnessError(f"red-team case {first['author']} does not compile: {first['reason']}")


def read_cases(directory: Path, cases: list[Case]) -> Bundle:
    """The compiled cases, without the refusals of ``measure.read_bundle``.

    Raises:
        HarnessError: they are missing or of other sources.
    """
    try:
        content = json.loads((directory / "bundle.json").read_text())
        paths = [directory / name for name in content["manifests"]]
        artefacts = [(str(p.resolve()), Artefact.model_validate_json(p.read_text())) for p in paths]
    except (OSError, ValueError, KeyError) as e:
        raise HarnessError(
            f"no compiled red-team cases in {directory} ({e}); run 'coda-agent redteam --compile-to {directory}'"
        ) from e
    there = {(a.author, a.source_sha256) for _, a in artefacts}
    missing = [c.name for c in cases if (c.name, _digest(c)) not in there]
    if missing:
        raise HarnessError(f"{directory} holds other sources of {', '.join(missing)}; compile them again")
    content["suite"] = str(OWN_SUITE)  # compiled elsewhere, the path was another
    return Bundle(directory, content, artefacts, {c.task: _task(c) for c in cases})


def _digest(case: Case) -> str:
    return hashlib.sha256(source_of(case).encode()).hexdigest()


def run_gpu(
    pool: Pool | None,
    chosen: list[Case] | None = None,
    progress: Callable[[Outcome], None] = lambda outcome: None,
    compiled: Path | None = None,
) -> list[Outcome]:
    """Every GPU case, in order, on one worker.

    Args:
        pool: compiles the cases; not needed when they are given.
        compiled: directory of ``compile_cases``, made on any machine; it is not changed.

    Raises:
        NoGpu: there is no Hopper GPU here.
    """
    every = load_cases("gpu")  # some cases are tampered with using the object of another
    cases = every if chosen is None else chosen
    outcomes = []
    with _Impatient() as worker, tempfile.TemporaryDirectory(prefix="coda-agent-redteam-") as tmp:
        directory = Path(tmp) / "compiled"
        if compiled:
            shutil.copytree(compiled, directory)
        else:
            compile_cases(pool, directory, every)
        bundle = read_cases(directory, every)
        for case in cases:
            if case.tamper:
                TAMPERS[case.tamper](bundle, case)
        session = Session(worker, bundle)
        for case in cases:
            start = time.perf_counter()
            subject = Measurement(case.task, case.name, _digest(case))
            session._numerics(bundle.tasks[case.task], subject)
            verdict = subject.verdicts[-1]
            stage = "accepted" if subject.passed else verdict.stage
            outcomes.append(judged(case, stage, verdict.reason, time.perf_counter() - start))
            progress(outcomes[-1])
    return outcomes


# --- tampering, after the compile and before the launch ------------------------------------


def _own(bundle: Bundle, case: Case) -> list[tuple[Path, Artefact]]:
    return [(Path(path), artefact) for path, artefact in bundle.artefacts if artefact.author == case.name]


def _rewrite(bundle: Bundle, case: Case, **changes: Callable[[Artefact], Any]) -> None:
    for path, artefact in _own(bundle, case):
        changed = artefact.model_copy(update={field: change(artefact) for field, change in changes.items()})
        path.write_text(changed.model_dump_json())


def _renamed(names: dict[str, str]) -> Callable[[Artefact], list[str]]:
    return lambda artefact: [names.get(f, f) for f in artefact.fields]


def _one_output_twice(bundle: Bundle, case: Case) -> None:
    _rewrite(bundle, case, d=lambda a: "y", fields=_renamed({"h": "y"}))


def _outputs_exchanged(bundle: Bundle, case: Case) -> None:
    other = {"h": "y", "y": "h"}
    _rewrite(bundle, case, d=lambda a: other[a.d], fields=_renamed(other))


def _reductions_exchanged(bundle: Bundle, case: Case) -> None:
    _rewrite(bundle, case, fields=_renamed({"rows": "columns", "columns": "rows"}))


def _output_on_operand(bundle: Bundle, case: Case) -> None:
    _rewrite(bundle, case, fields=_renamed({"logit": "rstd"}))


def _operand_aliased(bundle: Bundle, case: Case) -> None:
    _rewrite(bundle, case, fields=_renamed({"x": "dx_in"}), c=lambda a: "dx_in" if a.c == "x" else a.c)


def _tile_columns(factor: float) -> Callable[[Artefact], dict]:
    return lambda artefact: {**artefact.config, "tile_n": int(artefact.config["tile_n"] * factor)}


def _fewer_partials(bundle: Bundle, case: Case) -> None:
    _rewrite(bundle, case, config=_tile_columns(2))


def _more_partials(bundle: Bundle, case: Case) -> None:
    _rewrite(bundle, case, config=_tile_columns(0.5))


def _wrong_objects(bundle: Bundle) -> dict[str, Path]:
    """By dtype: the object of the case that ignores its operand."""
    return {a.act: Path(p).parent / a.object for p, a in bundle.artefacts if a.author == "gpu_operand_ignored"}


def _object_swapped(bundle: Bundle, case: Case) -> None:
    wrong = _wrong_objects(bundle)
    for path, artefact in _own(bundle, case):
        shutil.copyfile(wrong[artefact.act], path.parent / artefact.object)


def _object_and_hash_swapped(bundle: Bundle, case: Case) -> None:
    _object_swapped(bundle, case)
    _rewrite(bundle, case, object_sha256=lambda a: sha256(bundle.directory / a.object))


def _dtypes_exchanged(bundle: Bundle, case: Case) -> None:
    own = {a.act: a for _, a in _own(bundle, case)}
    other = {"bf16": own["fp16"], "fp16": own["bf16"]}
    _rewrite(bundle, case, object=lambda a: other[a.act].object, object_sha256=lambda a: other[a.act].object_sha256)


TAMPERS = {
    "one_output_twice": _one_output_twice,
    "outputs_exchanged": _outputs_exchanged,
    "reductions_exchanged": _reductions_exchanged,
    "output_on_operand": _output_on_operand,
    "operand_aliased": _operand_aliased,
    "fewer_partials": _fewer_partials,
    "more_partials": _more_partials,
    "object_swapped": _object_swapped,
    "object_and_hash_swapped": _object_and_hash_swapped,
    "dtypes_exchanged": _dtypes_exchanged,
}
