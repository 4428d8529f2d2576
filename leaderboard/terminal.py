"""The board in a terminal: tables folded to the width at hand, with a legend of what the marks mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reference_kernels.tasks import Suite

from .board import Board, Cell, Comparison, Line, ordered, size_text, unmeasured_text
from .records import Interval, Record
from .steps import Estimate, to_measure

KEY_WIDTH = 18  # of the task's name, folded at underscores
WIDE = 120  # from here on task and size stand side by side
HEADERS = {
    "composer": "com-\nposer", "torch.compile": "torch.\ncompile", "torch.compile:max-autotune": "max-\nautotune",
    "flashinfer": "flash-\ninfer", "coda": "coda-\nkernels",
}  # fmt: skip
LEGEND = (
    "µs: the fastest shown kernel, partial reductions folded; finish: that fold alone; tax: kernel minus the bare "
    "GEMM; floor: share of what compute or traffic allow. Other columns: how many times faster it is (medians of "
    "paired ratios)."
)
MARKS = {
    "~": "1 lies inside the 95 % interval",
    "best": "the fastest kernel itself",
    "same": "compiles to the fastest kernel's machine code; counts as 1",
    "*": "computes only some of the outputs, so it has less to do",
    "^": "not timed in turns with the fastest; compared through the bare GEMM",
    "-": "not timed",
}

PAIRED = "~: 1 lies inside the interval. Timed in turns in one session (^: compared through the bare GEMM)."
SCALED = (
    "~ SHAPE: an estimate, scaled from this measured shape (the bare GEMM by FLOPs, the rest by M x N). The interval "
    "covers the noise of measuring, not the scaling."
)
NOT_COUNTED = (
    "Not counted: attention, the other GEMMs (weight gradients, backward of LM head and output projection), optimizer, "
    "communication. 'of these' is the share of the baseline's time in the calls listed."
)


@dataclass
class Column:
    """A column of a table that may be folded: header lines and one text per row."""

    header: str
    cells: list[str]

    @property
    def width(self) -> int:
        return max(len(part) for text in (self.header, *self.cells) for part in text.split("\n"))


def ratio_text(i: Interval | None, intervals: bool = False) -> str:
    """``~1.01`` when 1 lies inside the interval; with ``intervals`` the interval too."""
    if i is None:
        return "-"
    mark = "~" if i.low <= 1 <= i.high else ""
    return f"{mark}{i.median:.2f}" + (f"\n{i.low:.3f}-{i.high:.3f}" if intervals else "")


def cell_text(cell: Cell | None, intervals: bool = False) -> str:
    """What a line shows of one column."""
    if cell is None:
        return "-"
    if cell.is_lead or cell.same_code_as:
        return "best" if cell.is_lead else "same"
    return ("" if cell.paired else "^") + ratio_text(cell.ratio, intervals) + ("*" if cell.covers is not None else "")


def task_text(name: str, width: int = KEY_WIDTH) -> str:
    """A task's name on as many lines as it needs, broken after underscores."""
    lines = [""]
    for part in name.replace("_", "_ ").split():
        if len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def show(out: Console, board: Board, lines: list[Line], intervals: bool = False, suite: Suite | None = None) -> None:
    """Every device's table, with what it was measured with, geometric means, legend and what is hidden.

    With a ``suite`` also which of its tasks a device has no line for.
    """
    for device in sorted({x.device for x in lines}):
        mine = [x for x in lines if x.device == device]
        say(out, origin([x.lead for x in mine]))
        for table in tables(mine, out.width, intervals):
            out.print(table)
        legend(out, mine)
        say(out, unmeasured_text(mine, suite) if suite else "")
    if not lines:
        say(out, "No results to show: measure kernels with coda-agent measure, or choose a file with --results.")
    say(out, hidden_text(board))


def say(out: Console, text: str) -> None:
    if text:
        out.print(Text(text))


