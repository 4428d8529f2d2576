"""The README is true: its tables and picture are the results, its commands exist."""

from __future__ import annotations

import html
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer.main

from agent.cli import app
from leaderboard import picture, readme
from leaderboard.board import load_board
from leaderboard.records import DEFAULT
from reference_kernels.tasks import load_suite

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SVG = {"svg": "http://www.w3.org/2000/svg", "xlink": "http://www.w3.org/1999/xlink"}
measured = pytest.mark.skipif(not DEFAULT.exists(), reason="no results are kept in this repository yet")


def dots(svg: str) -> dict[str, float]:
    """The x coordinate of every dot of the picture, by its id."""
    found = {}
    for group in ET.fromstring(svg).iter(f"{{{SVG['svg']}}}g"):
        use = group.find(".//svg:use", SVG)
        if use is not None and re.fullmatch(r"gemm_\w+ \d+x\d+x\d+ \S+", group.get("id", "")):
            found[html.unescape(group.get("id"))] = float(use.get("x"))
    return found


def disagreement(svg: str, lines) -> str:
    """How a picture differs from lines, or an empty string: missing or extra dots, or one in a wrong place."""
    have = dots(svg)
    want = {picture.mark(x, b): x.cells[b].ratio.median for x in lines for b in picture.shown(lines) if b in x.cells}
    if have.keys() != want.keys():
        return f"dots differ: {have.keys() ^ want.keys()}"
    for baseline in picture.shown(lines):
        # logarithmic axes: within a panel, x is one straight line over log(ratio)
        points = sorted((math.log(want[n]), x, n) for n, x in have.items() if n.endswith(f" {baseline}"))
        (low, left, _), (high, right, _) = points[0], points[-1]
        for at, x, name in points:
            if high > low and abs(left + (right - left) * (at - low) / (high - low) - x) > 0.05:
                return f"{name} is in the wrong place"
    return ""


@measured
def test_readme_tables_are_the_results():
    assert readme.between(README) == readme.overview(load_board(), load_suite()), "run: python -m leaderboard.readme"


def test_documented_lines_are_the_results():
    text = (ROOT / "docs/leaderboard.md").read_text()
    assert readme.between(text) == readme.everything(load_board(), load_suite()), "run: python -m leaderboard.readme"


@measured
def test_the_authorship_table_is_the_results():
    text = (ROOT / "docs/authorship.md").read_text()
    assert readme.between(text) == readme.authorship(load_board(), load_suite()), "run: python -m leaderboard.readme"


@measured
def test_the_picture_shows_the_results():
    file = ROOT / readme.PICTURE
    assert disagreement(file.read_text(), readme.timed(load_board(), load_suite())) == "", (
        "run: python -m leaderboard.readme"
    )
    assert file.stat().st_size < 150_000


def listed_as_missing(text: str) -> set[str]:
    """The tasks that a generated text names as not measured."""
    return {
        t
        for said in re.findall(r"^Not measured with this protocol: .*$", text, re.M)
        for t in re.findall(r"`(\w+)`", said)
    }


@measured
@pytest.mark.parametrize("document", ["README.md", "docs/leaderboard.md", "docs/authorship.md"])
def test_every_task_of_the_suite_is_measured_or_listed_as_missing(document):
    suite = load_suite()
    lines = readme.timed(load_board(), suite)
    sizes = {t.name: {tuple(s) for s in t.timed} for t in suite.tasks.values()}
    for device in {x.device for x in lines}:
        whole = {t for t in sizes if sizes[t] == {x.shape for x in lines if (x.task, x.device) == (t, device)}}
        missing = listed_as_missing(readme.between((ROOT / document).read_text()))
        assert whole | missing == set(sizes) and not whole & missing


def test_every_verb_the_readme_names_exists():
    verbs = set(typer.main.get_command(app).commands)
    named = set(re.findall(r"coda-agent ([a-z]+)", README)) - {"agent"}
    assert named - {"coda"} <= verbs, named - verbs


def test_every_option_the_documents_name_exists():
    commands = typer.main.get_command(app).commands
    text = README + (ROOT / "docs/leaderboard.md").read_text()
    for options in re.findall(r"coda-agent leaderboard(.*)", text):
        named = re.findall(r"--[a-z-]+", options.split("`")[0].split("#")[0])
        known = {o for p in commands["leaderboard"].params for o in p.opts}
        assert set(named) <= known, set(named) - known


def test_the_test_command_is_what_ci_runs():
    command = "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest"
    assert command in README
    assert command.replace("install -e", "install -q -e") in (ROOT / ".ci/run").read_text()
