"""The verbs that test the tests, ``mutate`` and ``redteam``, and ``sanitize``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from reference_kernels.tasks import Suite, SuiteError
from verifier.verdict import HarnessError

from .cli import (
    ERROR,
    FAIL,
    PASS,
    JsonOption,
    LibraryOption,
    Progress,
    TasksOption,
    _library,
    _pool,
    _read,
    _shape,
    _suite,
    app,
    emit,
    err,
    out,
)  # fmt: skip


@app.command()
def mutate(
    names: Annotated[list[str] | None, typer.Argument(help="Tasks whose tests to test.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every task of the suite.")] = False,
    kernel: Annotated[
        Path | None,
        typer.Option(help="A known-good kernel of the one task (default: composed, else from the library)."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs (default: always the same).")] = None,
    tasks_file: TasksOption = None,
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plant mistakes in a known-good kernel; the checks must notice every one."""
    import torch

    from verifier.mutation import SEED, load_equivalents
    from verifier.mutation import mutate as judge_mutants

    suite = _suite(tasks_file)
    chosen = list(suite.tasks) if every else [suite[n].name for n in names or []]
    if not chosen:
        raise SuiteError("name at least one task, or use --all")
    if kernel and len(chosen) != 1:
        raise SuiteError("--kernel is the kernel of one task; name just that task")
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    equivalents = load_equivalents()
    tallies = []
    with Progress(as_json) as progress:
        for name in chosen:
            progress(name, "judging mutants")
            source = _read(kernel) if kernel else known_good(suite, name, library)
            listed = {} if kernel or tasks_file else equivalents.get(name, {})
            tally = judge_mutants(
                suite[name], source, listed, tasks_file and suite.path, SEED if seed is None else seed
            )
            tallies.append(tally)
            progress.done(name)
            if not as_json:
                _print_mutants(tally)
    if as_json:
        emit({"passed": all(t.passed for t in tallies), "tasks": [t.as_dict() for t in tallies]})
    else:
        out.print(_rates(tallies))
    raise typer.Exit(PASS if all(t.passed for t in tallies) else FAIL)


def known_good(suite: Suite, name: str, library: Path | None) -> str:
    """A kernel that is right: what the composer writes, else a kernel of the library."""
    from .composer import CannotCompose, compose

    try:
        return compose(suite[name])
    except CannotCompose as e:
        lib = _library(library)
        for passport in lib.passports(name):
            return lib.source(passport)
        raise HarnessError(f"no known-good kernel for {name}: {e}; give one with --kernel FILE") from e


def _print_mutants(tally: Any) -> None:
    table = Table(
        "mutant", "noticed by", "in", title=f"{tally.task}: {tally.rate:.1%} of {len(tally.counted)} killed", box=None
    )
    for fate in tally.fates:
        by = {"survived": "[red]SURVIVED[/]", "construction": "does not run"}.get(fate.how, escape(fate.output))
        if fate.equivalent:
            by = "[yellow]equivalent[/]" if not fate.killed else "[red]killed, yet listed as equivalent[/]"
        table.add_row(escape(fate.mutant), by, escape(fate.case or fate.equivalent))
    out.print(table)
    for mutant in tally.stale:
        out.print(f"[red]stale[/] equivalents.yaml names {escape(mutant)!r}, which is no mutant of {tally.task}")


def _rates(tallies: list) -> Table:
    table = Table("task", "killed", "of", "rate", "equivalent", "do not run", "seconds", title="Kill rates")
    for t in tallies:
        d = t.as_dict()
        colour = "green" if t.passed else "red"
        table.add_row(
            t.task, str(d["killed"]), str(d["counted"]), f"[{colour}]{t.rate:.1%}[/]", str(d["equivalent"]),
            str(d["by_construction"]), f"{t.seconds:.1f}",
        )  # fmt: skip
    return table


