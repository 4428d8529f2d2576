"""What people see of the board: the terminal at any width, JSON, training steps, documents and the picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_results import library_of, made_up, passport_of
from rich.console import Console
from test_readme import ROOT, disagreement

from agent import cli
from leaderboard import readme, terminal
from leaderboard.board import Board, Filter, unmeasured_text
from leaderboard.picture import alt_text, draw, mark
from leaderboard.records import ResultsError, append
from leaderboard.steps import Call, Configurations, Model, configurations, estimate, to_measure
from reference_kernels.tasks import load_suite

SUITE = load_suite()
BASELINES = {"expert": 1.01, "torch.compile": 1.3, "torch.compile:max-autotune": 1.2, "eager": 2.0, "liger": 1.6}


def whole_suite() -> list:
    """A record of two authors for every task and size of the suite."""
    records = []
    for t in SUITE.tasks.values():
        for m, n, k in t.timed:
            us = 2e6 * m * n * k / 6e14
            times = {b: us * f for b, f in BASELINES.items()} | {"gemm": us * 0.98}
            common = {"task": t.name, "shape": (m, n, k), "baselines": times, "left_out": {"coda": "not installed"}}
            records.append(made_up(us, **common, object_sha256=t.name))
            own = us * 0.99 if t.name == "gemm_swiglu_bwd" else us
            code = {"object_sha256": t.name} if own == us else {}
            records.append(made_up(own, **common, author="claude:opus", **code))
    return records


@pytest.fixture(scope="module")
def records() -> list:
    return whole_suite()


@pytest.fixture(scope="module")
def board(records) -> Board:
    return Board(records, [passport_of(r.task, r.author) for r in records])


def printed(show, *args, width: int = 80, **options) -> str:
    out = Console(width=width, record=True, file=open(os.devnull, "w"))
    show(out, *args, **options)
    return out.export_text()


# --- terminal -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 120, 160, 240])
@pytest.mark.parametrize("intervals", [False, True])
def test_nothing_is_cut_at_any_width(board, width, intervals):
    text = printed(terminal.show, board, board.lines(), width=width, intervals=intervals)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for line in board.lines():
        assert line.size in text and line.task in text.replace("_\n", "_").replace(" ", "").replace("\n", "")
    for value in ("best", "same", "×/", "geometric mean", "1.30", "2.00", "coda left out of 48 lines: not installed"):
        assert value in text


def test_columns_fold_and_none_is_lost(board):
    lines = board.lines(Filter(tasks=["gemm_swiglu_bwd"]))
    for width in (60, 80, 200):
        headers = [
            str(c.header).replace("-\n", "-").replace("\n", "")
            for t in terminal.tables(lines, width)
            for c in t.columns
        ]
        for name in ("µs", "floor", "tax", "finish", "LLM", "expert", "gemm", "torch.compile", "max-autotune", "eager"):
            assert headers.count(name) == 1
    assert len(terminal.tables(lines, 80)) == 2 and len(terminal.tables(lines, 200)) == 1


def test_marks_and_their_legend():
    a = made_up(250.0, baselines={"liger": [249.0] * 4 + [250.0] + [252.0] * 4}, covers={"liger": ["y"]})
    b = made_up(300.0, author="human:ada", baselines={"gemm": 201.0})
    board = Board([a, b], [passport_of(author=x.author) for x in (a, b)])
    [line] = board.lines()
    assert terminal.cell_text(line.cells["liger"]).startswith("~1.0") and terminal.cell_text(
        line.cells["liger"]
    ).endswith("*")
    assert terminal.cell_text(line.cells["human"]).startswith("^1.19") and terminal.cell_text(None) == "-"
    text = printed(terminal.show, board, [line], width=1000)
    assert "~: 1 lies inside" in text and "*: computes only some" in text and "^: not timed in turns" in text
    assert "same:" not in text and "liger 1 (1 *)" in text


def test_hidden_rows_are_counted_with_their_reason(board, records):
    hidden = Board(
        records[:1], (), ["x.json is not a valid passport"], [(r, "it has no receipt") for r in records[1:4]]
    )
    text = printed(terminal.show, hidden, hidden.lines())
    assert "3 hidden: it has no receipt" in text and "not readable: x.json" in text
    assert "No results to show" in printed(terminal.show, Board([]), [])


def test_comparison_in_words(board):
    text = printed(terminal.show_comparison, board.compare("composer", "LLM"))
    assert "geometric mean of 3 pairs" in text and "45 of 48 pairs are the same machine code" in text.replace("\n", " ")
    assert "composer is 0.990 times as fast as LLM" in text
    one = Board([made_up(session="s1"), made_up(session="s2", author="human:x")])
    assert "no task and size in common" in printed(terminal.show_comparison, one.compare("composer", "human"))


# --- training steps -------------------------------------------------------------------------------------

MODEL = Model(tokens=4096, hidden=4096, ffn=8192, layers=10, heads=32, kv_heads=8, head_dim=128, vocab=1000)


def one_call(task: str, per: str, n: str, k: str) -> Configurations:
    return Configurations(models={"m": MODEL}, calls=[Call(what="it", task=task, per=per, n=n, k=k)])


def lines_of(*records):
    return Board(list(records)).lines()


def test_a_measured_shape_needs_no_scaling():
    lines = lines_of(made_up(250.0, baselines={"torch.compile": 300.0}))
    [e] = estimate(lines, one_call("gemm_rmsnorm", "layer", "hidden", "attention"))
    assert e.parts[0].scaled_from is None and e.parts[0].times == 10
    assert (e.fused_ms, e.baseline_ms, e.saved_ms) == pytest.approx((2.5, 3.0, 0.5), rel=1e-3)
    assert e.saved_share == pytest.approx(0.5 / 3.0, rel=1e-3)
    assert to_measure([e]) == {}


def test_scaling_by_hand():
    """4096 x 16384 x 4096 from 4096^3: four times the FLOPs and four times the elements."""
    lines = lines_of(made_up(250.0, baselines={"torch.compile": 300.0}))
    [wide] = estimate(lines, one_call("gemm_rmsnorm", "step", "2 ffn", "hidden"))
    assert (wide.fused_ms, wide.baseline_ms, wide.saved_ms) == pytest.approx((1.0, 1.2, 0.2), rel=1e-3)
    # K doubles: the bare GEMM's 200 us become 400, the 50 and 100 us beyond it stay
    [deep] = estimate(lines, one_call("gemm_rmsnorm", "step", "hidden", "ffn"))
    assert (deep.fused_ms, deep.baseline_ms, deep.saved_ms) == pytest.approx((0.45, 0.5, 0.05), rel=1e-3)
    assert deep.parts[0].scaled_from == (4096, 4096, 4096)
    assert to_measure([wide, deep]) == {"gemm_rmsnorm": ["4096x4096x8192", "4096x16384x4096"]}


def test_the_nearest_measured_shape_is_used():
    near = made_up(500.0, shape=(4096, 4096, 8192), baselines={"torch.compile": 600.0, "gemm": 400.0})
    far = made_up(250.0, baselines={"torch.compile": 900.0})
    [e] = estimate(lines_of(near, far), one_call("gemm_rmsnorm", "step", "hidden", "ffn"))
    assert e.parts[0].scaled_from is None and e.saved_ms == pytest.approx(0.1, rel=1e-3)


def test_intervals_add_up():
    """Two calls from one line err together; calls from two lines in quadrature."""
    kernel = [100.0] * 9
    noisy = [119.0, 119.0, 119.0, 120.0, 120.0, 120.0, 121.0, 121.0, 121.0]  # ratio 1.2, interval 1.19 to 1.21
    same = {"us": kernel, "baselines": {"torch.compile": noisy, "gemm": 90.0}}
    a, b = made_up(**same, task="gemm_rope"), made_up(**same, task="gemm_swiglu")

    def calls(*tasks):
        found = [Call(what=str(i), task=t, per="step", n="hidden", k="hidden") for i, t in enumerate(tasks)]
        [e] = estimate(lines_of(a, b), Configurations(models={"m": MODEL}, calls=found))
        return e

    one, twice, two = calls("gemm_rope"), calls("gemm_rope", "gemm_rope"), calls("gemm_rope", "gemm_swiglu")
    assert (one.saved_ms, one.saved_low_ms, one.saved_high_ms) == pytest.approx((0.020, 0.019, 0.021))
    assert (twice.saved_low_ms, twice.saved_high_ms) == pytest.approx((0.038, 0.042))
    assert (two.saved_low_ms, two.saved_high_ms) == pytest.approx((0.04 - 2**0.5 * 1e-3, 0.04 + 2**0.5 * 1e-3))


def test_without_all_its_calls_a_model_has_no_total(board):
    lines = [x for x in board.lines() if x.task != "gemm_swiglu_bwd"]
    found = estimate(lines)
    assert found and all(e.saved_ms is None and e.missing == ["gemm_swiglu_bwd"] for e in found)
    said = (
        "No total for Llama-3 1B, Llama-3 8B, Llama-3 70B against torch.compile or torch.compile:max-autotune, because"
    )
    [text] = readme.steps_parts(found)
    for shown in (text, printed(terminal.show_steps, found, width=1000)):
        assert said in shown and "not measured: gemm_swiglu_bwd." in shown


def test_what_of_the_suite_is_not_measured_is_said(board):
    lines = board.lines()
    assert unmeasured_text(lines, SUITE) == "" and "Not measured" not in printed(
        terminal.show, board, lines, suite=SUITE
    )
    some = [x for x in lines if x.task != "gemm_rope" and not (x.task == "gemm_swiglu" and x.shape[0] == 4096)]
    said = "Not measured with this protocol: gemm_rope, gemm_swiglu at 4096x4096x4096 (2 of the suite's 16 tasks)."
    assert said in printed(terminal.show, board, some, width=1000, suite=SUITE)
    assert "Not measured" not in printed(terminal.show, board, some, width=1000)
    rest = Board([r for r in board.records if r.task != "gemm_rope"], list(board.passports.values()))
    for text in (readme.overview(rest, SUITE), readme.everything(rest, SUITE), readme.authorship(rest, SUITE)):
        assert "Not measured with this protocol: `gemm_rope` (1 of" in text


def test_every_model_of_the_repository(board):
    known = configurations()
    assert {c.task for c in known.calls} <= set(SUITE.tasks)
    small, middle, large = known.models.values()
    assert [m.qkv for m in (small, middle, large)] == [3072, 6144, 10240]
    assert all(m.attention == m.hidden for m in (small, middle, large))
    assert [c.times(large) for c in known.calls] == [80] * 7 + [1]
    found = estimate(board.lines())
    assert [(e.model, e.baseline) for e in found] == [
        (m, b) for m in known.models for b in ("torch.compile", "torch.compile:max-autotune")
    ]
    for e in found:
        assert e.missing == [] and len(e.parts) == 8
        assert e.saved_ms == pytest.approx(e.baseline_ms - e.fused_ms) == sum(p.saved_ms for p in e.parts)
        assert e.saved_low_ms <= e.saved_ms <= e.saved_high_ms and 0 < e.saved_share < 0.25
    for width in (80, 140):
        text = printed(terminal.show_steps, found, width=width)
        assert "…" not in text and "Not counted: attention" in text and "--shape 4096x28672x4096" in text


def test_a_wrong_configuration_is_named(tmp_path):
    path = tmp_path / "models.yaml"
    for text in ("models: {}", "calls: [", "models: {m: {hidden: 0}}\ncalls: []"):
        path.write_text(text)
        with pytest.raises(ResultsError, match="models.yaml is not a valid list of models"):
            configurations(path)


# --- documents and picture ------------------------------------------------------------------------------


def test_the_picture_is_where_the_numbers_are(board, tmp_path):
    file, lines = tmp_path / "picture.svg", readme.timed(board, SUITE)
    draw(lines, file)
    svg = file.read_text()
    assert disagreement(svg, lines) == "" and file.stat().st_size < 150_000
    assert alt_text(lines) in svg and "torch.compile 1.30 times" in alt_text(lines)
    other = [made_up(x.lead.total_us, task=x.task, shape=x.shape, baselines={b: x.cells[b].us * (1.2 if i == 7 else 1)
             for b in (*BASELINES, "gemm")}) for i, x in enumerate(lines)]  # fmt: skip
    assert "in the wrong place" in disagreement(svg, Board(other).lines())
    assert "dots differ" in disagreement(svg, lines[1:])
    assert mark(lines[0], "expert") in disagreement(svg.replace(mark(lines[0], "expert"), "x"), lines)


def test_documents_are_written_from_the_results(board, tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/leaderboard.md", "docs/authorship.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    readme.main(tmp_path, board)
    text = (tmp_path / "README.md").read_text()
    assert readme.between(text) == readme.overview(board, SUITE) and f"({readme.PICTURE})" in text
    rows = [r for r in readme.overview(board, SUITE).splitlines() if r.startswith("| gemm_")]
    assert [r.split(" | ")[0][2:] for r in rows] == sorted(SUITE.tasks)
    assert "| composer = LLM | 75% to 75% | 1.01 | 0.98 | 1.30 | 1.20 | 2.00 | 1.60 |" in rows[0]
    assert [r for r in rows if "swiglu_bwd" in r][0].split(" | ")[1] == "LLM"
    assert readme.everything(board, SUITE).count("\n| gemm_") == 48
    assert "[1.300, 1.300]" in readme.everything(board, SUITE)
    assert "same, same, same" in (tmp_path / "docs/authorship.md").read_text()
    assert disagreement((tmp_path / readme.PICTURE).read_text(), readme.timed(board, SUITE)) == ""
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    readme.main(tmp_path, board)
    assert {f: f.read_bytes() for f in before} == before
    with pytest.raises(SystemExit, match="No results yet"):
        readme.main(tmp_path, Board([]))


# --- the verb -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory, records) -> Path:
    root = tmp_path_factory.mktemp("library")
    library_of(root, records)
    append(root / "results.jsonl", [*records, made_up(100.0, author="human:ada")])
    return root


def run(library: Path, *args: str, columns: int = 80) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "agent.cli", "leaderboard", "--library", str(library), *args]
    environment = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_the_verb_at_80_columns(library):
    done = run(library, "--task", "gemm_rope", "--sort", "-us")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80 and "…" not in done.stdout
    assert "4096x12288x4096" in done.stdout and "gemm_swiglu" not in done.stdout
    assert "1 hidden: its kernel is not in the library" in done.stdout


def test_the_verb_as_json(library):
    done = run(library, "--size", "4096", "--json")
    found = json.loads(done.stdout)
    assert len(found["lines"]) == 16 and {x["size"].split("x")[0] for x in found["lines"]} == {"4096"}
    line = found["lines"][0]
    assert line["lead"]["commit"] == "c" * 40 and line["lead"]["receipt"]["before"]["sm_clock_mhz"] == 1500
    assert line["cells"]["torch.compile"]["ratio"]["median"] == pytest.approx(1.3)
    assert found["geomeans"]["torch.compile"]["n"] == 16
    assert [h["reason"] for h in found["hidden"]] == ["its kernel is not in the library"]


@pytest.fixture
def main(monkeypatch, capsys):
    """The command line in this process: exit code, stdout, stderr."""

    def run_here(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coda-agent", "leaderboard", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run_here


def test_the_verb_compares_and_counts_steps(library, main):
    code, out, _ = main("--library", str(library), "--compare", "composer", "LLM", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["pairs"]) == 48 and found["same_code"] == 45 and found["geomean"]["n"] == 3
    steps = json.loads(main("--library", str(library), "--steps", "--json")[1])
    assert [s["model"] for s in steps][::2] == ["Llama-3 1B", "Llama-3 8B", "Llama-3 70B"]
    assert steps[0]["parts"][0]["shape"] == [2048, 3072, 2048] and steps[0]["saved_ms"] > 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--task", "gemm_rop"], "no result has task 'gemm_rop'"),
        (["--sort", "speed"], "cannot sort by"),
        (["--results", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["--compare", "composer", "nobody"], "no author or baseline 'nobody'"),
    ],
)
def test_the_verb_says_what_is_wrong(library, main, args, says):
    code, out, err = main("--library", str(library), *args, "--json")
    assert code == 2 and says in err and says in json.loads(out)["error"]


def test_the_verb_without_results_and_with_broken_ones(tmp_path, main):
    code, out, _ = main("--library", str(tmp_path))
    assert code == 0 and "No results to show" in out
    (tmp_path / "results.jsonl").write_text("{}\n")
    code, _, err = main("--library", str(tmp_path))
    assert code == 2 and "results.jsonl, line 1 is not a valid record" in err
