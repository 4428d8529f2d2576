"""The board: results that have their evidence, side by side per task, size, device and session.

Within a session kernels and baselines were timed in turns, so their samples are paired
round by round. Sessions meet only through the bare GEMM, never by absolute time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic_core import to_jsonable_python

from generated.library import Library
from generated.passport import Passport
from reference_kernels.tasks import Suite
from verifier import measure

from .records import Interval, Record, ResultsError, load, results_file, shown

KERNELS = ("composer", "LLM", "human")  # columns of authors; every other column is a baseline
COLUMNS = (
    *KERNELS, "expert", "gemm", "torch.compile", "torch.compile:max-autotune", "eager",
    "liger", "flashinfer", "coda",
)  # fmt: skip
Shape = tuple[int, int, int]


def column_of(author: str) -> str:
    """The column an author's kernels are shown in: an author that is neither built in nor a person is a model."""
    kind = author.partition(":")[0]
    return kind if kind in ("composer", "human", "expert", "scripted") else "LLM"


def is_author(author: str, name: str) -> bool:
    """Whether ``name`` means this author: itself (``claude:opus``), its kind (``claude``) or its column (``LLM``)."""
    return name in (author, author.partition(":")[0], column_of(author))


def size_text(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True)
class Spread:
    """A geometric mean of ratios and how far they lie apart; ``sd`` is a factor, 1 for no spread."""

    mean: float
    sd: float
    low: float  # the smallest
    high: float  # the largest
    n: int

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Spread | None:
        """None for no ratios; the standard deviation is the sample's (n - 1), 1.0 for a single ratio."""
        logs = [math.log(r) for r in ratios]
        if not logs:
            return None
        sd = statistics.stdev(logs) if len(logs) > 1 else 0.0
        return cls(math.exp(statistics.fmean(logs)), math.exp(sd), math.exp(min(logs)), math.exp(max(logs)), len(logs))


def quotient(a: Interval, b: Interval) -> Interval:
    """Interval of ``a / b`` for ratios from different runs.

    Distances from the medians are added in quadrature, in logarithms and each side by
    itself (the MOVER method, Zou and Donner 2008): the medians are independent.
    """
    log = {n: (math.log(i.low), math.log(i.median), math.log(i.high)) for n, i in (("a", a), ("b", b))}
    (al, am, ah), (bl, bm, bh) = log["a"], log["b"]
    low, high = math.hypot(am - al, bh - bm), math.hypot(ah - am, bm - bl)
    return Interval(median=math.exp(am - bm), low=math.exp(am - bm - low), high=math.exp(am - bm + high))


@dataclass(frozen=True)
class Cell:
    """One column of a line. ``ratio``: how many times faster the line's lead kernel is."""

    us: float
    ratio: Interval | None
    record: Record | None = None  # a kernel's; None for a baseline
    version: str | None = None
    covers: tuple[str, ...] | None = None  # the outputs it computes when that is not all of the task's
    config: str | None = None
    same_code_as: str | None = None  # the lead's author, when the machine code is the lead's
    is_lead: bool = False
    paired: bool = True  # timed in turns with the lead; else compared through the bare GEMM


