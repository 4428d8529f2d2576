"""The leaderboard as static pages: they work from a file and without network."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from generated.library import Library
from reference_kernels.tasks import Suite, load_suite

from ..board import Board
from ..records import ResultsError

MANIFEST = "report.json"  # names the files of a report, so that a later one replaces these and nothing else
__all__ = ["write"]


def write(board: Board, directory: Path, *, library: Path | None = None, suite: Suite | None = None) -> Path:
    """Write the report of ``board`` into ``directory``, all pages or none; a former report there is replaced.

    Args:
        library: where the board's kernels are, for their sources; None for the repository's own.
        suite: for the tasks' mathematics and operands; None for ``tasks.yaml``.

    Returns:
        The path of ``index.html``.

    Raises:
        ResultsError: the directory holds something else, or cannot be written.
        SuiteError: no ``suite`` is given and ``tasks.yaml`` cannot be read.
    """
    from .pages import pages  # the plotting library is loaded only for a report
    from .report import Report

    directory = Path(directory).resolve()
    try:
        _refuse_foreign(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
            fresh = Path(scratch) / "report"
            fresh.mkdir()
            names = []
            for name, text in pages(Report(board, Library(library), suite or load_suite())):
                path = fresh / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8", newline="\n")
                names.append(name)
            content = {"generator": "coda-agent leaderboard", "files": sorted(names)}
            (fresh / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
            _swap(fresh, directory, Path(scratch) / "former")
    except OSError as e:
        raise ResultsError(f"cannot write the report to {directory}: {e.strerror or e}") from e
    return directory / "index.html"


def _swap(fresh: Path, directory: Path, former: Path) -> None:
    """Put ``fresh`` in the place of ``directory``; when that fails, what was there is there again."""
    if directory.exists():
        os.replace(directory, former)
    try:
        os.replace(fresh, directory)
    except OSError:
        if former.exists():
            os.replace(former, directory)
        raise


def _refuse_foreign(directory: Path) -> None:
    """Only an empty directory or a former report is replaced.

    Raises:
        ResultsError: it is a file, or holds files that no report wrote.
    """
    if directory.exists() and not directory.is_dir():
        raise ResultsError(f"{directory} is not a directory; give another with --html DIR")
    if not directory.exists():
        return
    try:
        known = {MANIFEST, *json.loads((directory / MANIFEST).read_text())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    strange = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir())
    strange = [name for name in strange if name not in known]
    if strange:
        raise ResultsError(
            f"{directory} holds what no report wrote ({', '.join(strange[:3])}); "
            "give an empty or new directory with --html DIR"
        )
