"""The README is true: its table is the data, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from agent.cli import app
from generated.library import Library
from leaderboard import results

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_results_table_is_generated_from_the_passports():
    between = README.split(results.BEGIN)[1].split(results.END)[0].strip()
    assert between == results.markdown(Library()).strip(), "run: python -m leaderboard.results"


def test_the_authorship_table_is_generated_from_the_passports():
    text = (ROOT / "docs/authorship.md").read_text()
    between = text.split(results.BEGIN)[1].split(results.END)[0].strip()
    assert between == results.authorship(Library()).strip(), "run: python -m leaderboard.results"


def test_every_task_was_measured_at_three_sizes():
    library = Library()
    assert results.devices(library) == ["NVIDIA H200"]
    by_task: dict[str, set] = {}
    for row in results.rows(library, "NVIDIA H200"):
        by_task.setdefault(row[0], set()).add(row[1])
    assert len(by_task) == 16 and all(len(sizes) == 3 for sizes in by_task.values()), by_task


def test_every_verb_the_readme_names_exists():
    verbs = set(typer.main.get_command(app).commands)
    named = set(re.findall(r"coda-agent ([a-z]+)", README)) - {"agent"}
    assert named - {"coda"} <= verbs, named - verbs


def test_the_test_command_is_what_ci_runs():
    command = "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest"
    assert command in README
    assert command.replace("install -e", "install -q -e") in (ROOT / ".ci/run").read_text()
