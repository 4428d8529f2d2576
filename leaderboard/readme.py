"""``python -m leaderboard.readme``: the tables and the picture of the documents, from the results."""

from __future__ import annotations

from pathlib import Path

from reference_kernels.tasks import Suite, load_suite

from .board import KERNELS, Board, Filter, Line, column_of, load_board, ordered
from .picture import alt_text, draw
from .steps import AGAINST, Estimate, estimate
from .terminal import cell_text, origin

ROOT = Path(__file__).resolve().parent.parent
PICTURE = "docs/leaderboard.svg"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTHING = "No results yet: `coda-agent measure --all` on a Hopper GPU, then `python -m leaderboard.readme`."
LEGEND = (
    "Per task the fastest kernel at the suite's sizes, smallest first; *=* means that the authors' kernels compile to "
    "the same machine code. *of floor*: share of what compute or memory traffic allow. *tax*: microseconds beyond the "
    "bare cuBLAS GEMM. Other columns: how many times faster it is (medians of ratios paired round by round; ~: 1 lies "
    "inside the 95 % interval; \\*: computes only some of the outputs, so it has less to do; -: no counterpart, or not "
    "timed). Last row: geometric mean, ×/ geometric standard deviation, number of ratios. Every line with its "
    "interval: [docs/leaderboard.md](docs/leaderboard.md)."
)
STEPS = (
    "In milliseconds per training step of named models, against torch.compile: only the calls that these kernels "
    "replace, forward and backward, one micro-batch ([definition](docs/leaderboard.md#training-steps)). Calls whose "
    "shape was not measured are estimates, scaled from the nearest measured one; the interval covers the noise of "
    "measuring, not the scaling."
)


def overview(board: Board, suite: Suite) -> str:
    """The README's part: what was measured, the picture, a row per task, training steps."""
    lines = timed(board, suite)
    if not lines:
        return NOTHING
    parts = []
    for device in sorted({x.device for x in lines}):
        mine = [x for x in lines if x.device == device]
        parts += [origin([x.lead for x in mine]), f"![{alt_text(mine)}]({PICTURE})", LEGEND, per_task(mine)]
        estimates = estimate([x for x in board.lines() if x.device == device])
        if estimates:
            parts += [STEPS, steps_table(estimates)]
    return "\n\n".join(parts)


def timed(board: Board, suite: Suite) -> list[Line]:
    """The newest lines at the suite's own sizes."""
    sizes = {(t.name, tuple(s)) for t in suite.tasks.values() for s in t.timed}
    return [x for x in board.lines() if (x.task, x.shape) in sizes]


def per_task(lines: list[Line]) -> str:
    """One row per task; the sizes' values side by side."""
    columns = [c for c in ordered({c for x in lines for c in x.cells}) if c not in (*KERNELS, "gemm")]
    rows = []
    for task in dict.fromkeys(x.task for x in lines):
        mine = [x for x in lines if x.task == task]
        cells = [[f"{x.share_of_floor:.0%}" for x in mine], [f"{x.tax_us:+.1f}" for x in mine]]
        cells += [[_cell(x, c) for x in mine] for c in columns]
        rows.append([task, " / ".join(dict.fromkeys(map(_fastest, mine))), *(_together(c) for c in cells)])
    means = Board.geomeans(lines)
    mean = [f"{means[c].mean:.2f} ×/{means[c].sd:.2f} ({means[c].n})" if c in means else "-" for c in columns]
    rows.append(["**geometric mean**", "", "", "", *mean])
    return table(["task", "fastest", "of floor", "tax µs", *columns], rows)


def _cell(line: Line, column: str) -> str:
    return cell_text(line.cells.get(column)).replace("*", "\\*")


def _together(values: list[str]) -> str:
    return "-" if set(values) == {"-"} else ", ".join(values)


def _fastest(line: Line) -> str:
    same = [c for c, cell in line.cells.items() if cell.same_code_as]
    return " = ".join([column_of(line.lead.author), *same])