@dataclass(frozen=True)
class Line:
    """One task at one size on one device in one session. Times in microseconds."""

    task: str
    shape: Shape
    device: str
    session: str
    lead: Record  # the fastest shown kernel, by its ratio to the bare GEMM
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        return ordered(self.cells)

    @property
    def size(self) -> str:
        return size_text(self.shape)

    @property
    def us(self) -> float:
        return self.lead.total_us

    @property
    def tax_us(self) -> float:
        return self.lead.tax_us

    @property
    def share_of_floor(self) -> float:
        return self.lead.share_of_floor

    @property
    def finish_us(self) -> float:
        return self.lead.finish_us

    @property
    def measured(self) -> str:
        return self.lead.measured

    @property
    def left_out(self) -> dict[str, str]:
        """Baselines that were not timed, and why."""
        return self.lead.left_out

    def as_dict(self) -> dict:
        """Everything but the samples; those are in the results file."""
        kernel = ("kernel", "author", "object_sha256", "source_sha256")
        cells = {
            name: {
                **to_jsonable_python({f: v for f, v in vars(cell).items() if f != "record"}),
                **({f: getattr(cell.record, f) for f in kernel} if cell.record else {}),
            }
            for name, cell in self.cells.items()
        }
        lead = {f: getattr(self.lead, f) for f in (*kernel, "config", "commit", "command", "environment", "receipt")}
        facts = ("task", "size", "device", "session", "measured", "us", "finish_us", "tax_us", "share_of_floor")
        return {**{f: getattr(self, f) for f in facts}, "lead": lead, "cells": cells, "left_out": self.left_out}


@dataclass(frozen=True)
class Filter:
    """What to show; an empty field means all. Sessions: empty for the newest of each task, size and device."""

    tasks: Sequence[str] = ()
    sizes: Sequence[str] = ()  # "4096" (M) or "4096x12288x4096"
    devices: Sequence[str] = ()  # part of the name
    authors: Sequence[str] = ()  # claude:opus, claude, LLM
    sessions: Sequence[str] = ()  # id or its beginning; "all"


@dataclass(frozen=True)
class Pair:
    """Two authors in one session, or two sessions of one kernel. ``ratio``: how many times faster the first is."""

    task: str
    shape: Shape
    device: str
    sessions: tuple[str, str]
    us: tuple[float, float]
    ratio: Interval | None  # None for authors whose machine code is the same: it was timed once
    same_code: bool
    paired: bool


@dataclass(frozen=True)
class Comparison:
    """Pairs of ``a`` and ``b``. ``geomean``: over the pairs with a ratio."""

    a: str
    b: str
    pairs: list[Pair]

    @property
    def geomean(self) -> Spread | None:
        return Spread.of(p.ratio.median for p in self.pairs if p.ratio)

    @property
    def same(self) -> int:
        return sum(p.same_code for p in self.pairs)

    def as_dict(self) -> dict:
        return {**to_jsonable_python(self), "geomean": to_jsonable_python(self.geomean), "same_code": self.same}


