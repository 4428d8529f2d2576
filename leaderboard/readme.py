"""``python -m leaderboard.readme``: the tables and the picture of the documents, from the results."""

from __future__ import annotations

import re
from pathlib import Path

from reference_kernels.tasks import Suite, load_suite

from .board import KERNELS, Board, Filter, Line, Spread, column_of, load_board, ordered, unmeasured_text
from .picture import alt_text, draw
from .steps import AGAINST, Estimate, estimate
from .terminal import cell_text, origin, without_total

ROOT = Path(__file__).resolve().parent.parent
PICTURE = "docs/leaderboard.svg"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTHING = "No results yet: `coda-agent measure --all` on a Hopper GPU, then `python -m leaderboard.readme`."
LEGEND = (
    "A row is a task: geometric means over the suite's sizes of how many times faster its fastest kernel is (each the "
    "median of ratios paired round by round). *=*: the authors' kernels compile to the same machine code. *of floor*: "
    "share of what compute or memory traffic allow, smallest and largest. \\*: computes only some of the outputs, so "
    "has less to do; -: no counterpart; *gemm*: the bare cuBLAS GEMM, which has less to do, too. Last row: geometric "
    "mean over all tasks and sizes, ×/ geometric standard deviation, number of ratios."
)
SEE = (
    "Everything: `coda-agent leaderboard` in a terminal, `coda-agent leaderboard --html DIR` as pages with plots and "
    "evidence, and every line with its intervals in [docs/leaderboard.md](docs/leaderboard.md#every-line)."
)
STEPS = (
    "In milliseconds per training step of named models, against torch.compile: only the calls that these kernels "
    "replace, forward and backward, one micro-batch ([definition](docs/leaderboard.md#training-steps)). Calls whose "
    "shape was not measured are estimates, scaled from the nearest measured one; the interval covers the noise of "
    "measuring, not the scaling."
)


def overview(board: Board, suite: Suite) -> str:
    """The README's part: what was measured and what not, the picture, a row per task, training steps."""
    lines = timed(board, suite)
    if not lines:
        return NOTHING
    parts = []
    for device in sorted({x.device for x in lines}):
        mine = [x for x in lines if x.device == device]
        missing = [text] if (text := unmeasured_text(mine, suite, "`")) else []
        parts += [f"{origin([x.lead for x in mine])} {commands(mine)}", *missing]
        parts += [f"![{alt_text(mine)}]({PICTURE})", LEGEND, per_task(mine), SEE]
        estimates = estimate([x for x in board.lines() if x.device == device])
        if estimates:
            parts += steps_parts(estimates)
    return "\n\n".join(parts)


def commands(lines: list[Line]) -> str:
    """How the lines were measured; a session may have had only some of the tasks."""
    whole = {x.lead.command or "unknown" for x in lines}
    plain = sorted({re.sub(r" --task \S+", "", c) for c in whole})
    some = " (each session with its tasks, `--task`)" if any(" --task " in c for c in whole) else ""
    return f"Measured with {', '.join(f'`{c}`' for c in plain)}{some}."


def timed(board: Board, suite: Suite) -> list[Line]:
    """The newest lines at the suite's own sizes."""
    sizes = suite.timed
    return [x for x in board.lines() if (x.task, x.shape) in sizes]


def per_task(lines: list[Line]) -> str:
    """One row per task: geometric means over its sizes."""
    columns = [c for c in ordered({c for x in lines for c in x.cells}) if c not in KERNELS]
    rows = []
    for task in dict.fromkeys(x.task for x in lines):
        mine = [x for x in lines if x.task == task]
        means = Board.geomeans(mine)
        shares = sorted(x.share_of_floor for x in mine)
        floor = f"{shares[0]:.0%} to {shares[-1]:.0%}"
        rows.append(
            [task, " / ".join(dict.fromkeys(map(_fastest, mine))), floor, *(_mean(mine, means, c) for c in columns)]
        )
    means = Board.geomeans(lines)
    mean = [f"{means[c].mean:.2f} ×/{means[c].sd:.2f} ({means[c].n})" if c in means else "-" for c in columns]
    rows.append(["**geometric mean**", "", "", *mean])
    return table(["task", "fastest", "of floor", *columns], rows)


def _mean(lines: list[Line], means: dict[str, Spread], column: str) -> str:
    """A column's mean over the sizes of one task; said where it is over some of them only."""
    if column not in means:
        return "-"
    found, cells = means[column], [x.cells[column] for x in lines if column in x.cells]
    partial = "\\*" if any(c.covers is not None for c in cells) else ""
    return f"{found.mean:.2f}{partial}" + (f" ({found.n} of {len(lines)})" if found.n < len(lines) else "")


def _cell(line: Line, column: str) -> str:
    return cell_text(line.cells.get(column)).replace("*", "\\*")


def _together(values: list[str]) -> str:
    return "-" if set(values) == {"-"} else ", ".join(values)


def _fastest(line: Line) -> str:
    same = [c for c, cell in line.cells.items() if cell.same_code_as]
    return " = ".join([column_of(line.lead.author), *same])


def everything(board: Board, suite: Suite) -> str:
    """Every line of the newest sessions, with intervals and what is missing, for the documentation."""
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
        missing = [text] if (text := unmeasured_text(lines, suite, "`")) else []
        parts += [origin([x.lead for x in lines]), *missing, table(header, rows)]
    return "\n\n".join(parts) or NOTHING


def _interval(line: Line, column: str) -> str:
    cell = line.cells.get(column)
    if cell is None or cell.ratio is None or cell.is_lead or cell.same_code_as:
        return ""
    return f" [{cell.ratio.low:.3f}, {cell.ratio.high:.3f}]"


def steps_parts(estimates: list[Estimate]) -> list[str]:
    """One row per model that has a total: its baseline's and our milliseconds, what is saved; then who has none."""
    rows = []
    for e in (e for e in estimates if e.baseline in AGAINST and e.saved_ms is not None):
        saved = f"{e.saved_ms:.1f} [{e.saved_low_ms:.1f}, {e.saved_high_ms:.1f}]"
        own = f"{sum(p.scaled_from is None for p in e.parts)} of {len(e.parts)}"
        row = [e.model, f"{e.tokens:,}", e.baseline, f"{e.baseline_ms:.1f}", f"{e.fused_ms:.1f}"]
        rows.append([*row, saved, f"{e.saved_share:.1%}", own])
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
    totals = [STEPS, table(header, rows)] if rows else []
    none = without_total(estimates)
    return [*totals, *([f"{none} [Which steps](docs/leaderboard.md#training-steps)."] if none else [])]


def authorship(board: Board, suite: Suite) -> str:
    """Kernels by models: attempts, cost where known, and times against composer, expert and torch.compile."""
    rows, others, sizes = [], ("composer", "expert", "torch.compile"), suite.timed
    for p in (p for p in board.passports.values() if column_of(p.author) == "LLM"):
        chosen = Filter(tasks=(p.task,))
        known = [n for n in others if _knows(board, n) and any(r.task == p.task for r in board.records)]
        pairs = {
            n: [x for x in board.compare_authors(p.author, n, chosen).pairs if (x.task, x.shape) in sizes]
            for n in known
        }
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
    missing = unmeasured_text(timed(board, suite), suite, "`")
    return table(header, rows) + (f"\n\n{missing}" if missing else "")


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
    write_between(root / "docs/leaderboard.md", everything(board, suite))
    write_between(root / "docs/authorship.md", authorship(board, suite))
    draw(lines, root / PICTURE)


if __name__ == "__main__":
    main()
