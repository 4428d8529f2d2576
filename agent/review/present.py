"""A card as rich text: for ``review --show``, and part by part for the screen."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .compare import Line, aligned
from .recheck import Recheck
from .session import Card

RED, MAGENTA = "#ff6b6b", "#d787ff"  # light enough to stay readable where NO_COLOR turns them grey
WIDE = 110  # columns from which intervals are written out
MARKS = {
    "proposed": ("·", ""), "accepted": ("✓", "green"), "rejected": ("✗", RED), "changes requested": ("↺", "yellow"),
    "retired": ("−", "dim"),
}  # fmt: skip
_REMOVED, _ADDED = "on #4a1a20", "on #14381f"
_LEGEND = "▲ faster, ▼ slower, = level (95 %); ° the baseline computes only some of the outputs"
_TOLD_BRIEFLY = ("registers", "spills", "shared bytes", "instructions", "MUFU")


def title(card: Card, width: int) -> Text:
    mark, style = MARKS[card.state]
    summary = f"  {card.summary}" if width >= WIDE else ""
    return Text.assemble((card.name, "bold"), "  ", (f"{mark} {card.state}", style), f", {card.status}", summary)


def mathematics(card: Card) -> Text:
    return Text(card.math or "; ".join(card.ops), style="cyan")


def evidence(card: Card, state: Recheck | str | None) -> Text:
    """Verdicts in one line, reasons of what failed, and whether the evidence still reproduces.

    Args:
        state: the recheck, or a text about one that is under way or not made.
    """
    text = Text()
    for stage in dict.fromkeys(v["stage"] for v in card.verdicts):
        verdicts = [v for v in card.verdicts if v["stage"] == stage]
        failed = [v["reason"] for v in verdicts if not v["passed"]]
        text.append(f"✗ {stage}: {failed[0]} " if failed else f"✓ {stage} ", style=f"bold {RED}" if failed else "green")
    boxed = card.isolation.startswith("bubblewrap")
    text.append(" sandboxed" if boxed else f" {card.isolation or 'isolation unknown'}", style="" if boxed else "yellow")
    for problem in card.problems:
        text.append(f"\n✗ {problem}", style=f"bold {RED}")
    if isinstance(state, Recheck):
        mark, style = (
            ("✓ evidence reproduces", "green") if state.reproduces else ("✗ evidence does not reproduce", f"bold {RED}")
        )
        unknown = [f["says"] for f in state.findings if f["ok"] is None]
        says = state.says if not state.reproduces else "; ".join(unknown) or state.findings[-1]["says"]
        text.append(f"\n{mark}", style=style).append(f" ({state.seconds:.0f} s): {says}")
    elif state:
        text.append(f"\n… {state}", style="yellow")
    return text


def timings(card: Card, width: int) -> RenderableType:
    """A row per size, a column per rival, ratios with their intervals."""
    if not card.timings:
        return Text("not measured: coda-agent measure TASK (on a Hopper GPU)", style="yellow")
    wide = width >= WIDE
    rivals = list(dict.fromkeys(name for row in card.timings for name in row["versus"]))
    fits = max(1, (width - (52 if wide else 32)) // (20 if wide else 12))
    shown = rivals[:fits]
    table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), show_edge=False, header_style="dim")
    for head in ("M×N×K", "µs", "tax", "floor", *(("configuration",) if wide else ()), *map(_rival, shown)):
        table.add_column(head, no_wrap=True, justify="left" if head == "M×N×K" else "right")
    for row in card.timings:
        size = "×".join(_short(n) for n in row["shape"]) if not wide else "×".join(map(str, row["shape"]))
        config = (row["config"],) if wide else ()
        cells = [_ratio(row["versus"].get(name), wide) for name in shown]
        numbers = f"{row['total_us']:.1f}", _signed(row["tax_us"]), _percent(row["share_of_floor"])
        table.add_row(size, *numbers, *config, *cells)
    if not wide:
        return table
    more = f"; not shown: {', '.join(rivals[fits:])} (--show, --json)" if rivals[fits:] else ""
    devices = ", ".join(dict.fromkeys(r["device"] for r in card.timings))
    return Group(table, Text(f"{devices}. {_LEGEND}{more}", style="dim"))


def _rival(name: str) -> str:
    return {"incumbent": "vs incumbent", "gemm": "vs bare GEMM"}.get(name, f"vs {name}".replace("max-autotune", "max"))


def _short(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _ratio(r: dict[str, Any] | None, wide: bool) -> Text:
    if r is None:
        return Text("-")
    if r.get("same_code"):
        return Text("same code", style="dim")
    low, high = r["low"], r["high"]
    mark, style = ("▲", "green") if low > 1 else ("▼", RED) if high < 1 else ("=", "dim")
    note = "°" if r.get("partial") else ""
    spread = f" [{low:.2f}, {high:.2f}]" if wide else f"±{max(high - r['median'], r['median'] - low):.2f}"
    return Text(f"{r['median']:.2f}{spread}{note}{mark}", style=style)


def used(card: Card, width: int) -> Text:
    """Resources and instructions, before → after; what changed against the incumbent stands out."""
    if not card.resources:
        return Text("resources: not recorded", style="yellow")
    text = Text(overflow="fold")
    rival = card.base["what"] == "incumbent"
    for name, r in card.resources.items():
        before, after = r["before"], r["after"]
        if width < WIDE and name not in _TOLD_BRIEFLY and (before == after or not rival):
            continue
        if name == "shared bytes":
            name, before, after = "shared KiB", before and before // 1024, after and after // 1024
        if before == after or before is None:
            text.append(f"{name}\u00a0{after}  ")
        else:
            style = ("bold yellow" if (after or 0) > before else "bold green") if rival else ""
            text.append(f"{name}\u00a0{before}→{after}  ", style=style)
    return text


def origin(card: Card) -> Text:
    """Who wrote it, from what, at what cost."""
    o = card.origin
    if o is None:
        return Text("author, cost and tips: hidden until the decision", style=MAGENTA)
    spent = {k: o["cost"][k] for k in ("tokens", "dollars") if o["cost"].get(k) is not None}
    cost = f"{spent.get('tokens', '?')} tokens, " + (f"${spent['dollars']:.2f}" if "dollars" in spent else "$ unknown")
    attempts = f"{o['attempts']} attempt{'s' if o['attempts'] != 1 else ''}" if o["attempts"] else "attempts unknown"
    parts = [attempts, cost if spent else "cost unknown" if o["model"] else "no model, no cost"]
    parts += [f"run {o['run']}"] if o["run"] else []
    parts.append(f"tips {' '.join(t['id'] for t in o['tips'])}" if o["tips"] else "no tips")
    return Text.assemble("by ", (o["author"], "bold"), "  ", "  ".join(parts))


def history(card: Card) -> Text:
    lines = [
        f"{d['at'][:16]} {d['verb']} by {d['reviewer']}{' (blind)' if d['blind'] else ''}: {d['reason']}"
        for d in card.history
    ]
    return Text("\n".join(lines))


def facts(card: Card, width: int, state: Recheck | str | None) -> RenderableType:
    """Everything but the diff."""
    parts = [
        title(card, width),
        mathematics(card),
        evidence(card, state),
        timings(card, width),
        used(card, width),
        origin(card),
    ]
    return Group(*parts, *([history(card)] if card.history else []))


def whole(card: Card, width: int, state: Recheck | str | None) -> RenderableType:
    """The card for a terminal that scrolls."""
    tips = [Text(f"  {t['id']}: {t['claim']}") for t in (card.origin or {}).get("tips", [])]
    return Group(facts(card, width, state), *tips, Text(), difference(card, width, False))


# --- the diff ---------------------------------------------------------------------------------


def difference(card: Card, width: int, side_by_side: bool) -> RenderableType:
    """The kernel against its base, highlighted; signs in the margin say it without colours, too."""
    before, after = _highlighted(card.base["source"]), _highlighted(card.source)
    rows = aligned(card.base["source"], card.source)
    name = card.base["name"] if card.base["what"] != "nothing" else "an empty file"
    head = Text.assemble(("− ", RED), f"{name} ", (f"({card.base['why']})", "dim"), ("\n+ ", "green"), card.name)
    if card.base["what"] != "nothing" and not any(r.changed for r in rows):
        head.append("\nThe two texts are the same.", style="bold")
    if side_by_side and card.base["source"]:
        return Group(head, _columns(rows, before, after, width))
    return Group(head, *_stacked(rows, before, after))


def _highlighted(source: str) -> list[Text]:
    text = Syntax("", "python", theme="monokai", background_color="default").highlight(source)
    lines = list(text.split("\n", allow_blank=True))
    for line in lines:
        line.no_wrap = False
    return lines


def _side(lines: list[Text], number: int | None, changed: bool, sign: str, style: str) -> Text:
    if number is None:
        return Text()
    line = Text.assemble(
        (f"{number:3} {sign if changed else ' '} ", "dim" if not changed else "bold"), lines[number - 1]
    )
    if changed:
        line.stylize(style)
    return line


def _stacked(rows: list[Line], before: list[Text], after: list[Text]) -> list[Text]:
    """Unified: of each block of changes first what went, then what came."""
    out: list[Text] = []
    came: list[Text] = []
    for row in rows:
        if not row.changed:
            out += [*came, _side(after, row.after, False, "", "")]
            came = []
            continue
        if row.before:
            out.append(_side(before, row.before, True, "-", _REMOVED))
        if row.after:
            came.append(_side(after, row.after, True, "+", _ADDED))
    return out + came


def _columns(rows: list[Line], before: list[Text], after: list[Text], width: int) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    for row in rows:
        table.add_row(
            _side(before, row.before, row.changed, "-", _REMOVED), _side(after, row.after, row.changed, "+", _ADDED)
        )
    return table