class Board:
    """Results with evidence, and what is hidden.

    Args:
        records: shown results.
        passports: of the library the results are about.
        problems: passports that cannot be read.
        hidden: results without evidence, with the reason.
    """

    def __init__(
        self,
        records: list[Record],
        passports: list[Passport] = (),
        problems: list[str] = (),
        hidden: list[tuple[Record, str]] = (),
    ):
        self.records, self.problems, self.hidden = records, list(problems), list(hidden)
        self.passports = {(p.task, p.kernel): p for p in passports}

    # --- lines ---

    def lines(self, filter: Filter = Filter()) -> list[Line]:
        """One line per task, size, device and chosen session, by task and size.

        Raises:
            ResultsError: a filter value that matches nothing there is (a misspelt name is no empty table).
        """
        lines = [self._line(group) for group in self._groups(filter)]
        return sorted(lines, key=lambda x: (x.device, x.task, x.shape, x.measured, x.session))

    def _chosen(self, filter: Filter) -> list[Record]:
        """Records that pass every filter but that of sessions."""
        tests: dict[str, tuple[Sequence[str], Callable[[Record, str], bool], Callable[[Record], str]]] = {
            "task": (filter.tasks, lambda r, v: r.task == v, lambda r: r.task),
            "size": (filter.sizes, lambda r, v: v in (str(r.shape[0]), _size(r)), _size),
            "device": (filter.devices, lambda r, v: v.lower() in r.device.lower(), lambda r: r.device),
            "author": (filter.authors, lambda r, v: is_author(r.author, v), lambda r: r.author),
        }  # fmt: skip
        chosen = self.records
        for what, (values, test, name) in tests.items():
            for v in values:
                if self.records and not any(test(r, v) for r in self.records):
                    have = ", ".join(sorted({name(r) for r in self.records}))
                    raise ResultsError(f"no result has {what} {v!r}; there is: {have}")
            chosen = [r for r in chosen if not values or any(test(r, v) for v in values)]
        return chosen

    def session(self, name: str) -> str:
        """The session with this id or beginning of one.

        Raises:
            ResultsError: none, or several.
        """
        known = sorted({r.session for r in self.records})
        found = [s for s in known if s == name] or [s for s in known if s.startswith(name)]
        if len(found) != 1:
            raise ResultsError(f"{name!r} names {len(found)} sessions; there is: {', '.join(known) or 'none'}")
        return found[0]

    def _groups(
        self, filter: Filter, wanted: Callable[[list[Record]], bool] = lambda group: True
    ) -> list[list[Record]]:
        """Records of one task, size, device and session together; by default of the newest session that is wanted."""
        groups: dict[tuple, list[Record]] = {}
        for r in self._chosen(filter):
            groups.setdefault((r.task, r.shape, r.device, r.session), []).append(r)
        groups = {key: group for key, group in groups.items() if wanted(group)}
        if "all" in filter.sessions:
            return list(groups.values())
        if filter.sessions:
            named = {self.session(s) for s in filter.sessions}
            return [group for key, group in groups.items() if key[-1] in named]
        newest: dict[tuple, list[Record]] = {}
        for key, group in groups.items():
            before = newest.get(key[:-1])
            if before is None or _when(group) > _when(before):
                newest[key[:-1]] = group
        return list(newest.values())

    def _line(self, group: list[Record]) -> Line:
        lead = _fastest(group)
        cells: dict[str, Cell] = {}
        for column in {column_of(r.author) for r in group}:
            r = (
                lead
                if column == column_of(lead.author)
                else _fastest([r for r in group if column_of(r.author) == column])
            )
            same = r is not lead and _same_code(r, lead)
            found, paired = _versus((lead, lead.samples_us["total"]), (r, r.samples_us["total"]))
            one = r is lead or same
            cells[column] = Cell(
                r.total_us, Interval(median=1, low=1, high=1) if one else found, r, config=r.config,
                same_code_as=lead.author if same else None, is_lead=r is lead, paired=one or paired,
            )  # fmt: skip
        for name, b in lead.baselines.items():
            cells[name] = Cell(b.us, b.ratio, None, b.version, self._partial(lead, b.covers), b.config)
        return Line(lead.task, lead.shape, lead.device, lead.session, lead, {c: cells[c] for c in ordered(cells)})

    def _partial(self, record: Record, covers: list[str] | None) -> tuple[str, ...] | None:
        """The outputs a baseline computes, or None when they are all that the kernel was checked for."""
        if covers is None:
            return None
        passport = self.passports.get((record.task, record.kernel))
        checked = {o for v in passport.measure for o in v["evidence"].get("worst", {})} if passport else set()
        return None if checked and checked <= set(covers) else tuple(covers)

    @staticmethod
    def sorted(lines: list[Line], key: str = "task") -> list[Line]:
        """Lines by a column's ratio, ``us``, ``finish``, ``tax``, ``floor``, ``size``, ``measured`` or ``task``.

        Largest first for numbers, lines without the column last; ``-KEY`` turns the order round.

        Raises:
            ResultsError: no such key.
        """
        reverse, name = key.startswith("-"), key.removeprefix("-")
        text = {
            "task": lambda x: (x.task, x.shape, x.device),
            "size": lambda x: x.shape,
            "measured": lambda x: x.measured,
        }
        number = {
            "us": lambda x: x.us,
            "finish": lambda x: x.finish_us,
            "tax": lambda x: x.tax_us,
            "floor": lambda x: x.share_of_floor,
        }
        if name in text:
            return sorted(lines, key=text[name], reverse=reverse)
        columns = ordered({c for x in lines for c in x.cells} | set(COLUMNS))
        if name not in number and name not in columns:
            raise ResultsError(f"cannot sort by {name!r}; there is: {', '.join((*text, *number, *columns))}")

        def value(x: Line) -> float | None:
            cell = x.cells.get(name)
            return number[name](x) if name in number else cell and cell.ratio and cell.ratio.median

        have = sorted((x for x in lines if value(x) is not None), key=value, reverse=not reverse)
        return have + [x for x in lines if value(x) is None]

    @staticmethod
    def geomeans(lines: list[Line]) -> dict[str, Spread]:
        """Per column: how many times faster the lead kernels are; a lead and its very code count as 1."""
        found = {
            c: Spread.of(x.cells[c].ratio.median for x in lines if c in x.cells and x.cells[c].ratio)
            for c in ordered({c for x in lines for c in x.cells})
        }
        return {c: s for c, s in found.items() if s}

    def as_dict(self, lines: list[Line]) -> dict:
        """Lines with their geometric means, and what is hidden with the reasons."""
        hidden = [
            {"task": r.task, "kernel": r.kernel, "size": _size(r), "session": r.session, "reason": reason}
            for r, reason in self.hidden
        ]
        return {
            "lines": [x.as_dict() for x in lines],
            "geomeans": to_jsonable_python(self.geomeans(lines)),
            "hidden": hidden,
            "problems": self.problems,
        }

    # --- comparing ---

    def compare(self, a: str, b: str, filter: Filter = Filter()) -> Comparison:
        """Two authors or baselines, or else two sessions.

        Raises:
            ResultsError: a name that is none of them.
        """
        if all(any(_subject([r], name) for r in self.records) for name in (a, b)):
            return self.compare_authors(a, b, filter)
        if all(any(r.session.startswith(name) for r in self.records) for name in (a, b)):
            return self.compare_sessions(a, b, filter)
        return self.compare_authors(a, b, filter)  # says which name is unknown

    def compare_authors(self, a: str, b: str, filter: Filter = Filter()) -> Comparison:
        """Two authors or baselines, pair by pair within one session (the newest that has both).

        Raises:
            ResultsError: a name that no result knows.
        """
        for name in (a, b):
            if not any(_subject([r], name) for r in self.records):
                have = ordered({r.author for r in self.records} | {n for r in self.records for n in r.baselines})
                sessions = ", ".join(sorted({r.session for r in self.records})) or "none"
                raise ResultsError(
                    f"no author or baseline {name!r}; there is: {', '.join(have) or 'nothing'}; sessions: {sessions}"
                )
        both = Filter(filter.tasks, filter.sizes, filter.devices, (), filter.sessions)
        pairs = []
        for group in self._groups(both, lambda g: _subject(g, a) is not None and _subject(g, b) is not None):
            x, y = _subject(group, a), _subject(group, b)
            same = _is_kernel(x) and _is_kernel(y) and _same_code(x[0], y[0])
            found, paired = _versus(x, y)
            r = x[0]
            us = tuple(statistics.median(s) for _, s in (x, y))
            pairs.append(
                Pair(r.task, r.shape, r.device, (r.session, r.session), us, None if same else found, same, paired)
            )
        return Comparison(a, b, sorted(pairs, key=lambda p: (p.task, p.shape, p.device, p.sessions)))

    def compare_sessions(self, a: str, b: str, filter: Filter = Filter()) -> Comparison:
        """Two sessions, kernel by kernel: the first's ratio to its bare GEMM over the second's.

        Raises:
            ResultsError: a name that is no session.
        """
        a, b = self.session(a), self.session(b)
        known = {(r.task, r.shape, r.kernel, r.session): r for r in self._chosen(filter) if not r.same_object_as}
        pairs = []
        for (task, shape, kernel, session), x in known.items():
            y = known.get((task, shape, kernel, b))
            if session == a and y:
                found = quotient(x.baselines["gemm"].ratio, y.baselines["gemm"].ratio)
                device = x.device if x.device == y.device else f"{x.device}, {y.device}"
                same = x.object_sha256 == y.object_sha256
                pairs.append(Pair(task, shape, device, (a, b), (x.total_us, y.total_us), found, same, False))
        return Comparison(a, b, sorted(pairs, key=lambda p: (p.task, p.shape)))