@app.command()
def redteam(
    only: Annotated[
        list[str] | None, typer.Argument(help="Only cases whose name or code contains one of these.")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="The cases that need a Hopper GPU, instead of the others.")
    ] = False,
    compile_to: Annotated[
        Path | None, typer.Option(help="Only compile the GPU cases into this directory, to run elsewhere.")
    ] = None,
    compiled: Annotated[
        Path | None, typer.Option("--compiled", help="With --gpu: a directory of --compile-to.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the known exploits and the honest controls against this harness."""
    from verifier.redteam.attacks import ATTACKS
    from verifier.redteam.case import load_cases
    from verifier.redteam.gpu import compile_cases, run_gpu
    from verifier.redteam.runner import run

    from .library_attacks import ATTACKS as LIBRARY_ATTACKS

    if compile_to:
        with Progress(as_json) as progress, _pool() as pool:
            progress("red team", "compiling the GPU cases")
            compile_cases(pool, compile_to, load_cases("gpu"))
        if as_json:
            emit({"compiled": str(compile_to)})
        else:
            out.print(f"Run them on a Hopper GPU: coda-agent redteam --gpu --compiled {compile_to}", highlight=False)
        raise typer.Exit(PASS)

    def wanted(case: Any) -> bool:
        return not only or any(o in case.name or o in case.codes for o in only)

    cases = [c for c in (load_cases("gpu") if gpu else load_cases()) if wanted(c)]
    attacks = [] if gpu else [a for a in (*ATTACKS, *LIBRARY_ATTACKS) if wanted(a)]
    if not cases and not attacks:
        raise HarnessError(f"no red-team case matches {', '.join(only or [])}")
    done: list = []
    with Progress(as_json) as progress, nullcontext() if gpu and compiled else _pool() as pool:

        def note(outcome: Any) -> None:
            done.append(outcome)
            progress("red team", f"{len(done)} of {len(cases) + len(attacks)}, last {outcome.name}")

        outcomes = run_gpu(pool, cases, note, compiled) if gpu else run(pool, cases, attacks, note)
    failed = [o for o in outcomes if not o.ok and not o.skipped]
    skipped = [o for o in outcomes if o.skipped]
    if as_json:
        emit(
            {
                "passed": not failed,
                "failed": len(failed),
                "skipped": len(skipped),
                "cases": [o.as_dict() for o in outcomes],
            }
        )
    else:
        out.print(_outcomes(outcomes))
        out.print(f"{len(outcomes) - len(failed) - len(skipped)} of {len(outcomes)} as they must be", highlight=False)
    if skipped:
        err.print(f"[red]{len(skipped)} cases were not run:[/] {escape(skipped[0].reason)}", soft_wrap=True)
    raise typer.Exit(FAIL if failed else PASS)


def _outcomes(outcomes: list) -> Table:
    table = Table("", "case", "class", "must be", "was", "reason", title="Red team")
    for o in outcomes:
        mark = "[yellow]not run[/]" if o.skipped else ("[green]ok[/]" if o.ok else "[red]FAIL[/]")
        table.add_row(mark, o.name, " ".join(o.codes), o.expected, o.got, escape(o.reason.replace("\n", " ")[:110]))
    return table


@app.command()
def sanitize(
    bundle: Annotated[Path, typer.Argument(help="A directory of 'coda-agent bundle'.")],
    only: Annotated[list[str] | None, typer.Option("--task", help="Only these tasks of the bundle.")] = None,
    tool: Annotated[
        list[str] | None, typer.Option(help="memcheck, racecheck, synccheck or initcheck (default: all four).")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="MxNxK instead of each task's first ragged size.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run each kernel of a bundle once under NVIDIA compute-sanitizer, on this machine's GPU.

    Exit code 0: clean; 1: a fault; 2: no fault, but a tool that proves nothing here.
    """
    from verifier.measure import read_bundle
    from verifier.sanitize import TOOLS, sanitize_bundle, sanitizer

    unknown = [t for t in tool or () if t not in TOOLS]
    if unknown:
        raise HarnessError(f"no tool {unknown[0]!r}; there is: {', '.join(TOOLS)}")
    sanitizer()
    with Progress(as_json) as progress:
        kernels = sanitize_bundle(
            read_bundle(bundle), only, tuple(tool or TOOLS), _shape(shape) if shape else None,
            lambda text: progress("sanitize", text),
        )  # fmt: skip
    results = [t for k in kernels for t in k["tools"]]
    faults, unproven = ([t for t in results if t["result"] == r] for r in ("fault", "inconclusive"))
    if as_json:
        emit({"passed": not faults and not unproven, "kernels": kernels})
    else:
        table = Table("task", "author", "configuration", "M x N x K", *(t["tool"] for t in kernels[0]["tools"]))
        colours = {"clean": "green", "fault": "red", "inconclusive": "yellow"}
        for k in kernels:
            cells = (f"[{colours[t['result']]}]{t['result']}[/]" for t in k["tools"])
            table.add_row(k["task"], escape(k["author"]), k["config"], "x".join(map(str, k["shape"])), *cells)
        out.print(table)
        for k in kernels:
            for t in (t for t in k["tools"] if t["result"] == "fault"):
                out.print(f"{k['task']} {k['author']} {t['tool']}:", markup=False, highlight=False)
                out.print(t["report"], markup=False, highlight=False)
    for name, report in dict.fromkeys((t["tool"], t["report"]) for t in unproven):
        err.print(
            f"[red]inconclusive:[/] {name} proves nothing here, {escape(report)}", highlight=False, soft_wrap=True
        )
    raise typer.Exit(FAIL if faults else ERROR if unproven else PASS)