def everything(board: Board) -> str:
    """Every line of the newest sessions, with intervals, for the documentation."""
    parts = []
    for device in sorted({x.device for x in board.lines()}):
        lines = board.lines(Filter(devices=(device,)))
        columns = ordered({c for x in lines for c in x.cells})
        rows = [
            [x.task, x.size, f"{x.us:.1f}", f"{x.finish_us:.1f}", f"{x.tax_us:+.1f}", f"{x.share_of_floor:.0%}",
             *(_cell(x, c) + _interval(x, c) for c in columns), x.lead.config, x.session]
            for x in lines
        ]  # fmt: skip
        header = ["task", "M x N x K", "µs", "finish µs", "tax µs", "of floor", *columns, "configuration", "session"]
        parts += [origin([x.lead for x in lines]), table(header, rows)]
    return "\n\n".join(parts) or NOTHING


def _interval(line: Line, column: str) -> str:
    cell = line.cells.get(column)
    if cell is None or cell.ratio is None or cell.is_lead or cell.same_code_as:
        return ""
    return f" [{cell.ratio.low:.3f}, {cell.ratio.high:.3f}]"


def steps_table(estimates: list[Estimate]) -> str:
    """One row per model: its baseline's and our milliseconds, and what is saved."""
    rows = []
    for e in (e for e in estimates if e.baseline in AGAINST):
        row = [e.model, f"{e.tokens:,}", e.baseline]
        if e.saved_ms is None:
            rows.append([*row, "-", "-", f"not measured: {', '.join(e.missing)}", "-", "-"])
            continue
        saved = f"{e.saved_ms:.1f} [{e.saved_low_ms:.1f}, {e.saved_high_ms:.1f}]"
        own = f"{sum(p.scaled_from is None for p in e.parts)} of {len(e.parts)}"
        rows.append([*row, f"{e.baseline_ms:.1f}", f"{e.fused_ms:.1f}", saved, f"{e.saved_share:.1%}", own])
    header = [
        "model",
        "tokens",
        "against",
        "its ms",
        "ours, ms",
        "saved ms [95 %]",
        "of its ms",
        "calls at measured shapes",
    ]
    return table(header, rows)


def authorship(board: Board) -> str:
    """Kernels by models: attempts, cost where known, and times against composer, expert and torch.compile."""
    rows, others = [], ("composer", "expert", "torch.compile")
    for p in (p for p in board.passports.values() if column_of(p.author) == "LLM"):
        chosen = Filter(tasks=(p.task,))
        pairs = {n: board.compare_authors(p.author, n, chosen).pairs for n in others if _knows(board, n)}
        against = [
            _together(["same" if x.same_code else f"{x.ratio.median:.2f}" for x in pairs.get(n, [])] or ["-"])
            for n in others
        ]
        ours = pairs.get("composer", [])
        code = "-" if not ours else "the composer's" if all(x.same_code for x in ours) else "its own"
        first = "yes" if p.attempts == 1 else "no"
        rows.append(
            [p.task, str(p.attempts or "unknown"), first, str(p.cost.get("tokens") or "unknown"), code, *against]
        )
    header = ["task", "attempts", "first try", "tokens", "object", "vs composer", "vs expert", "vs torch.compile"]
    return table(header, rows)


def _knows(board: Board, name: str) -> bool:
    return any(name in (column_of(r.author), *r.baselines) for r in board.records)


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def between(text: str) -> str:
    """What a document says between its markers."""
    return text.split(BEGIN)[1].split(END)[0].strip()


def write_between(file: Path, text: str) -> None:
    """Put a generated part between a document's markers."""
    head, rest = file.read_text().split(BEGIN)
    file.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main(root: Path = ROOT, board: Board | None = None) -> None:
    """Write README, docs/leaderboard.md, docs/authorship.md and the picture."""
    board, suite = board or load_board(), load_suite()
    lines = timed(board, suite)
    if not lines:
        raise SystemExit(NOTHING)
    write_between(root / "README.md", overview(board, suite))
    write_between(root / "docs/leaderboard.md", everything(board))
    write_between(root / "docs/authorship.md", authorship(board))
    draw(lines, root / PICTURE)


if __name__ == "__main__":
    main()