def ordered(columns: Iterable[str]) -> list[str]:
    """Columns in their order; those that ``COLUMNS`` does not know come last, by name."""
    return sorted(columns, key=lambda c: (COLUMNS.index(c) if c in COLUMNS else len(COLUMNS), c))


def unmeasured(lines: Iterable[Line], suite: Suite) -> dict[str, list[Shape]]:
    """The suite's tasks -> those of their sizes that no line is about; tasks that have them all are left out."""
    have = {(x.task, x.shape) for x in lines}
    found = {t.name: [s for s in t.timed if (t.name, s) not in have] for t in suite.tasks.values()}
    return {task: shapes for task, shapes in found.items() if shapes}


def unmeasured_text(lines: Iterable[Line], suite: Suite, quote: str = "") -> str:
    """What of the suite is not measured, or an empty string; sizes are named where only some are missing."""
    missing = unmeasured(lines, suite)
    if not missing:
        return ""
    names = [
        f"{quote}{task}{quote}"
        + ("" if len(shapes) == len(suite.tasks[task].timed) else f" at {', '.join(map(size_text, shapes))}")
        for task, shapes in missing.items()
    ]
    return (
        f"Not measured with this protocol: {', '.join(names)} ({len(missing)} of the suite's {len(suite.tasks)} tasks)."
    )


