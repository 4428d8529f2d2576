"""The report's drawings: plain numbers in, ``<svg>`` out. Every one stands beside a table of the same numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from .svg import COLOUR, STYLE, figure, inline

WIDTH = 1180  # CSS pixels
FAR = 1.3  # what is slower than this many times the fastest kernel is named at the edge, so that the others stay apart
AUTHORS = ("llm", "human", "composer")


@dataclass(frozen=True)
class Look:
    """Shape and colour of a series: either alone tells it from the others."""

    label: str
    marker: str
    size: float
    filled: bool

    def style(self, role: str) -> dict:
        colour = COLOUR[hue(role)]
        return {
            "marker": self.marker, "markersize": self.size, "markeredgecolor": colour, "markeredgewidth": 1.4,
            "markerfacecolor": colour if self.filled else "none", "linestyle": "none",
        }  # fmt: skip


# in drawing order: what lies below is larger and hollow, so that equal values stay visible
LOOKS = {
    "eager": Look("PyTorch eager", "x", 6, True),
    "compile": Look("torch.compile, the faster mode", "s", 5.5, True),
    "library": Look("library, the fastest", "P", 7, True),
    "library_partial": Look("library, only some outputs", "p", 7, False),
    "gemm": Look("bare GEMM", "|", 9, True),
    "expert": Look("quack expert", "D", 8, False),
    "expert_partial": Look("expert, only some outputs", "d", 8, False),
    "human": Look("human", "*", 9, False),
    "composer": Look("composer", "^", 8.5, False),
    "llm": Look("LLM", "o", 5, True),
}


def hue(role: str) -> str:
    """A baseline that computes only some outputs keeps its colour and changes its shape."""
    return role.removesuffix("_partial")


def _drawn(draw: Callable[..., tuple[Figure, str, str]]) -> Callable[..., Markup]:
    """Run under the report's style; ``draw`` returns the figure, its title and a description in words."""

    def wrapped(name: str, *args, **kwargs) -> Markup:
        with matplotlib.rc_context(STYLE):
            fig, title, description = draw(*args, **kwargs)
            return inline(fig, name, title, description)

    return wrapped


def _place(
    fig: Figure, left: int, top: int, right: int = 14, bottom: int = 40, between: int = 18, rows: int = 1
) -> None:
    """Margins in pixels; matplotlib's own layout engines would draw everything twice to find them.

    Between rows of panels there is room for the margin below one and above the next.
    """
    width, height = fig.get_size_inches() * 72
    columns = max(1, math.ceil(len(fig.axes) / rows))
    inner = (width - left - right - between * (columns - 1)) / columns
    high = (height - (top + bottom) * rows) / rows
    fig.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height,
        wspace=between / inner, hspace=(top + bottom) / high,
    )  # fmt: skip


def _text_width(labels: list[str]) -> int:
    """Pixels that the longest label takes, about."""
    return 16 + math.ceil(6.2 * max(map(len, labels)))


def _legend(fig: Figure, roles: set[str]) -> None:
    shown = [(r, look) for r, look in reversed(LOOKS.items()) if r in roles]
    handles = [matplotlib.lines.Line2D([], [], label=look.label, **look.style(r)) for r, look in shown]
    fig.legend(
        handles=handles, loc="upper left", ncols=len(handles), frameon=False, handletextpad=0.2, columnspacing=1.2,
        borderaxespad=0, fontsize=10.5,
    )  # fmt: skip


def _rows(axes: list[Axes], names: list[str]) -> None:
    """Names down the left side of the first panel, a faint line through each row of all."""
    for ax in axes:
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.yaxis.grid(True)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(names)), names)


@_drawn
def shares(panels: dict[str, dict[str, dict[str, float]]]) -> tuple[Figure, str, str]:
    """Where everything stands against the machine's limit.

    Args:
        panels: size -> task -> role -> share of the floor (1: no kernel can be faster).
    """
    names = sorted({task for rows in panels.values() for task in rows})
    roles = {r for rows in panels.values() for by_role in rows.values() for r in by_role}
    fig = figure(WIDTH, 80 + 21 * len(names))
    axes = fig.subplots(1, len(panels), sharey=True, sharex=True, squeeze=False)[0]
    for ax, (size, rows) in zip(axes, panels.items(), strict=True):
        for y, name in enumerate(names):
            values = rows.get(name, {})
            if values:
                ax.plot([min(values.values()), max(values.values())], [y, y], color=COLOUR["muted"], lw=1)
            for z, (role, look) in enumerate(LOOKS.items(), 3):
                if role in values:
                    ax.plot(values[role], y, zorder=z, **look.style(role))
        ax.axvline(1, color=COLOUR["ink"], lw=1.2, ls=(0, (4, 2)))
        ax.set_title(size, loc="left")
        ax.set_xlabel("share of the floor")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
        ax.xaxis.set_major_locator(MaxNLocator(5))
    axes[0].set_xlim(right=max(1.02, axes[0].get_xlim()[1]))
    _rows(list(axes), names)
    _legend(fig, roles)
    _place(fig, _text_width(names), top=50)
    middle = {
        r: statistics.median(v[r] for rows in panels.values() for v in rows.values() if r in v) for r in reversed(LOOKS)
        if r in roles
    }  # fmt: skip
    told = "; ".join(f"{LOOKS[r].label} {v:.0%}" for r, v in middle.items())
    return fig, "Share of the machine's limit, per task and size", f"Median share of the floor over all cells: {told}."


