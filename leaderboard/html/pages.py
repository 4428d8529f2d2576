"""Render the report: every page's file name and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from verifier.measure import MIN_EFFECT

from ..board import column_of, unmeasured_text
from ..records import Record
from ..steps import estimate
from . import plots, wording
from .report import Place, Report, leader, outcome, quantiles, receipts, relative_tax, throttles, versions

ASSETS = ("style.css", "report.js")
_HERE = Path(__file__).resolve().parent


def pages(report: Report) -> Iterator[tuple[str, str]]:
    """(path inside the report, text) of every file; the same board gives the same bytes."""
    env = _environment(report)
    for name in ASSETS:
        yield name, (_HERE / name).read_text()
    yield "index.html", env.get_template("index.html.j2").render(root="", **_overview(report))
    for task in report.tasks:
        page = env.get_template("task.html.j2").render(root="../", **_task(report, task))
        yield f"task/{wording.slug(task)}.html", page
    for session, records in report.sessions.items():
        page = env.get_template("evidence.html.j2").render(root="../", session=session, records=records)
        yield wording.evidence_page(session), page


def _environment(report: Report) -> Environment:
    env = Environment(
        loader=PackageLoader("leaderboard.html"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    names = (
        "anchor", "breakable", "evidence_page", "interval", "lines_of", "number", "percent", "size", "slug", "source",
        "throttle", "times", "verdict",
    )  # fmt: skip
    env.filters |= {name: getattr(wording, name) for name in names}
    env.filters |= {"column_of": column_of, "quantiles": quantiles}
    env.globals |= {
        "report": report, "board": report.board, "GLYPHS": wording.GLYPHS, "MIN_EFFECT": MIN_EFFECT,
        "outcome": outcome, "receipts": receipts, "throttles": throttles, "versions": versions,
    }  # fmt: skip
    return env


def _overview(report: Report) -> dict:
    """Per device: the standings of each column and the two drawings."""
    devices, lines = [], report.board.lines()
    for number, device in enumerate(report.devices, 1):
        drawn = report.panels(device)
        panels = {
            size: {place[0]: report.shares(records) for place, records in places} for size, places in drawn.items()
        }
        devices.append(
            {
                "name": device,
                "unmeasured": unmeasured_text((x for x in lines if x.device == device), report.suite),
                "columns": {c: report.standings(c, device) for c in report.columns if report.of_floor(c, device)},
                "shares": plots.shares(f"shares-{number}", panels),
                "panels": panels,
                "forest": _forest(report, device, f"forest-{number}", {p for ps in drawn.values() for p, _ in ps}),
                "sessions": sorted({r.session for r in report.rows if r.device == device}),
            }
        )
    named = {o for r in report.rows for o in report.outcomes(r)}
    return {
        "devices": devices,
        "looks": plots.LOOKS,
        "sizes": [wording.size(s) for s in sorted({r.shape for r in report.rows})],
        "authors": sorted({r.author for r in report.rows} - set(report.columns)),
        "outcomes": sorted(named, key=lambda o: (o.split()[-1], o)),
        "estimates": estimate(lines),
    }


def _forest(report: Report, device: str, name: str, drawn: set[Place]) -> Markup | None:
    """The first column of kernels against the expert and the other authors, at the places that are drawn."""
    column = next(c for c in report.columns if report.of_floor(c, device))
    panels: dict[str, dict] = {}
    for other in ("expert", *(c for c in report.columns if c != column)):
        for record, ratio, partial in report.versus(column, other, device):
            role = other.lower() + ("_partial" if partial else "")
            if role in plots.LOOKS and (record.task, record.shape, device) in drawn:
                row = panels.setdefault(f"M = {record.shape[0]}", {}).setdefault(record.task, {})
                row[role] = (ratio.median, ratio.low, ratio.high) if ratio else (1.0, 1.0, 1.0)
    ordered = dict(sorted(panels.items(), key=lambda p: int(p[0].split()[-1])))
    return plots.forest(name, ordered, column, MIN_EFFECT) if panels else None


def _task(report: Report, task: str) -> dict:
    found = [(d, report.group(task, d)) for d in report.devices]
    return {
        "task": task,
        "looks": plots.LOOKS,
        "far": plots.FAR,
        "spec": report.suite.tasks.get(task),
        "rows": [r for r in report.rows if r.task == task],
        "devices": [_measured(report, task, n, device, group) for n, (device, group) in enumerate(found, 1) if group],
        "kernels": [(p, *report.source(p)) for p in report.kernels(task)],
        "expert": report.expert(task),
        "older": [r for rs in report.sessions.values() for r in rs if r.task == task and r not in report.rows],
    }


def _measured(report: Report, task: str, number: int, device: str, group: dict[tuple, dict[str, Record]]) -> dict:
    """The drawings of one task on one device and the numbers behind them."""
    samples: dict[tuple, dict[str, tuple[str, list[float]]]] = {}
    points, taxes, elsewhere = [], {}, []
    for shape, records in group.items():
        lead = leader(records)
        drawn = samples.setdefault(shape, {})
        for column, r in records.items():
            role = column.lower() if column.lower() in plots.LOOKS else "human"
            if r.session == lead.session:
                drawn[r.author] = (role, r.samples_us["total"])
            else:
                elsewhere.append(r)
            points.append((role, shape, r, r.flops / r.bytes, r.flops / r.total_us * 1e6))
            taxes.setdefault(role, []).append((shape, *relative_tax(r.samples_us["total"], r.samples_us["gemm"])))
        for name in report.baselines([lead]):
            drawn[name] = (report.role(lead, name), lead.samples_us[name])
            if name == "expert":
                role = report.role(lead, name)
                points.append((role, shape, lead, lead.flops / lead.bytes, lead.flops / lead.baselines[name].us * 1e6))
                taxes.setdefault(role, []).append((shape, *relative_tax(drawn[name][1], lead.samples_us["gemm"])))
    leads = [r for records in group.values() for r in records.values()]
    ceilings = sorted({(r.session, r.matmul_flops, r.copy_bytes) for r in leads})
    text = wording.size
    return {
        "name": device,
        "number": number,
        "samples": samples,
        "elsewhere": elsewhere,
        "points": points,
        "taxes": taxes,
        "ceilings": ceilings,
        "distribution": plots.distribution(f"distribution-{number}", {text(s): v for s, v in samples.items()}),
        "roofline": plots.roofline(
            f"roofline-{number}", [(role, text(s), x, y) for role, s, _, x, y in points], ceilings
        ),
        "tax": plots.tax(f"tax-{number}", {role: [(text(s), *t) for s, *t in ts] for role, ts in taxes.items()}),
    }