def load_board(library: Path | None = None, results: Path | None = None) -> Board:
    """The board of a library's results file, or of another file.

    Raises:
        LibraryError: the file cannot be read or a line is not a record.
    """
    lib = Library(library)
    passports, problems = lib.scan()
    good, bad = shown(load(results or results_file(library)), lib)
    return Board(good, passports, problems, bad)


def _size(r: Record) -> str:
    return size_text(r.shape)


def _when(group: list[Record]) -> tuple[str, str]:
    return max((r.measured, r.session) for r in group)


def _fastest(group: list[Record]) -> Record:
    """By the ratio to the bare GEMM; of equals the first in the order of the columns."""
    rank = {c: i for i, c in enumerate(COLUMNS)}

    def order(r: Record) -> tuple:
        return (-r.baselines["gemm"].ratio.median, rank.get(column_of(r.author), len(rank)), r.author, r.kernel)

    return min(group, key=order)


def _same_code(a: Record, b: Record) -> bool:
    return a.object_sha256 == b.object_sha256


# a record and the samples of what it is asked about: its own kernel's, or one of its baselines'
_Subject = tuple[Record, list[float]]


def _subject(group: list[Record], name: str) -> _Subject | None:
    """What ``name`` means among records of one session: the fastest kernel of an author, or a baseline."""
    for r in group:
        if name in r.baselines:
            return r, r.samples_us[name]
    own = [r for r in group if is_author(r.author, name)]
    return (fastest, fastest.samples_us["total"]) if own and (fastest := _fastest(own)) else None


def _is_kernel(subject: _Subject) -> bool:
    return subject[1] is subject[0].samples_us["total"]


def _versus(a: _Subject, b: _Subject) -> tuple[Interval, bool]:
    """How many times faster ``a`` is, and whether the two were timed in turns.

    Records with the very same samples of the bare GEMM come from one run.
    """
    (x, mine), (y, other) = a, b
    if x.samples_us["gemm"] == y.samples_us["gemm"]:
        return Interval(**measure.ratio(other, mine)), True
    against = [Interval(**measure.ratio(r.samples_us["gemm"], s)) for r, s in (a, b)]
    return quotient(*against), False
