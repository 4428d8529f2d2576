"""Verbs around authors: ``prompt``, ``submit``, ``runs``, ``tips``, ``mcp``."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from verifier.verdict import HarnessError

from .cli import (
    FAIL,
    PASS,
    JsonOption,
    LibraryOption,
    Progress,
    RunsOption,
    TasksOption,
    _library,
    _pool,
    _read,
    _suite,
    _task_of,
    app,
    emit,
    out,
)  # fmt: skip

runs_app = typer.Typer(
    help="Runs: list them, read their story, give them a larger budget, go on.", no_args_is_help=True
)
tips_app = typer.Typer(help="The tips log: what authors should know about this stack.", no_args_is_help=True)
TipsOption = Annotated[Path | None, typer.Option("--tips", help="Tips log instead of the built-in one.")]


app.add_typer(runs_app, name="runs")
app.add_typer(tips_app, name="tips")


@app.command()
def prompt(
    task: Annotated[str, typer.Argument(help="Task to write a kernel for.")],
    diff: Annotated[str | None, typer.Option(help="Show what changed since this run (id, prefix or 'last').")] = None,
    sha: Annotated[
        bool, typer.Option("--sha", help="Print only the prompt's SHA-256, for submit --prompt-sha.")
    ] = False,
    with_tools: Annotated[
        bool, typer.Option("--with-tools", help="The prompt of an author that has the tools.")
    ] = False,
    attempts: Annotated[int, typer.Option(min=1, help="Checks told to an author with tools.")] = 6,
    tasks_file: TasksOption = None,
    library: LibraryOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Print exactly what an author needs to write a kernel: give it to any agent or person."""
    from .budget import CHARS_PER_TOKEN
    from .prompt import render
    from .run import find_run, read_events, read_prompt

    suite, lib = _suite(tasks_file), _library(library)
    made = render(suite[task], suite, tools=with_tools or diff is not None, attempts=attempts, library=lib)
    if diff is not None:
        directory = find_run(runs, diff)
        told = next((e for e in read_events(directory) if e["event"] == "prompt" and e["task"] == task), None)
        if told is None:
            raise HarnessError(f"run {directory.name} has no prompt for {task}")
        before = read_prompt(directory, told["sha256"])
        if attempts_then := next((e for e in read_events(directory) if e["event"] == "start"), {}).get("attempts"):
            made = render(suite[task], suite, tools=True, attempts=attempts_then, library=lib)
        lines = list(
            difflib.unified_diff(before.text.splitlines(), made.text.splitlines(), directory.name, "now", lineterm="")
        )
        if as_json:
            return emit(
                {"task": task, "run": directory.name, "before": told["sha256"], "now": made.sha256, "diff": lines}
            )
        print("\n".join(lines) or f"unchanged since {directory.name}")
        return None
    if as_json:
        return emit({"task": task, "sha256": made.sha256, "tips": made.tips, "examples": made.examples, "text": made.text,
                     "static_tokens_estimate": round(len(made.static) / CHARS_PER_TOKEN),
                     "task_tokens_estimate": round(len(made.task) / CHARS_PER_TOKEN)})  # fmt: skip
    print(made.sha256 if sha else made.text)
    return None


