"""The README's picture: how many times faster the fastest kernels are, per task, size and baseline."""

from __future__ import annotations

from pathlib import Path

from .board import Board, Line, size_text
from .records import ResultsError

AGAINST = ("torch.compile", "torch.compile:max-autotune", "expert")
TITLES = {
    "torch.compile": "torch.compile",
    "torch.compile:max-autotune": "torch.compile, max-autotune",
    "expert": "expert kernel (quack)",
}
NARROW, BROAD = (0.9, 0.95, 1, 1.05, 1.1), (0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8)  # ticks of an axis
COLOURS = ("#9ecae1", "#4292c6", "#08306b")  # small, middle, large; dark is large
INK, FAINT = "#24292f", "#d0d7de"


def shown(lines: list[Line]) -> list[str]:
    """The baselines that have a panel."""
    return [b for b in AGAINST if any(b in x.cells for x in lines)]


def alt_text(lines: list[Line]) -> str:
    """What the picture shows, in words."""
    means = Board.geomeans(lines)
    said = [
        f"{TITLES[b]} {means[b].mean:.2f} times (from {means[b].low:.2f} to {means[b].high:.2f}, {means[b].n} cases)"
        for b in shown(lines)
    ]
    return f"How many times faster the fastest kernels are on {lines[0].device}, geometric means: {'; '.join(said)}"


def mark(line: Line, baseline: str) -> str:
    """The id of a dot in the picture."""
    return f"{line.task} {size_text(line.shape)} {baseline}"


def draw(lines: list[Line], file: Path) -> None:
    """Write the picture as SVG: a panel per baseline, a row per task, a dot with its interval per size.

    The background is white and opaque, so that it reads in light and dark pages alike.

    Raises:
        ResultsError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import FuncFormatter, NullLocator
    except ImportError as e:
        raise ResultsError("the picture needs matplotlib: pip install 'matplotlib>=3.10'") from e
    tasks = list(dict.fromkeys(x.task for x in lines))
    ranks = {t: sorted(x.shape for x in lines if x.task == t) for t in tasks}
    panels = shown(lines)
    style = {
        "svg.fonttype": "none", "svg.hashsalt": "coda-agent", "font.family": "sans-serif", "font.size": 9,
        "text.color": INK, "axes.edgecolor": FAINT, "xtick.color": INK, "ytick.color": INK,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 1.6 + 0.32 * len(tasks)), facecolor="white", layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, baseline in zip(axes, panels):
            axis.set_xscale("log", base=2)
            axis.axvline(1, color=INK, linewidth=0.8, zorder=1)
            for line in (x for x in lines if baseline in x.cells):
                ratio, rank = line.cells[baseline].ratio, ranks[line.task].index(line.shape)
                y, colour = tasks.index(line.task) + 0.24 * (rank - 1), COLOURS[min(rank, 2)]
                axis.plot([ratio.low, ratio.high], [y, y], color=colour, linewidth=1.4, solid_capstyle="butt", zorder=2)
                partial = line.cells[baseline].covers is not None
                [dot] = axis.plot(
                    [ratio.median], [y], marker="o", markersize=4.6, color=colour, zorder=3,
                    markerfacecolor="white" if partial else colour,
                )  # fmt: skip
                dot.set_gid(mark(line, baseline))
            ratios = [x.cells[baseline].ratio for x in lines if baseline in x.cells]
            low, high = 0.97 * min(0.95, *(r.low for r in ratios)), 1.03 * max(1.05, *(r.high for r in ratios))
            axis.set_xlim(low, high)
            axis.set_xticks([v for v in (NARROW if high / low < 1.3 else BROAD) if low <= v <= high])
            axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_title(TITLES[baseline], fontsize=9)
            axis.grid(axis="x", color=FAINT, linewidth=0.6)
            axis.set_axisbelow(True)
            for row in range(0, len(tasks), 2):
                axis.axhspan(row - 0.5, row + 0.5, color="#f6f8fa", zorder=0)
            axis.tick_params(length=0)
            for side in ("top", "right", "left"):
                axis.spines[side].set_visible(False)
        axes[0].set_yticks(range(len(tasks)), tasks)
        axes[0].set_ylim(len(tasks) - 0.5, -0.5)
        figure.suptitle("How many times faster the fastest kernel is than", fontsize=10)
        dot = {"marker": "o", "linestyle": ""}
        rows_m = [" or ".join(sorted({str(s[i][0]) for s in ranks.values() if i < len(s)}, key=int)) for i in range(3)]
        handles = [Line2D([], [], color=c, label=f"M = {m}", **dot) for m, c in zip(rows_m, COLOURS) if m]
        partial = "that one computes only some of the outputs"
        handles.append(Line2D([], [], color=INK, markerfacecolor="white", label=partial, **dot))
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        about = {"Date": None, "Title": alt_text(lines)} if file.suffix == ".svg" else None
        figure.savefig(file, format=file.suffix[1:], metadata=about)