@_drawn
def forest(
    panels: dict[str, dict[str, dict[str, tuple[float, float, float]]]], subject: str, level: float
) -> tuple[Figure, str, str]:
    """How many times faster one author's kernels are than others', with 95 % intervals.

    Args:
        panels: size -> task -> role compared with -> (median, low, high) ratio.
        subject: whose kernels; said on the axis.
        level: ratios between its inverse and itself count as level.
    """
    names = sorted({task for rows in panels.values() for task in rows})
    roles = [r for r in reversed(LOOKS) if any(r in v for rows in panels.values() for v in rows.values())]
    lanes = list(dict.fromkeys(hue(r) for r in roles))
    fig = figure(WIDTH, 80 + 21 * len(names))
    axes = fig.subplots(1, len(panels), sharey=True, sharex=True, squeeze=False)[0]
    counted = dict.fromkeys(("faster", "level or unclear", "slower"), 0)
    for ax, (size, rows) in zip(axes, panels.items(), strict=True):
        ax.axvspan(1 / level, level, color=COLOUR["band"], lw=0)
        ax.axvline(1, color=COLOUR["muted"], lw=1)
        for y, name in enumerate(names):
            for role, (median, low, high) in rows.get(name, {}).items():
                at = y + (lanes.index(hue(role)) - (len(lanes) - 1) / 2) * 0.4
                ax.plot([low, high], [at, at], color=COLOUR[hue(role)], lw=1.6, solid_capstyle="butt")
                ax.plot(median, at, **LOOKS[role].style(role) | {"markersize": 5})
                verdict = "faster" if low > level else "slower" if high < 1 / level else "level or unclear"
                counted[verdict] += 1
        ax.set_title(size, loc="left")
        ax.set_xlabel(f"\N{LEFTWARDS ARROW} {subject} slower · times as fast · faster \N{RIGHTWARDS ARROW}")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    furthest = max(abs(math.log(x)) for p in panels.values() for v in p.values() for t in v.values() for x in t)
    reach = max(furthest * 1.15, 1.5 * math.log(level))
    axes[0].set_xlim(math.exp(-reach), math.exp(reach))
    _rows(list(axes), names)
    _legend(fig, set(roles))
    _place(fig, _text_width(names), top=50)
    told = ", ".join(f"{n} {what}" for what, n in counted.items())
    return fig, f"{subject} kernels against {' and '.join(LOOKS[r].label for r in roles)}", f"Comparisons: {told}."


@_drawn
def distribution(panels: dict[str, dict[str, tuple[str, list[float]]]]) -> tuple[Figure, str, str]:
    """Every sample of every subject.

    Args:
        panels: size -> subject -> (role, microseconds of one call in each round, in order).
    """
    names = list(dict.fromkeys(subject for rows in panels.values() for subject in rows))
    across = len(panels) if len(panels) <= 4 else 3
    down = math.ceil(len(panels) / across)
    fig = figure(WIDTH, (70 + 30 * len(names)) * down)
    grid = list(fig.subplots(down, across, sharey=True, squeeze=False).flat)
    axes, empty = grid[: len(panels)], grid[len(panels) :]
    for ax in empty:
        ax.set_axis_off()
    told = []
    for ax, (size, rows) in zip(axes, panels.items(), strict=True):
        medians = {s: statistics.median(v) for s, (_, v) in rows.items()}
        limit = FAR * min((m for subject, m in medians.items() if rows[subject][0] in AUTHORS), default=math.inf)
        near = [x for s, (_, v) in rows.items() if medians[s] <= limit for x in v]
        low, high = min(near), max(near)
        pad = 0.04 * (high - low or high)
        ax.set_xlim(low - pad, high + pad)
        for y, name in enumerate(names):
            role, samples = rows.get(name, ("", []))
            if not samples:
                continue
            if medians[name] > limit:
                ax.text(
                    0.99, y, f"{medians[name]:.0f} µs \N{RIGHTWARDS ARROW}", transform=ax.get_yaxis_transform(),
                    ha="right", va="center", color=COLOUR["ink"], size=10,
                )  # fmt: skip
                continue
            # top to bottom in the order of the rounds: a drift shows as a slope
            heights = [y - 0.36 + 0.72 * i / max(1, len(samples) - 1) for i in range(len(samples))]
            dots_x = [v for x in samples for v in (x, x, math.nan)]  # a line of no length with round ends is a dot
            dots_y = [v for h in heights for v in (h, h, math.nan)]
            ax.plot(dots_x, dots_y, lw=2.8, solid_capstyle="round", color=COLOUR[hue(role)])
            ax.plot([medians[name]] * 2, [y - 0.42, y + 0.42], color=COLOUR["ink"], lw=1.6)
        ax.set_title(size, loc="left")
        ax.set_xlabel("µs per call")
        ax.xaxis.set_major_locator(MaxNLocator(4))
        told.append(f"{size}: " + ", ".join(f"{s} {m:.1f}" for s, m in medians.items()))
    _rows(axes, names)
    _place(fig, _text_width(names), top=24, rows=down)
    return fig, "Distribution of the timing samples", "Medians in µs. " + "; ".join(told) + "."


