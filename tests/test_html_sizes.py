"""The report of a task measured at more sizes than the suite's: a model's shapes beside them."""

from __future__ import annotations

import itertools

from made_up_results import library_of, made_up
from test_html_report import browser, needs_browser, small_board, watched  # noqa: F401

from leaderboard.board import Board
from leaderboard.html import write
from leaderboard.html.report import Report
from reference_kernels.tasks import load_suite


def many_sizes() -> Board:
    """One task at the suite's sizes and, newer, at two more sizes per M, whose kernels have other times."""
    own = [tuple(s) for s in load_suite()["gemm_rmsnorm"].timed]
    more = [(m, m, k) for m, _, _ in own for k in (3072, 28672)]
    return small_board(*(made_up(100.0, shape=s, session="s1") for s in own),
                       *(made_up(120.0, shape=s, session="s2") for s in more))  # fmt: skip


def test_the_overview_draws_the_suites_size_where_there_are_others(tmp_path):
    board, suite = many_sizes(), load_suite()
    found = Report(board, library_of(tmp_path, board.records), suite).panels(board.records[0].device)
    drawn = {size: [place[:2] for place, _ in places] for size, places in found.items()}
    assert drawn == {f"M = {s[0]}": [("gemm_rmsnorm", tuple(s))] for s in suite["gemm_rmsnorm"].timed}


@needs_browser
def test_the_words_of_drawings_of_many_sizes_stay_apart(watched, tmp_path):  # noqa: F811
    page = watched().open(write(many_sizes(), tmp_path / "r").parent / "task/gemm_rmsnorm.html")
    words = page.evaluate(
        "[...document.querySelectorAll('svg.plot')].map(s => [...s.querySelectorAll('text')].map(t => {"
        " const b = t.getBoundingClientRect(); return [t.textContent, b.x, b.y, b.right, b.bottom] }))"
    )
    assert sum("28672" in w[0] for svg in words for w in svg) >= 6
    for svg in words:
        for (a, ax, ay, ar, ab), (b, bx, by, br, bb) in itertools.combinations(svg, 2):
            assert min(ar, br) - max(ax, bx) < 1 or min(ab, bb) - max(ay, by) < 3, (a, b)
