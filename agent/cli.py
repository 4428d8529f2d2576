"""The command line: ``coda-agent``. Verbs are thin; the work is in the modules they call."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from agent.redact import redact
from generated.library import DEFAULT as DEFAULT_LIBRARY
from generated.library import Library, LibraryError, Passport
from reference_kernels.tasks import Suite, SuiteError, load_suite
from verifier.verdict import HarnessError

PASS, FAIL, ERROR, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    help="Turn a list of Transformer operations into a proven, fast, reviewed GPU kernel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out, err = Console(), Console(stderr=True)

TasksOption = Annotated[Path | None, typer.Option("--tasks", help="Your own suite instead of tasks.yaml.")]
LibraryOption = Annotated[Path | None, typer.Option("--library", help="Library directory instead of generated/.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
RunsOption = Annotated[Path, typer.Option("--runs", help="Where runs keep their journals.")]


def emit(data: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")


def main() -> None:
    """Entry point: known faults become one line on stderr and exit code 2."""
    try:
        app()
    except (SuiteError, LibraryError, HarnessError) as e:
        if "--json" in sys.argv:
            emit({"error": redact(str(e))})
        err.print(f"[red]error:[/] {escape(redact(str(e)))}", highlight=False, soft_wrap=True)
        sys.exit(ERROR)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(INTERRUPTED)


def _suite(path: Path | None) -> Suite:
    return load_suite(path)


def _library(path: Path | None) -> Library:
    return Library(path)


class Progress:
    """What each task is doing, with elapsed time; live on a terminal, plain lines elsewhere."""

    def __init__(self, quiet: bool):
        self.quiet = quiet
        self.state: dict[str, tuple[str, float]] = {}
        self.started = time.monotonic()
        self.live = Live(get_renderable=self._table, console=err, refresh_per_second=4, transient=True)

    def __enter__(self) -> Progress:
        if not self.quiet and err.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.live.is_started:
            self.live.stop()

    def __call__(self, task: str, text: str) -> None:
        now = time.monotonic()
        begun = self.state.get(task, ("", now))[1]
        self.state[task] = (text, begun)
        if not self.quiet and not err.is_terminal:
            err.print(f"{now - self.started:7.1f} s  {task}: {text}", highlight=False, soft_wrap=True)

    def done(self, task: str) -> None:
        self.state.pop(task, None)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for task, (text, begun) in self.state.items():
            table.add_row(f"[bold]{task}[/]", text, f"{now - begun:.0f} s")
        return table


@contextmanager
def _pool(jobs: int | None = None) -> Iterator[Any]:
    from verifier.pool import Pool

    with Pool(jobs) as pool:
        yield pool


# --- looking -------------------------------------------------------------------


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="Show one task in full.")] = None,
    tasks_file: TasksOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the suite, or show one task with its mathematics."""
    suite = _suite(tasks_file)
    if name:
        task = suite[name]
        if as_json:
            return emit(task.model_dump(mode="json"))
        out.print(f"[bold]{task.name}[/]  {task.summary}", highlight=False)
        out.print(task.math, highlight=False, markup=False)
        table = Table("tensor", "kind", "dtype", "fill")
        for tensor, spec in task.tensors.items():
            table.add_row(tensor, str(spec.declared), spec.dtype or "act/fp32", spec.fill if tensor in task.operands else "")
        out.print(table)
        for line in task.ops:
            out.print(f"  {line}", highlight=False, markup=False)
        out.print(task.special_values, highlight=False, markup=False)
        out.print("timed: " + ", ".join("x".join(map(str, s)) for s in task.timed), highlight=False)
        return None
    if as_json:
        return emit({n: t.model_dump(mode="json") for n, t in suite.tasks.items()})
    table = Table("task", "paper", "what", "ops", title=str(suite.path))
    for task in suite.tasks.values():
        table.add_row(task.name, str(task.paper or ""), task.summary, str(len(task.ops)))
    out.print(table)
    return None