@_drawn
def roofline(
    points: list[tuple[str, str, float, float]], ceilings: list[tuple[str, float, float]]
) -> tuple[Figure, str, str]:
    """Achieved rate over arithmetic intensity, under the measured ceilings.

    Args:
        points: (role, size, FLOP per byte, FLOP/s).
        ceilings: (session, measured matmul FLOP/s, measured copy bytes/s).
    """
    fig = figure(WIDTH // 2, 340)
    ax = fig.subplots()
    peak = max(c[1] for c in ceilings)
    ridge = peak / max(c[2] for c in ceilings)
    xs, ys = [p[2] for p in points], [p[3] for p in points]
    left, right = min(*xs, ridge) / 1.5, max(*xs, ridge) * 1.6
    for _, flops, bandwidth in ceilings:
        corner = flops / bandwidth
        ax.plot([left, corner, right], [left * bandwidth, flops, flops], color=COLOUR["ink"], lw=1.4)
    for z, (role, look) in enumerate(LOOKS.items(), 3):
        own = [p for p in points if p[0] == role]
        if own:
            ax.plot([p[2] for p in own], [p[3] for p in own], zorder=z, **look.style(role))
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(*ys, peak / 2) / 1.15, peak * 1.2))
    ax.annotate(
        f"{peak / 1e12:.0f} TFLOP/s measured", (right, peak), (-4, 4), textcoords="offset points", ha="right", size=10
    )
    ticks = [t for t in (1e12 * b * 10**e for e in range(-2, 5) for b in (1, 2, 3, 4, 5, 6, 8))]
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1e12:g}"))
    step = 1 if right / left < 2**8 else 2
    ax.xaxis.set_major_locator(FixedLocator([2.0**n for n in range(0, 24, step)]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0f}"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    ax.grid(True)
    ax.set_xlabel("FLOP per byte that must move (log)")
    ax.set_ylabel("TFLOP/s (log)")
    _legend(fig, {p[0] for p in points})
    _place(fig, 52, top=34)
    best = max(points, key=lambda p: p[3])
    told = (
        f"Ceilings {peak / 1e12:.0f} TFLOP/s and {max(c[2] for c in ceilings) / 1e12:.2f} TB/s, ridge at {ridge:.0f} "
        f"FLOP per byte. Highest point: {LOOKS[best[0]].label} at {best[1]}, {best[3] / 1e12:.0f} TFLOP/s."
    )
    return fig, "Roofline", told


@_drawn
def tax(series: dict[str, list[tuple[str, float, float, float]]]) -> tuple[Figure, str, str]:
    """The epilogue tax over size, as a share of the bare GEMM's time.

    Args:
        series: role -> (size, median, lower and upper quartile over rounds) of (kernel - GEMM) / GEMM.
    """
    fig = figure(WIDTH // 2, 340)
    ax = fig.subplots()
    sizes = list(dict.fromkeys(point[0] for points in series.values() for point in points))
    drawn = [r for r in LOOKS if r in series]
    for n, role in enumerate(drawn):
        at = [sizes.index(p[0]) + (n - (len(drawn) - 1) / 2) * 0.12 for p in series[role]]
        for x, (_, _, low, high) in zip(at, series[role], strict=True):
            ax.plot([x, x], [low, high], color=COLOUR[hue(role)], lw=1.4)
        ax.plot(at, [p[1] for p in series[role]], color=COLOUR[hue(role)], lw=1, zorder=2)
        ax.plot(at, [p[1] for p in series[role]], zorder=3 + n, **LOOKS[role].style(role))
    ax.axhline(0, color=COLOUR["ink"], lw=1)
    many = len(sizes) > 3  # then each size stands on three lines
    ax.set_xticks(range(len(sizes)), [s.replace("×", "×\n") if many else s for s in sizes], size=10)
    ax.set_xlim(-0.5, len(sizes) - 0.5)
    ax.yaxis.grid(True)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+.0%}".replace("-", "\N{MINUS SIGN}") if v else "0%"))
    ax.set_ylabel("tax, share of the bare GEMM's time")
    _legend(fig, set(series))
    _place(fig, 60, top=34, bottom=66 if many else 40)
    told = "; ".join(
        f"{LOOKS[r].label}: " + ", ".join(f"{size} {median:+.1%}" for size, median, _, _ in series[r]) for r in series
    )
    return fig, "Epilogue tax over size", told