@app.command()
def submit(
    file: Annotated[
        Path,
        typer.Argument(help="A kernel file (or the answer that holds it as a code block), or - for standard input."),
    ],
    author: Annotated[str, typer.Option(help="Who wrote it: claude:MODEL, human:NAME, any KIND:NAME.")],
    task: Annotated[str | None, typer.Option(help="Task it is for (default: its function's name).")] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="How many attempts it took, if known.")] = None,
    prompt_sha: Annotated[
        str | None, typer.Option("--prompt-sha", help="Hash of the prompt it was written from, if known.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="Tokens it cost, if known.")] = None,
    dollars: Annotated[float | None, typer.Option(min=0, help="Dollars it cost, if known.")] = None,
    tasks_file: TasksOption = None,
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a kernel that was written elsewhere: the same gates, and into the library when it passes."""
    from .handoff import Known
    from .handoff import submit as hand_in

    suite, lib, text = _suite(tasks_file), _library(library), _read(file)
    known = Known(author, attempts, prompt_sha, tokens, dollars)
    name = _task_of(suite, file, text, task)
    with _pool() as pool, Progress(as_json) as progress:
        done = hand_in(text, suite[name], suite, lib, pool, known, lambda stage: progress(name, stage))
    if as_json:
        emit({**done.report.as_dict(), "author": author, "feedback": done.feedback,
              "kernel": done.passport.kernel if done.passport else None, "path": str(done.path) if done.path else None})  # fmt: skip
    else:
        out.print(done.feedback, markup=False, highlight=False, soft_wrap=True)
        if done.passport:
            out.print(
                f"kept as {done.passport.task}/{done.passport.kernel} in {lib.root}", highlight=False, soft_wrap=True
            )
    raise typer.Exit(PASS if done.passport else FAIL)


@app.command()
def mcp(tasks_file: TasksOption = None, library: LibraryOption = None, tips_log: TipsOption = None) -> None:
    """Serve the author's tools over the Model Context Protocol on standard input and output."""
    from .mcp_server import serve

    serve(_suite(tasks_file), _library(library), tips_log)


# --- runs ---


@runs_app.command("list")
def runs_list(runs: RunsOption = Path("runs"), as_json: JsonOption = False) -> None:
    """Every run: who wrote, how many kernels were kept, what it cost."""
    from .run import run_directories
    from .story import summary

    found = [summary(d) for d in run_directories(runs)]
    if as_json:
        return emit(found)
    table = Table("run", "author", "kept", "state", "tokens", "$")
    for s in found:
        cost = f"{s['dollars']:.2f}" if s["tokens"] and s["dollars"] is not None else "-"
        table.add_row(
            s["run"], s["model"] or s["author"], f"{s['kept']}/{s['tasks']}", s["state"], str(s["tokens"] or "-"), cost
        )
    out.print(table if found else f"no runs in {runs}")
    return None


@runs_app.command("show")
def runs_show(
    run: Annotated[str, typer.Argument(help="Run: id, prefix, or 'last'.")],
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """The story of a run: attempts, what failed, what changed, what it cost."""
    from .run import find_run
    from .story import as_text, story

    told = story(find_run(runs, run))
    if as_json:
        return emit(told)
    out.print(as_text(told), markup=False, highlight=False, soft_wrap=True)
    return None


@runs_app.command("extend")
def runs_extend(
    run: Annotated[str, typer.Argument(help="Run: id, prefix, or 'last'.")],
    dollars: Annotated[float | None, typer.Option(min=0, help="New budget in dollars.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="New budget in tokens.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="New budget in minutes.")] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="New number of checks per conversation.")] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Change the limits of a run, also while it is going on: they are read before every call."""
    from dataclasses import asdict

    from .budget import read_limits, write_limits
    from .run import find_run

    path = find_run(runs, run) / "limits.json"
    limits = read_limits(path).raised(dollars=dollars, tokens=tokens, minutes=minutes, attempts=attempts)
    write_limits(path, limits)
    if as_json:
        return emit(asdict(limits))
    out.print(", ".join(f"{k} {v:g}" for k, v in asdict(limits).items() if v is not None), highlight=False)
    return None


@runs_app.command("resume")
def runs_resume(
    run: Annotated[str, typer.Argument(help="Run: id, prefix, or 'last'.")],
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Go on with a run: the same as generate --resume."""
    from .campaign import Settings, resume_run
    from .cli import hold

    hold(resume_run(runs, run, Settings(tasks=[]), set()), as_json)


# --- tips ---


def _log(path: Path | None) -> Path:
    from .tips import LOG

    return path or LOG


@tips_app.command("list")
def tips_list(
    state: Annotated[str | None, typer.Option(help="proposed, active or retired.")] = None,
    tips_log: TipsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Every tip with its state and evidence."""
    from .tips import read_tips

    found = [t for t in read_tips(_log(tips_log)) if state in (None, t.state)]
    if as_json:
        return emit([vars(t) for t in found])
    table = Table("tip", "state", "claim", "evidence", "probe")
    for t in found:
        table.add_row(t.id, t.state, t.claim, t.evidence, "yes" if t.probe else "")
    out.print(table)
    return None


@tips_app.command("add")
def tips_add(
    claim: Annotated[str, typer.Argument(help="One sentence that holds for this stack.")],
    evidence: Annotated[str, typer.Option(help="What shows it: run, task, before and after.")],
    toolchain: Annotated[str | None, typer.Option(help="Versions it holds for (default: the installed ones).")] = None,
    tips_log: TipsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Propose a tip; accept it with 'tips accept'."""
    from .tips import add_tip
    from .tools import _versions

    _say_tip(add_tip(claim, evidence, toolchain or _versions(), _log(tips_log)), as_json)


@tips_app.command("accept")
def tips_accept(
    tip: Annotated[str, typer.Argument(help="Id, for example T07.")],
    tips_log: TipsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a tip active: it enters every prompt from now on."""
    from .tips import set_state

    _say_tip(set_state(tip, "active", _log(tips_log)), as_json)


@tips_app.command("retire")
def tips_retire(
    tip: Annotated[str, typer.Argument(help="Id, for example T07.")],
    tips_log: TipsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a tip out of the prompts; it stays in the log."""
    from .tips import set_state

    _say_tip(set_state(tip, "retired", _log(tips_log)), as_json)


def _say_tip(tip: Any, as_json: bool) -> None:
    if as_json:
        return emit(vars(tip))
    out.print(f"{tip.id} is {tip.state}: {tip.claim}", markup=False, highlight=False, soft_wrap=True)
    return None


@tips_app.command("probe")
def tips_probe(
    names: Annotated[list[str] | None, typer.Argument(help="Ids (default: all that are not retired).")] = None,
    tips_log: TipsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the probes: does each claim still hold with what is installed here?"""
    from .tips import find_tip, probe_tips, read_tips

    path = _log(tips_log)
    chosen = [find_tip(n, path) for n in names] if names else [t for t in read_tips(path) if t.state != "retired"]
    results = probe_tips(chosen)
    failed = {k: v for k, v in results.items() if v is not None}
    if as_json:
        emit({"probed": len(results), "without_probe": len(chosen) - len(results), "failed": failed})
    else:
        for name, said in failed.items():
            out.print(f"{name} no longer holds: {said}", markup=False, highlight=False, soft_wrap=True)
        out.print(
            f"{len(results) - len(failed)} of {len(results)} probes pass; {len(chosen) - len(results)} tips have none"
        )
    raise typer.Exit(FAIL if failed else PASS)


@tips_app.command("lift")
def tips_lift(
    tip: Annotated[str, typer.Argument(help="Id, for example T07.")],
    author: Annotated[str, typer.Option(help="composer, claude or openai.")] = "claude",
    model: Annotated[str | None, typer.Option(help="Model of the author.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Conversations per task and side.")] = 1,
    names: Annotated[list[str] | None, typer.Option("--task", help="Instead of the frozen set.")] = None,
    dollars: Annotated[float | None, typer.Option(min=0, help="Budget of the comparison.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Budget in tokens.")] = None,
    price: Annotated[str | None, typer.Option(help="Dollars per million tokens, IN,OUT.")] = None,
    tips_log: TipsOption = None,
    tasks_file: TasksOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Does a tip help? The same tasks with and without it, by the same author."""
    from .authors import make_author
    from .lift import lift

    suite, path = _suite(tasks_file), _log(tips_log)
    writer = make_author(author, model)
    with _pool() as pool, Progress(as_json) as progress:
        result = lift(tip, writer, suite, pool, runs, progress, names, samples, dollars, tokens, price, path)
    if as_json:
        return emit(result)
    table = Table(
        "",
        "first try",
        "accepted",
        "attempts",
        "tokens",
        title=f"{result['tip']} by {result['author']}, run {result['run']}",
    )
    for side in ("without", "with"):
        r = result[side]
        table.add_row(side, f"{r['first_try']}/{r['conversations']}", f"{r['accepted']}/{r['conversations']}",
                      f"{r['attempts']:.2f}", f"{r['tokens']:.0f}")  # fmt: skip
    out.print(table)
    return None