@app.command()
def docs(
    name: Annotated[str | None, typer.Argument(help="A primitive, e.g. ColVecReduce or silu.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Author documentation: the vocabulary of kernel files, or one primitive."""
    from agent.pages import page, pages

    if name is None:
        by_family = pages()
        if as_json:
            return emit(by_family)
        for family, names in by_family.items():
            out.print(f"[bold]{family}[/]: {', '.join(names)}", highlight=False)
        return None
    text = page(name)
    if as_json:
        return emit({"name": name, "page": text})
    out.print(text, markup=False, highlight=False)
    return None


@app.command()
def show(
    kernel: Annotated[str, typer.Argument(help="Kernel id, task/kernel, or task when it has one kernel.")],
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """A kernel of the library: source, verdicts, timings."""
    lib = _library(library)
    passport = lib.find(kernel)
    source = lib.source(passport)
    if as_json:
        return emit({**passport.model_dump(), "state": passport.state, "source": source, "path": str(lib.path(passport))})
    out.print(
        f"[bold]{passport.task}/{passport.kernel}[/]  by {passport.author}, {passport.status_text}, {passport.state}", highlight=False
    )
    out.print(Syntax(source, "python", theme="ansi_dark", word_wrap=True))
    for verdict in (*passport.check, *passport.measure):
        mark = "[green]pass[/]" if verdict["passed"] else "[red]FAIL[/]"
        out.print(f"{mark} {verdict['stage']}: {verdict['reason']}", highlight=False, soft_wrap=True)
    if passport.timings:
        out.print(timing_table(passport))
    for d in passport.history:
        out.print(f"{d.at} {d.verb} by {d.reviewer}: {d.reason}", markup=False, highlight=False, soft_wrap=True)
    return None


def timing_table(passport: Passport) -> Table:
    """Timings of one kernel, a row per device and shape; ratios to everything it was timed against."""
    from leaderboard.board import ordered

    against = ordered({name for row in passport.timings for name in row["ratios"]})
    table = Table("device", "M x N x K", "config", "µs", "finish", "tax", "of floor", *(f"vs {name}" for name in against))
    for row in passport.timings:
        ratios = row["ratios"]

        def cell(name: str, ratios=ratios) -> str:
            r = ratios.get(name)
            return f"{r['median']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" if r else "-"

        table.add_row(
            row["device"], "x".join(map(str, row["shape"])), row["config"], f"{row['total_us']:.1f}",
            f"{row['finish_us']:.1f}", f"{row['tax_us']:+.1f}", f"{row['share_of_floor']:.0%}",
            *map(cell, against),
        )  # fmt: skip
    return table


@app.command()
def doctor(library: LibraryOption = None, as_json: JsonOption = False) -> None:
    """What this machine can do, what is missing, and the command that mends it."""
    from agent.doctor import examine

    found = examine(_library(library).root)
    broken = [f for f in found if f.needed and not f.ok]
    if as_json:
        emit({"ok": not broken, "findings": [f.as_dict() for f in found]})
    else:
        table = Table("", "what", "found", "what to do")
        for f in found:
            mark = "[green]ok[/]" if f.ok else ("[red]missing[/]" if f.needed else "[yellow]limited[/]")
            table.add_row(mark, f.what, f.found, f.mend)
        out.print(table)
        can = "check and bundle" + (" and measure" if all(f.ok for f in found if f.what == "GPU") else "; measuring needs a Hopper GPU")
        out.print(f"This machine can {can}." if not broken else "Mend the missing parts first.", highlight=False)
    raise typer.Exit(PASS if not broken else FAIL)


# --- checking and measuring --------------------------------------------------------


def _task_of(suite: Suite, file: Path, source: str, task: str | None) -> str:
    """The task a file is for: given, or the name of its epilogue function."""
    if task:
        return suite[task].name
    for name in suite.tasks:
        if f"def {name}(" in source:
            return name
    raise SuiteError(f"{file} does not say which task it is for; give it with --task NAME")


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise HarnessError(f"cannot read {file}: {getattr(e, 'strerror', None) or e}") from e


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A kernel file, or - for standard input.")],
    task: Annotated[str | None, typer.Option(help="Task it is for (default: its function's name).")] = None,
    tasks_file: TasksOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs (default: fresh).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check one kernel file without a GPU: policy, interpret, compile, resources."""
    from verifier.check import check as run_check

    suite, source = _suite(tasks_file), _read(file)
    name = _task_of(suite, file, source, task)
    with _pool() as pool, Progress(as_json) as progress:
        report = run_check(
            source, suite[name], pool, suite_path=suite.path, seed=seed, progress=lambda s: progress(name, s)
        )
    if as_json:
        emit(report.as_dict())
    else:
        for v in report.verdicts:
            mark = "[green]pass[/]" if v.passed else "[red]FAIL[/]"
            out.print(f"{mark} {v.stage}: ", end="", highlight=False)
            out.print(v.reason, markup=False, highlight=False, soft_wrap=True)
        out.print(f"{name}: {'passed' if report.passed else 'failed'} in {report.seconds:.1f} s", highlight=False)
    raise typer.Exit(PASS if report.passed else FAIL)


def _kernels(suite: Suite, lib: Library, names: list[str], every: bool) -> list:
    """(task, source, author) of the library's kernels for these tasks."""
    chosen = list(suite.tasks) if every else [suite[n].name for n in names]
    if not chosen:
        raise SuiteError("name at least one task, or use --all")
    found = [(suite[p.task], lib.source(p), p.author) for t in chosen for p in lib.passports(t)]
    without = set(chosen) - {t.name for t, _, _ in found}
    if without:
        raise LibraryError(f"no kernel in {lib.root} for {', '.join(sorted(without))}; run 'coda-agent generate' first")
    return found


@app.command()
def bundle(
    names: Annotated[list[str] | None, typer.Argument(help="Tasks whose kernels to bundle.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every task of the suite.")] = False,
    to: Annotated[Path, typer.Option("--out", help="Directory to write.")] = Path("bundle"),
    configs: Annotated[int | None, typer.Option(help="Only the first N configurations.")] = None,
    tasks_file: TasksOption = None,
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile kernels in every configuration here, to measure on another machine."""
    from verifier.bundle import CONFIGS, build

    suite, lib = _suite(tasks_file), _library(library)
    kernels = _kernels(suite, lib, names or [], every)
    start = time.monotonic()
    with _pool() as pool, Progress(as_json) as progress:
        content = build(
            kernels, to, pool, configs=CONFIGS[: configs or len(CONFIGS)], suite=tasks_file and suite.path,
            progress=lambda done, total: progress("bundle", f"{done} of {total} compiled"),
        )  # fmt: skip
    summary = {
        "bundle": str(to), "objects": len(content["manifests"]), "failed": content["failed"],
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    if as_json:
        emit(summary)
    else:
        out.print(f"{summary['objects']} objects in {to} ({summary['seconds']:.0f} s)", highlight=False)
        for f in content["failed"]:
            out.print(f"  left out {f['task']} {f['author']} {f['config']}: {f['reason']}", markup=False, highlight=False)
        out.print(f"Measure it on a Hopper GPU: coda-agent measure {to}", highlight=False)
    raise typer.Exit(PASS if content["manifests"] else FAIL)


@app.command()
def measure(
    what: Annotated[list[str] | None, typer.Argument(help="A bundle directory, or tasks of the library.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every task.")] = False,
    only: Annotated[list[str] | None, typer.Option("--task", help="Only these tasks of the bundle.")] = None,
    baseline: Annotated[
        list[str] | None, typer.Option(help="torch.compile (default), torch.compile:max-autotune, eager, liger, flashinfer, coda; all.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="MxNxK instead of the task's sizes; may be given again.")] = None,
    tasks_file: TasksOption = None,
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure on this machine's Hopper GPU: numerics, choice of configuration, timing."""
    from agent.generate import measure_bundle
    from verifier.bundle import build
    from verifier.gpu import require_gpu

    lib, what = _library(library), what or []
    baselines, shapes = _baselines(baseline), [_shape(s) for s in shape or []] or None
    with Progress(as_json) as progress:
        say = lambda text: progress("measure", text)  # noqa: E731
        if len(what) == 1 and (Path(what[0]) / "bundle.json").exists():
            facts, measured = measure_bundle(Path(what[0]), lib, baselines, say, only, shapes)
        elif len(what) == 1 and Path(what[0]).is_dir():
            raise HarnessError(f"{what[0]} holds no bundle.json; make a bundle with: coda-agent bundle TASK --out {what[0]}")
        else:
            import tempfile

            require_gpu()
            suite = _suite(tasks_file)
            kernels = _kernels(suite, lib, what, every)
            with tempfile.TemporaryDirectory(prefix="coda-agent-bundle-") as tmp:
                with _pool() as pool:
                    build(kernels, Path(tmp), pool, suite=tasks_file and suite.path, progress=lambda d, t: say(f"{d} of {t} compiled"))
                facts, measured = measure_bundle(Path(tmp), lib, baselines, say, None, shapes)
    if as_json:
        emit({**facts, "kernels": [m.as_dict() for m in measured]})
    else:
        for m in measured:
            mark = "[green]pass[/]" if m.passed else "[red]FAIL[/]"
            out.print(f"{mark} {m.task} {m.author}: {m.verdicts[-1].reason}", highlight=False, soft_wrap=True)
        if any(m.rows for m in measured):
            from leaderboard.board import Filter, load_board
            from leaderboard.terminal import show as show_board

            board = load_board(lib.root)
            show_board(out, board, board.lines(Filter(sessions=(facts["session"],))))
    raise typer.Exit(PASS if measured and all(m.passed for m in measured) else FAIL)


def _baselines(names: list[str] | None) -> tuple[str, ...]:
    from leaderboard.baselines import available

    known = {n: state for n, state in available().items() if n != "gemm"}  # which is always timed
    for name in names or []:
        if name not in (*known, "all"):
            raise HarnessError(f"no baseline {name!r}; there is: {', '.join(known)}, all")
    return tuple(known) if "all" in (names or []) else tuple(names or ("torch.compile",))


def _shape(text: str) -> tuple[int, int, int]:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(p.isdecimal() and int(p) for p in parts):
        raise HarnessError(f"{text!r} is not a size; write MxNxK, such as 4096x14336x4096")
    m, n, k = map(int, parts)
    return m, n, k


# --- generating --------------------------------------------------------------------------


@app.command()
def generate(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Tasks to write kernels for.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every task of the suite.")] = False,
    author: Annotated[str, typer.Option(help="Who writes: composer (built in), claude, openai.")] = "composer",
    model: Annotated[str | None, typer.Option(help="Model of the author (claude has a default).")] = None,
    attempts: Annotated[int, typer.Option(min=1, help="Checks per conversation (the composer needs one).")] = 6,
    samples: Annotated[int, typer.Option(min=1, help="Conversations per task; the best kernel is kept.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Conversations at once.")] = 1,
    dollars: Annotated[float | None, typer.Option(min=0, help="Budget of the run; 5 for a model with a known price, 0 for none.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Budget of the run in tokens.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Budget of the run in minutes.")] = None,
    price: Annotated[str | None, typer.Option(help="Dollars per million tokens, IN,OUT.")] = None,
    thinking: Annotated[str, typer.Option(help="adaptive, none, or a number of tokens.")] = "adaptive",
    effort: Annotated[str | None, typer.Option(help="low, medium, high, xhigh or max (claude).")] = None,
    resume: Annotated[str | None, typer.Option(help="Continue a run: its id, a prefix, or 'last'.")] = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Do not measure, even with a GPU.")] = False,
    tips_log: Annotated[Path | None, typer.Option("--tips", help="Tips log instead of the built-in one.")] = None,
    tasks_file: TasksOption = None,
    library: LibraryOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Write, check and (with a Hopper GPU) measure kernels, and keep them in the library."""
    from agent.campaign import Settings, resume_run, start_run

    asked = Settings(
        tasks=[], author=author, model=model, attempts=attempts, samples=samples, jobs=jobs, dollars=dollars, tokens=tokens,
        minutes=minutes, price=price, thinking=thinking, effort=effort, no_measure=no_measure,
        suite=str(tasks_file) if tasks_file else None, library=str(library) if library else None,
        tips=str(tips_log) if tips_log else None,
    )  # fmt: skip
    limits = ("attempts", "jobs", "dollars", "tokens", "minutes", "price")
    given = {name for name in limits if context.get_parameter_source(name).name == "COMMANDLINE"}
    if resume:
        campaign = resume_run(runs, resume, asked, given)
    else:
        suite = _suite(tasks_file)
        asked.tasks = list(suite.tasks) if every else [suite[n].name for n in names or []]
        campaign = start_run(runs, asked)
    hold(campaign, as_json)


def hold(campaign: Any, as_json: bool) -> None:
    """Hold the conversations of an open run to their end and say how it went; the exit code is the verdict."""
    say: Callable[..., None] = (lambda *a: None) if as_json else (lambda t: out.print(t, highlight=False, soft_wrap=True))

    def done(outcome: Any) -> None:
        mark = "[green]kept[/]" if outcome.ending == "kept" else f"[red]{outcome.ending}[/]"
        cost = f"{outcome.attempts} attempts, {outcome.tokens} tokens, " if outcome.tokens else ""
        say(f"{mark} {outcome.task}  {outcome.kernel or ''}  {outcome.reason}  ({cost}{outcome.seconds:.1f} s)")

    run = campaign.run
    try:
        with _pool() as pool, Progress(as_json) as progress:
            result = campaign.go(pool, progress, lambda o: (progress.done(o.task), done(o)))
    except KeyboardInterrupt:
        run.log("interrupted")
        err.print(f"interrupted; continue with: coda-agent generate --resume {run.id}", highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        run.close()
    failed = [n for n, r in result["tasks"].items() if r["ending"] != "kept"]
    if as_json:
        emit(result)
    else:
        say(f"run {run.id}: {len(result['tasks']) - len(failed)} of {len(result['tasks'])} kept in {result['library']}")
        if result["tokens"]:
            known = f", ${result['dollars']:.2f}" if result["dollars"] is not None else ""
            say(f"{result['tokens']} tokens{known}; the story: coda-agent runs show {run.id}")
        say("measured on this machine" if result["measured"] else f"checked, not measured ({result['not_measured_because']})")
        kept = [f"{n}/{r['kernel']}" for n, r in result["tasks"].items() if r["ending"] == "kept"]
        if any(campaign.library.find(k).state == "proposed" for k in kept):  # one written before may be accepted
            where = "" if campaign.library.root == DEFAULT_LIBRARY else f" --library {result['library']}"
            say(f"proposed; what is served is decided with: coda-agent review{where}")
    raise typer.Exit(FAIL if failed else PASS)


if __name__ == "__main__":  # run the importable copy: the other modules add their verbs to that one
    from agent.cli import main as run

    run()
else:
    import agent.cli_authors
    import agent.cli_board
    import agent.cli_review
    import agent.cli_verify  # noqa: F401
