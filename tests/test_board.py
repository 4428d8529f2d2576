"""The board: which rows stand side by side, means and spreads by hand, filters, order, comparisons."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_results import NUMERICS, library_of, made_up, passport_of, wobbly

from leaderboard.board import Board, Filter, Spread, column_of, load_board, ordered, quotient
from leaderboard.records import Interval, ResultsError, append

ratios = st.lists(st.floats(0.1, 10), min_size=1, max_size=20)


def board(*records) -> Board:
    return Board(list(records), [passport_of(r.task, r.author) for r in records])


# --- means ----------------------------------------------------------------------------------------------


def test_geometric_mean_and_spread_by_hand():
    two = Spread.of([2.0, 8.0])
    assert (two.mean, two.low, two.high, two.n) == (pytest.approx(4.0), pytest.approx(2.0), pytest.approx(8.0), 2)
    # logs ln 2 and ln 8 lie ln 2 from their mean: sd = sqrt(2 ln(2)^2 / 1) = sqrt(2) ln 2
    assert two.sd == pytest.approx(2 ** math.sqrt(2))
    three = Spread.of([1.0, 10.0, 100.0])
    assert three.mean == pytest.approx(10.0) and three.sd == pytest.approx(10.0)
    one = Spread.of([1.25])
    assert (one.mean, one.sd, one.n) == (pytest.approx(1.25), 1.0, 1)
    assert Spread.of([]) is None


@given(ratios, st.floats(0.1, 10))
def test_geometric_mean_invariants(values, factor):
    a, b, c = Spread.of(values), Spread.of([factor * v for v in reversed(values)]), Spread.of([1 / v for v in values])
    assert b.mean == pytest.approx(factor * a.mean) and b.sd == pytest.approx(a.sd)
    assert c.mean == pytest.approx(1 / a.mean) and c.sd == pytest.approx(a.sd)
    assert c.low == pytest.approx(1 / a.high) and c.high == pytest.approx(1 / a.low)
    assert a.low <= a.mean * (1 + 1e-9) and a.mean <= a.high * (1 + 1e-9)
    assert a.mean**a.n == pytest.approx(math.prod(values), rel=1e-6)


intervals = st.tuples(st.floats(0.5, 2), st.floats(1, 1.2), st.floats(1, 1.2)).map(
    lambda t: Interval(median=t[0], low=t[0] / t[1], high=t[0] * t[2])
)


@given(intervals, intervals)
def test_a_quotient_turned_round_is_its_inverse(a, b):
    x, y = quotient(a, b), quotient(b, a)
    assert x.median * y.median == pytest.approx(1) and x.low * y.high == pytest.approx(1)
    assert x.low <= x.median <= x.high
    # never narrower than either
    assert math.log(x.high / x.low) >= max(math.log(i.high / i.low) for i in (a, b)) - 1e-9


def test_quotient_by_hand():
    exact = Interval(median=2, low=2, high=2)
    half = quotient(Interval(median=3, low=2, high=4), exact)
    assert (half.median, half.low, half.high) == pytest.approx((1.5, 1, 2))
    e = math.exp
    # distances 0.03 and 0.04 in logarithms make 0.05
    a, b = Interval(median=1, low=e(-0.03), high=e(0.03)), Interval(median=1, low=e(-0.04), high=e(0.04))
    assert quotient(a, b).high == pytest.approx(e(0.05)) and quotient(a, b).low == pytest.approx(e(-0.05))


# --- lines ----------------------------------------------------------------------------------------------


def test_columns_of_authors():
    got = [column_of(a) for a in ("composer", "claude:opus", "gpt:5", "human:ada", "expert:quack", "scripted")]
    assert got == ["composer", "LLM", "LLM", "human", "expert", "scripted"]
    assert ordered({"zzz", "eager", "LLM", "composer", "gemm"}) == ["composer", "LLM", "gemm", "eager", "zzz"]


def test_a_line_by_hand():
    baselines = {"torch.compile": 400.0, "liger": 300.0}
    slow = made_up(250.0, baselines=baselines, covers={"liger": ["y"], "torch.compile": ["h", "y"]})
    fast = made_up(200.0, author="claude:opus", baselines=baselines, covers={"liger": ["y"]}, fold=4.0)
    [line] = board(slow, fast).lines()
    assert line.lead == fast and (line.us, line.finish_us, line.tax_us) == pytest.approx((204.0, 4.0, 0.0))
    assert list(line.cells) == ["composer", "LLM", "gemm", "torch.compile", "liger"]
    assert line.cells["composer"].ratio.median == pytest.approx(250 / 204, rel=1e-3)
    assert line.cells["LLM"].is_lead and line.cells["LLM"].ratio == Interval(median=1, low=1, high=1)
    assert line.cells["torch.compile"].ratio == fast.baselines["torch.compile"].ratio
    # the kernels were checked for h and y
    assert line.cells["liger"].covers == ("y",) and line.cells["torch.compile"].covers is None


def test_the_fastest_is_so_by_its_ratio_to_the_bare_gemm():
    """Records of one session that were not timed together are not ranked by microseconds."""
    first = made_up(250.0, baselines={"gemm": 200.0})
    second = made_up(255.0, author="human:ada", baselines={"gemm": 220.0})  # slower clocks: 0.86 against 0.80
    [line] = board(first, second).lines()
    assert line.lead == second
    cell = line.cells["composer"]
    assert not cell.paired and cell.ratio.median == pytest.approx((220 / 255) / (200 / 250), rel=1e-3)


def test_the_same_machine_code_is_equal():
    twin = made_up(author="claude:opus", object_sha256="one", same_object_as="composer")
    [line] = board(twin, made_up(object_sha256="one")).lines()
    assert line.lead.author == "composer" and line.cells["LLM"].same_code_as == "composer"
    assert line.cells["LLM"].ratio.median == 1 and Board.geomeans([line])["LLM"].n == 1


def test_a_baseline_of_unknown_outputs_stays_marked():
    r = made_up(baselines={"liger": 300.0}, covers={"liger": ["h", "y"]})
    unknown = Board([r], [passport_of(measure=[NUMERICS | {"evidence": {}}])])
    assert unknown.lines()[0].cells["liger"].covers == ("h", "y")
    assert board(r).lines()[0].cells["liger"].covers is None


def test_by_default_the_newest_session_of_each_line():
    old, new = made_up(session="s1"), made_up(session="s2")  # s2 is later
    other = made_up(session="s1", task="gemm_rope")
    b = board(old, new, other)
    assert [(x.task, x.session) for x in b.lines()] == [("gemm_rmsnorm", "s2"), ("gemm_rope", "s1")]
    assert len(b.lines(Filter(sessions=("all",)))) == 3
    assert [x.session for x in b.lines(Filter(sessions=("s1",)))] == ["s1", "s1"]


def test_hidden_rows_lead_nothing(tmp_path):
    good, edited = made_up(250.0), made_up(200.0, author="human:ada", kernel_us=180.0)
    lib = library_of(tmp_path, [good, edited])
    append(tmp_path / "results.jsonl", [good, edited])
    b = load_board(lib.root)
    assert [x.lead for x in b.lines()] == [good] and [r for r, _ in b.hidden] == [edited]
    assert "kernel_us" in b.as_dict(b.lines())["hidden"][0]["reason"]
    (lib.root / "gemm_rmsnorm" / f"{good.kernel}.json").write_text("{")
    assert load_board(lib.root).lines() == [] and "not a valid passport" in load_board(lib.root).problems[0]


# --- filters and order ----------------------------------------------------------------------------------

TASKS, AUTHORS = ("gemm_rope", "gemm_swiglu", "gemm_rmsnorm"), ("composer", "claude:opus", "human:ada")
SHAPES, DEVICES = ((2048, 2048, 2048), (4096, 4096, 4096), (4096, 4096, 1024)), ("NVIDIA H200", "NVIDIA H100")
some = st.lists(
    st.tuples(*map(st.sampled_from, (TASKS, AUTHORS, SHAPES, DEVICES, ("s1", "s2", "t3"))), st.floats(900, 1100)),
    max_size=12, unique_by=lambda t: t[:5],
).map(lambda rows: [made_up(us, task, a, s, shape, device=d) for task, a, shape, d, s, us in rows])  # fmt: skip


def names(lines) -> set:
    return {(x.task, x.shape, x.device, x.session) for x in lines}


@given(some)
def test_filters_part_the_lines(records):
    b = Board(records)
    every = b.lines()
    for field, values, of in (
        ("tasks", TASKS, lambda x: x.task),
        ("devices", DEVICES, lambda x: x.device),
        ("sizes", ["x".join(map(str, s)) for s in SHAPES], lambda x: x.size),
    ):
        present = [v for v in values if v in {of(x) for x in every}]
        parts = [b.lines(Filter(**{field: (v,)})) for v in present]
        assert sum(map(len, parts)) == len(every) and set().union(*map(names, parts)) == names(every)
        assert all(of(x) == v for v, part in zip(present, parts) for x in part)
        assert names(b.lines(Filter(**{field: present}))) == names(every)
    sessions = {r.session for r in records}
    parts = [b.lines(Filter(sessions=(s,))) for s in sessions]
    everything = b.lines(Filter(sessions=("all",)))
    assert sum(map(len, parts)) == len(everything) and names(every) <= names(everything)


@given(some)
def test_filtered_authors_are_the_only_ones(records):
    b = Board(records)
    for name in {column_of(r.author) for r in records}:
        lines = b.lines(Filter(authors=(name,), sessions=("all",)))
        assert lines and all(column_of(x.lead.author) == name for x in lines)
        assert all({c for c, cell in x.cells.items() if cell.record} == {name} for x in lines)


@pytest.mark.parametrize(
    "chosen", [{"tasks": ["gemm"]}, {"sizes": ["77"]}, {"devices": ["B200"]}, {"authors": ["x"]}, {"sessions": ["q"]}]
)
def test_a_filter_that_nothing_has_is_an_error(chosen):
    with pytest.raises(ResultsError, match="there is: "):
        board(made_up()).lines(Filter(**chosen))


def test_filters_by_size_device_author_and_session_prefix():
    b = board(made_up(shape=SHAPES[1], author="claude:opus", session="abc1"), made_up(shape=SHAPES[2], session="abd2"))
    assert len(b.lines(Filter(sizes=["4096"]))) == 2 and len(b.lines(Filter(sizes=["4096x4096x1024"]))) == 1
    assert len(b.lines(Filter(devices=["h200"]))) == 2
    for name in ("claude", "LLM", "claude:opus"):
        assert [x.lead.author for x in b.lines(Filter(authors=[name]))] == ["claude:opus"]
    assert [x.session for x in b.lines(Filter(sessions=["abd"]))] == ["abd2"]
    with pytest.raises(ResultsError, match="'ab' names 2 sessions"):
        b.lines(Filter(sessions=["ab"]))


def test_order():
    a = made_up(300.0, task="gemm_rope", baselines={"liger": 330.0})
    b = made_up(250.0, task="gemm_swiglu", baselines={"liger": 500.0})
    c = made_up(280.0, task="gemm_rmsnorm")
    lines = board(a, b, c).lines()

    def tasks(key):
        return [x.task.removeprefix("gemm_") for x in Board.sorted(lines, key)]

    assert tasks("task") == ["rmsnorm", "rope", "swiglu"] and tasks("-task") == ["swiglu", "rope", "rmsnorm"]
    assert tasks("us") == ["rope", "rmsnorm", "swiglu"] and tasks("floor") == ["swiglu", "rmsnorm", "rope"]
    assert tasks("liger") == ["swiglu", "rope", "rmsnorm"] and tasks("-liger") == ["rope", "swiglu", "rmsnorm"]
    assert tasks("tax") == tasks("us") and tasks("flashinfer") == tasks("task")
    with pytest.raises(ResultsError, match="cannot sort by 'speed'"):
        Board.sorted(lines, "speed")


# --- comparing ------------------------------------------------------------------------------------------


def test_two_authors_by_hand():
    rows = [made_up(us, task=t, author=a) for t, a, us in (
        ("gemm_rope", "composer", 240.0), ("gemm_rope", "claude:opus", 300.0),
        ("gemm_swiglu", "composer", 300.0), ("gemm_swiglu", "claude:opus", 240.0), ("gemm_rmsnorm", "composer", 300.0),
    )]  # fmt: skip
    twins = [made_up(task="gemm_rmsnorm_rope", author=a, object_sha256="one") for a in ("composer", "claude:opus")]
    found = board(*rows, *twins).compare("composer", "LLM")
    assert [(p.task, p.same_code) for p in found.pairs] == [
        ("gemm_rmsnorm_rope", True), ("gemm_rope", False), ("gemm_swiglu", False)
    ]  # fmt: skip
    assert [p.ratio and round(p.ratio.median, 3) for p in found.pairs] == [None, 1.25, 0.8]
    assert found.geomean.mean == pytest.approx(1.0) and found.geomean.n == 2 and found.same == 1
    assert found.as_dict()["pairs"][1]["ratio"]["median"] == pytest.approx(1.25)


def test_an_author_and_a_baseline_or_two_baselines():
    b = board(made_up(250.0, baselines={"liger": 300.0, "eager": 600.0}))
    assert b.compare("composer", "liger").pairs[0].ratio.median == pytest.approx(1.2, rel=1e-3)
    assert b.compare("liger", "eager").pairs[0].ratio.median == pytest.approx(2.0, rel=1e-3)
    assert not b.compare("liger", "eager").pairs[0].same_code


def test_authors_meet_within_a_session_only():
    b = board(made_up(session="s1"), made_up(session="s2", author="human:ada"))
    assert b.compare("composer", "human").pairs == []
    both = board(*b.records, made_up(300.0, session="s1", author="human:ada"))
    [pair] = both.compare("composer", "human").pairs  # s2 is newer, but has one of them
    assert pair.sessions == ("s1", "s1") and pair.ratio.median == pytest.approx(1.2, rel=1e-3)


def test_two_sessions_meet_through_the_bare_gemm():
    a = made_up(250.0, session="s1")  # 200 / 250 = 0.8
    b = made_up(240.0, session="s2", baselines={"gemm": 180.0})  # 180 / 240 = 0.75, though fewer microseconds
    found = board(a, b).compare("s1", "s2")
    [pair] = found.pairs
    assert pair.ratio.median == pytest.approx(0.8 / 0.75, rel=1e-3) and pair.same_code
    twin = made_up(author="claude:x", session="s1", same_object_as="composer")
    again = board(a, b, twin, twin.model_copy(update={"session": "s2"}))
    assert len(again.compare("s1", "s2").pairs) == 1  # one measurement is not counted twice


noise = st.lists(st.floats(0.9, 1.1), min_size=9, max_size=9)


@given(noise, noise)
def test_comparisons_turned_round_are_inverse(x, y):
    a = made_up([250 * v for v in x], session="s1")
    b = made_up([260 * v for v in y], session="s1", author="human:ada")
    c = made_up([260 * v for v in y], session="s2", baselines={"gemm": [205 * v for v in x]})
    both = board(a, b, c)
    for one, two in (("composer", "human"), ("s1", "s2"), ("composer", "gemm")):
        [p], [q] = both.compare(one, two).pairs, both.compare(two, one).pairs
        assert math.log(p.ratio.median) == pytest.approx(-math.log(q.ratio.median), abs=1e-9)
        assert math.log(p.ratio.low) == pytest.approx(-math.log(q.ratio.high), abs=1e-9)
        assert p.us == tuple(reversed(q.us)) and p.same_code == q.same_code


def test_paired_rounds_cancel_what_they_share():
    """Both kernels slow down in the same rounds: the ratio of each round is the same, the interval has no width."""
    drift = [1 + 0.1 * i for i in range(9)]
    a, b = made_up([250 * d for d in drift]), made_up([275 * d for d in drift], author="human:ada")
    ratio = board(a, b).compare("composer", "human").pairs[0].ratio
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.1, 1.1, 1.1))
    assert statistics.stdev(a.samples_us["total"]) > 50


def test_unknown_names_are_errors():
    b = board(made_up(), made_up(session="s2"))
    for a, other in (("composer", "nobody"), ("s1", "s9"), ("s1", "composer")):
        with pytest.raises(ResultsError, match="no author or baseline"):
            b.compare(a, other)
    assert wobbly(1.0)[4] == 1.0
