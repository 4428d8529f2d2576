"""The verb ``leaderboard``: results with their evidence, compared, and in milliseconds per training step."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from agent.cli import JsonOption, LibraryOption, app, emit, out
from verifier.verdict import HarnessError


@app.command()
def leaderboard(
    task: Annotated[
        list[str] | None, typer.Option(help="Only this task; may be given again, like every filter.")
    ] = None,
    size: Annotated[list[str] | None, typer.Option(help="Only M, or MxNxK.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Only devices with this in their name.")] = None,
    author: Annotated[
        list[str] | None, typer.Option(help="Only kernels of claude:MODEL, claude, LLM, human, ...")
    ] = None,
    session: Annotated[
        list[str] | None, typer.Option(help="These sessions, or 'all' (default: newest per line).")
    ] = None,
    sort: Annotated[
        str, typer.Option(help="task, size, us, tax, finish, floor, measured or a column; -KEY reverses.")
    ] = "task",
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Two authors, baselines or sessions, pair by pair.")
    ] = None,
    steps: Annotated[bool, typer.Option("--steps", help="Milliseconds per training step of Llama-3 models.")] = False,
    intervals: Annotated[bool, typer.Option("--intervals", help="Show 95 % intervals.")] = False,
    results: Annotated[Path | None, typer.Option(help="Results file instead of the library's own.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as web pages into this directory.")] = None,
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Results: kernels, baselines, share of the floor and tax; only rows that have their evidence."""
    from leaderboard import steps as per_step
    from leaderboard import terminal
    from leaderboard.board import Filter, load_board, unmeasured
    from reference_kernels.tasks import load_suite

    if results and not results.exists():
        raise HarnessError(f"there is no file {results}; 'coda-agent measure' writes results")
    board = load_board(library, results)
    chosen = Filter(*(tuple(f or ()) for f in (task, size, device, author, session)))
    if html:
        from leaderboard.html import write

        page = write(board, html, library=library)
        return emit({"page": str(page)}) if as_json else out.print(f"{page}", highlight=False, soft_wrap=True)
    if compare:
        found = board.compare(*compare, chosen)
        return emit(found.as_dict()) if as_json else terminal.show_comparison(out, found)
    lines = board.sorted(board.lines(chosen), sort)
    if steps:
        estimates = per_step.estimate(lines)
        return emit([asdict(e) for e in estimates]) if as_json else terminal.show_steps(out, estimates)
    # with filters, or for another library, much of the suite is left out on purpose
    suite = load_suite() if chosen == Filter() and library is None and results is None else None
    if as_json:
        return emit(board.as_dict(lines) | ({"unmeasured": unmeasured(lines, suite)} if suite else {}))
    terminal.show(out, board, lines, intervals, suite)
    return None