def tables(lines: list[Line], width: int, intervals: bool = False) -> list[Table]:
    """The lines of one device as tables that fit into ``width`` characters, each with task and size."""
    means = Board.geomeans(lines)
    names = ordered({c for x in lines for c in x.cells})
    facts: list[tuple[str, Callable[[Line], str]]] = [
        ("µs", lambda x: f"{x.us:.1f}"),
        ("floor", lambda x: f"{x.share_of_floor:.0%}"),
        ("tax", lambda x: f"{x.tax_us:+.1f}"),
        ("finish", lambda x: f"{x.finish_us:.1f}"),
    ]
    columns = [Column(header, [text(x) for x in lines] + [""] * 4) for header, text in facts]
    for name in names:
        mean = means.get(name)
        foot = [f"{mean.mean:.2f}", f"×/{mean.sd:.2f}", f"{mean.low:.2f}", f"{mean.high:.2f}"] if mean else ["-"] * 4
        columns.append(Column(HEADERS.get(name, name), [cell_text(x.cells.get(name), intervals) for x in lines] + foot))
    keys = [(x.task, f"{x.size}{_session_mark(x, lines)}") for x in lines]
    foot = ["geometric mean", "geometric sd", "smallest", "largest"]
    wide = width >= WIDE
    key_width = max(len(text) for size_and_task in keys for text in size_and_task[0 if wide else 1 :])
    key_width = key_width + 1 + max(len(size) for _, size in keys) if wide else max(KEY_WIDTH, key_width)
    folded: list[list[Column]] = []
    room = 0
    for column in columns:
        if column.width + 1 > room:
            folded.append([])
            room = width - key_width - 1
        folded[-1].append(column)
        room -= column.width + 1
    return [_table(keys, foot, group, wide) for group in folded]


def _session_mark(line: Line, lines: list[Line]) -> str:
    """The session, where a task and size is shown from several."""
    several = sum((x.task, x.shape) == (line.task, line.shape) for x in lines) > 1
    return f" {line.session[:8]}" if several else ""


def _table(keys: list[tuple[str, str]], foot: list[str], columns: list[Column], wide: bool) -> Table:
    """``wide``: the task beside its size, not in a row above."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)  # the box parts columns by a space
    for header in ("task", "M x N x K") if wide else ("task\nM x N x K",):
        table.add_column(header, min_width=0 if wide else KEY_WIDTH, no_wrap=True)
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
    last = None
    for i, (task, size) in enumerate(keys):
        head = Text(task if wide else task_text(task), style="bold") if task != last else Text("")
        if task != last and not wide:
            table.add_row(head)
        table.add_row(*([head] if wide else []), Text(size), *(Text(c.cells[i]) for c in columns))
        last = task
    table.add_section()
    if any(c.cells[-1] for c in columns):
        for j, name in enumerate(foot):
            cells = (Text(c.cells[len(keys) + j]) for c in columns)
            table.add_row(Text(name, style="bold"), *([""] if wide else []), *cells)
    return table


def legend(out: Console, lines: list[Line]) -> None:
    """The marks that occur, how many lines each mean is over, and why baselines are missing."""
    cells = [c for x in lines for c in x.cells.values()]
    texts = [cell_text(c) for c in cells]
    used = [f"{m}: {meaning}" for m, meaning in MARKS.items() if any(m in t for t in texts) or m == "-"]
    say(out, LEGEND)
    say(out, "; ".join(used) + ".")
    n = {c: s.n for c, s in Board.geomeans(lines).items()}
    partial = Counter(c for x in lines for c, cell in x.cells.items() if cell.covers is not None)
    means = (f"{c} {k}" + (f" ({partial[c]} *)" if partial[c] else "") for c, k in n.items())
    say(out, f"Means over lines: {', '.join(means)}.")
    reasons = Counter((b, why) for x in lines for b, why in x.left_out.items())
    for (name, why), count in sorted(reasons.items()):
        say(out, f"{name} left out of {count} lines: {why}")


def origin(records: list[Record]) -> str:
    """What the results of one device were measured with; several values where they differ."""

    def every(values: Iterable[object]) -> str:
        return ", ".join(sorted({str(v) for v in values}))

    facts = ("driver", "torch", "nvidia-cutlass-dsl", "quack-kernels")
    tools = ", ".join(f"{f} {every(r.environment.get(f) for r in records)}" for f in facts)
    commits = every((r.commit or "unknown")[:12] + ("+dirty" if "+dirty" in (r.commit or "") else "") for r in records)
    rates = every(f"{r.matmul_flops / 1e12:.0f} TFLOP/s and {r.copy_bytes / 1e12:.2f} TB/s" for r in records)
    return (
        f"{records[0].device}, {tools}; {every(r.act for r in records)}; sessions {every(r.session for r in records)}; "
        f"commit {commits}; floor from {rates}, measured."
    )


def hidden_text(board: Board) -> str:
    """How many results are not shown, and why."""
    counts = Counter(reason for _, reason in board.hidden)
    parts = [f"{n} hidden: {reason}" for reason, n in counts.most_common()]
    return "\n".join([*parts, *(f"not readable: {p}" for p in board.problems)])


def show_comparison(out: Console, comparison: Comparison, intervals: bool = True) -> None:
    """Pair by pair: how many times faster the first of two authors, baselines or sessions is."""
    a, b = comparison.a, comparison.b
    between = any(p.sessions[0] != p.sessions[1] for p in comparison.pairs)
    width = 34 if out.width >= WIDE else KEY_WIDTH
    table = _plain("task\nM x N x K", f"{a}\nµs", f"{b}\nµs", "times\nfaster", "95 % interval", "")
    last = None
    for p in comparison.pairs:
        if p.task != last:
            table.add_row(Text(task_text(p.task, width), style="bold"))
            last = p.task
        note = "same code" if p.same_code else "" if p.paired or between else "^"
        span = f"{p.ratio.low:.3f}-{p.ratio.high:.3f}" if p.ratio else ""
        us = (f"{u:.1f}" for u in p.us)
        table.add_row(size_text(p.shape), *us, ratio_text(p.ratio) if p.ratio else "", span, note)
    out.print(table)
    mean = comparison.geomean
    if mean:
        say(out, f"{a} is {mean.mean:.3f} times as fast as {b}: geometric mean of {mean.n} pairs "
                 f"(×/{mean.sd:.3f}; {mean.low:.3f} to {mean.high:.3f}).")  # fmt: skip
    if comparison.same:
        how = (
            "the same code in both sessions"
            if between
            else "the same machine code, timed once and left out of the mean"
        )
        say(out, f"{comparison.same} of {len(comparison.pairs)} pairs are {how}.")
    if not comparison.pairs:
        say(out, f"{a} and {b} have no task and size in common" + ("" if between else " within one session") + ".")
    elif between:
        say(out, "Sessions are compared through the ratio to the bare GEMM of each; µs are for orientation only.")
    else:
        say(out, PAIRED)


def without_total(estimates: list[Estimate]) -> str:
    """Which models have no total, and the tasks that it would need; an empty string when all have one."""
    groups: dict[tuple[str, ...], dict[str, None]] = {}
    for e in estimates:
        if e.missing:
            groups.setdefault((e.baseline, *e.missing), {})[e.model] = None
    merged: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (baseline, *missing), models in groups.items():
        merged.setdefault((tuple(models), tuple(missing)), []).append(baseline)
    return " ".join(
        f"No total for {', '.join(models)} against {' or '.join(baselines)}, because a step needs "
        f"what is not measured: {', '.join(missing)}."
        for (models, missing), baselines in merged.items()
    )


def show_steps(out: Console, estimates: list[Estimate]) -> None:
    """Totals of every model against each baseline, the calls behind them, and what would replace the scaling."""
    totals = _plain("model", "tokens", "against", "its\nms", "ours\nms", "saved\nms", "95 %\ninterval", "of\nthese")
    complete = [e for e in estimates if e.saved_ms is not None]
    for e in complete:
        row = [e.model, str(e.tokens), HEADERS.get(e.baseline, e.baseline)]
        span = f"{e.saved_low_ms:.1f}-{e.saved_high_ms:.1f}"
        numbers = (f"{e.baseline_ms:.1f}", f"{e.fused_ms:.1f}", f"{e.saved_ms:.1f}", span, f"{e.saved_share:.1%}")
        totals.add_row(*row, *numbers)
    for device in sorted({e.device for e in estimates}):
        say(out, f"{device}: one forward and backward pass over one micro-batch of so many tokens, these kernels only.")
    if complete:
        out.print(totals)
    say(out, without_total(estimates))
    first: dict[tuple[str, str], Estimate] = {}
    for e in estimates:
        first.setdefault((e.device, e.model), e)
    for e in first.values():
        table = _plain(f"{e.model} against {e.baseline}", "M x N x K", "calls", "its\nms", "ours\nms", "saved\nms")
        for p in e.parts:
            shape = size_text(p.shape) + (f"\n~ {size_text(p.scaled_from)}" if p.scaled_from else "")
            ms = (f"{v:.3g}" if v < 100 else f"{v:.0f}" for v in (p.baseline_ms, p.fused_ms, p.saved_ms))
            table.add_row(Text(f"{p.what}\n{task_text(p.task, 34)}"), shape, str(p.times), *ms)
        out.print(table)
    scaled = any(p.scaled_from for e in estimates for p in e.parts)
    if scaled:
        say(out, SCALED)
    say(out, NOT_COUNTED)
    for task, shapes in to_measure(estimates).items():
        say(out, f"To measure instead: coda-agent measure {task} {' '.join(f'--shape {s}' for s in shapes)}")


def _plain(*headers: str) -> Table:
    """A table whose first column is text and the others numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left", no_wrap=bool(i))
    return table
