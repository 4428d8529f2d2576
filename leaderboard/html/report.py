"""What the pages say, computed from the board: rows, summaries, sessions. No markup here."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from generated.library import Library, LibraryError
from generated.passport import Passport
from reference_kernels.expert import EXPERTS
from reference_kernels.tasks import Suite

from ..board import KERNELS, Board, Filter, Spread, column_of, ordered
from ..records import Interval, Record
from .wording import VERDICTS, verdict

COMPILED = ("torch.compile", "torch.compile:max-autotune")
NOT_LIBRARIES = ("gemm", "expert", "eager", *COMPILED)
Place = tuple[str, tuple[int, int, int], str]  # task, M x N x K, device


def outcome(other: str, verdict: str, partial: bool = False) -> str:
    word = {"faster": "than", "slower": "than", "level": "with", "unclear": "against", "same code": "as"}[verdict]
    return f"{verdict} {word} {other}{' (some outputs)' if partial else ''}"


def newest(records: Iterable[Record]) -> list[Record]:
    """Those of the newest session among them."""
    found = sorted(records, key=lambda r: (r.measured, r.session))
    return [r for r in found if r.session == found[-1].session]


def fastest(records: Iterable[Record]) -> Record:
    """By the ratio to the bare GEMM: absolute times do not cross sessions."""
    return min(records, key=lambda r: (-r.baselines["gemm"].ratio.median, r.author, r.kernel))


def leader(records: dict[str, Record]) -> Record:
    """Of the columns' kernels at one place the fastest in the newest session; baselines are taken from its record."""
    return fastest(newest(records.values()))


@dataclass(frozen=True)
class Standing:
    """One column of kernels against one other column, over all tasks and sizes of a device."""

    other: str
    partial: bool  # the other computes only some of the outputs
    spread: Spread | None  # over the pairs that were timed; None when all are the same code
    counts: dict[str, int]  # verdict -> pairs

    @property
    def pairs(self) -> int:
        return sum(self.counts.values())


@dataclass
class Report:
    """The board as the report needs it."""

    board: Board
    library: Library
    suite: Suite

    # --- rows ---

    @cached_property
    def rows(self) -> list[Record]:
        """Every kernel at every size and device, from its newest session."""
        groups: dict[tuple, list[Record]] = {}
        for r in self.board.records:
            groups.setdefault((r.task, r.shape, r.device, r.kernel), []).append(r)
        rank = {c: n for n, c in enumerate(KERNELS)}
        found = [newest(group)[-1] for group in groups.values()]
        return sorted(found, key=lambda r: (r.device, r.task, r.shape, rank.get(column_of(r.author), 9), r.kernel))

    @cached_property
    def leading(self) -> dict[tuple[Place, str], Record]:
        """(place, column of kernels) -> the column's fastest kernel in its newest session there."""
        groups: dict[tuple[Place, str], list[Record]] = {}
        for r in self.board.records:
            groups.setdefault(((r.task, r.shape, r.device), column_of(r.author)), []).append(r)
        return {key: fastest(newest(group)) for key, group in sorted(groups.items())}

    @property
    def devices(self) -> list[str]:
        return sorted({r.device for r in self.board.records})

    @property
    def tasks(self) -> list[str]:
        """Tasks with results, in the suite's order; those the suite does not know come last."""
        known = list(self.suite.tasks)
        found = {r.task for r in self.board.records}
        return [t for t in known if t in found] + sorted(found - set(known))

    @property
    def unmeasured(self) -> list[str]:
        return [t for t in self.suite.tasks if t not in self.tasks]

    def baselines(self, records: Iterable[Record]) -> list[str]:
        return ordered({name for r in records for name in r.baselines})

    def partial(self, record: Record, name: str) -> tuple[str, ...] | None:
        """The outputs that a baseline computes when they are not all of the task's."""
        covers = record.baselines[name].covers
        task = self.suite.tasks.get(record.task)
        outputs = set(task.outputs) if task else self._checked(record)
        return None if covers is None or outputs and outputs <= set(covers) else tuple(covers)

    def _checked(self, record: Record) -> set[str]:
        passport = self.passport(record)
        return {o for v in passport.measure for o in v["evidence"].get("worst", {})} if passport else set()

    def passport(self, record: Record) -> Passport | None:
        return self.board.passports.get((record.task, record.kernel))

    # --- how columns stand against each other ---

    @property
    def columns(self) -> list[str]:
        """Columns of kernels that have results; the LLM's first, for it is what readers come for."""
        found = {column for _, column in self.leading}
        return [c for c in ("LLM", "human", "composer") if c in found] + sorted(found - set(KERNELS))

    def versus(self, column: str, other: str, device: str) -> list[tuple[Record, Interval | None, bool]]:
        """(record of ``column``, ratio to ``other``, other computes only some outputs); no ratio: the same code."""
        if other in self.columns:
            pairs = {(p.task, p.shape, p.device): p for p in self.board.compare_authors(column, other, Filter()).pairs}
            return [
                (r, None if pairs[place].same_code else pairs[place].ratio, False)
                for (place, c), r in self.leading.items()
                if c == column and place[2] == device and place in pairs
            ]
        return [
            (r, r.baselines[other].ratio, self.partial(r, other) is not None)
            for (place, c), r in self.leading.items()
            if c == column and place[2] == device and other in r.baselines
        ]

    @cached_property
    def ratios(self) -> dict[tuple, dict[str, tuple[Interval | None, bool]]]:
        """Row's key -> other column -> (ratio, only some outputs); for rows that lead their column."""
        found: dict[tuple, dict[str, tuple[Interval | None, bool]]] = {}
        for device in self.devices:
            for column in self.columns:
                for other in (*self.columns, *self.baselines(self.rows)):
                    if other != column:
                        for r, ratio, partial in self.versus(column, other, device):
                            found.setdefault(r.key, {})[other] = (ratio, partial)
        return found

    def outcomes(self, record: Record) -> list[str]:
        """Every comparison of a row as the filter names it: ``faster than gemm``."""
        return [
            outcome(other, "same code" if ratio is None else verdict(ratio), partial)
            for other, (ratio, partial) in self.ratios.get(record.key, {}).items()
        ]

    def standings(self, column: str, device: str) -> list[Standing]:
        """A column against every other; a baseline that computes only some outputs is kept apart."""
        own = [r for (place, c), r in self.leading.items() if c == column and place[2] == device]
        timed = [b for b in self.baselines(own) if b != "expert"]
        others = ["expert", *(c for c in self.columns if c != column), *timed]
        found = []
        for other in others:
            compared = self.versus(column, other, device)
            for some in (False, True):
                ratios = [ratio for _, ratio, partial in compared if partial == some]
                if ratios:
                    counts = Counter("same code" if r is None else verdict(r) for r in ratios)
                    found.append(
                        Standing(
                            other, some, Spread.of(r.median for r in ratios if r),
                            {v: counts[v] for v in VERDICTS if counts[v]},
                        )
                    )  # fmt: skip
        return found

    def standing(self, column: str, other: str, device: str) -> Standing | None:
        """The one over pairs that do the same work."""
        return next((s for s in self.standings(column, device) if s.other == other and not s.partial), None)

    def of_floor(self, column: str, device: str) -> Spread | None:
        return Spread.of(r.share_of_floor for (p, c), r in self.leading.items() if c == column and p[2] == device)

    # --- what the drawings show ---

    def panels(self, device: str) -> dict[str, list[tuple[Place, dict[str, Record]]]]:
        """Size class (M) -> places, each with the leading kernel of every column.

        A task has one place per M: the suite's size, where that was measured.
        """
        found: dict[int, dict[str, dict[Place, dict[str, Record]]]] = {}
        for (place, column), r in self.leading.items():
            if place[2] == device:
                found.setdefault(place[1][0], {}).setdefault(place[0], {}).setdefault(place, {})[column] = r
        own = self.suite.timed
        return {
            f"M = {m}": [min(places.items(), key=lambda p: (p[0][:2] not in own, p[0])) for places in found[m].values()]
            for m in sorted(found)
        }

    def shares(self, records: dict[str, Record]) -> dict[str, float]:
        """Role -> share of the floor, the fold included; baselines as timed with the fastest of the kernels."""
        found = {c.lower(): r.floor_us / r.total_us for c, r in records.items() if c in KERNELS}
        lead = leader(records)
        for name, b in lead.baselines.items():
            role = self.role(lead, name)
            found[role] = max(lead.floor_us / b.us, found.get(role, 0.0))
        return found

    def role(self, record: Record, name: str) -> str:
        """How a baseline is drawn."""
        if name in COMPILED:
            return "compile"
        partial = self.partial(record, name) is not None
        if name == "expert":
            return "expert_partial" if partial else "expert"
        if name in NOT_LIBRARIES:
            return name
        return "library_partial" if partial else "library"

    def group(self, task: str, device: str) -> dict[tuple[int, int, int], dict[str, Record]]:
        """Size -> column -> leading kernel, of one task."""
        found: dict[tuple[int, int, int], dict[str, Record]] = {}
        for (place, column), r in self.leading.items():
            if (place[0], place[2]) == (task, device):
                found.setdefault(place[1], {})[column] = r
        return found

    # --- sessions and conditions ---

    @cached_property
    def sessions(self) -> dict[str, list[Record]]:
        """Session -> its shown records, oldest session first."""
        found: dict[str, list[Record]] = {}
        for r in sorted(self.board.records, key=lambda r: (r.measured, r.session)):
            found.setdefault(r.session, []).append(r)
        return {s: sorted(rs, key=lambda r: (r.task, r.shape, r.kernel)) for s, rs in found.items()}

    def twin(self, record: Record) -> Record | None:
        """The record whose samples these are: identical machine code is timed once."""
        if not record.same_object_as:
            return None
        same = (r for r in self.sessions[record.session] if r.author == record.same_object_as)
        return next((r for r in same if r.task == record.task and r.samples_us == record.samples_us), None)

    @property
    def left_out(self) -> list[tuple[str, str, list[str]]]:
        """(baseline, reason, places where it is missing for it)."""
        found: dict[tuple[str, str], list[str]] = {}
        for r in self.rows:
            for name, reason in r.left_out.items():
                where = found.setdefault((name, reason), [])
                if r.task not in where:
                    where.append(r.task)
        return [(*key, where) for key, where in sorted(found.items())]

    def repeats(self) -> list[tuple[str, str, Spread]]:
        """Pairs of sessions that measured the same kernels: the newest against each older one."""
        found = []
        *older, last = [*self.sessions] or [None]
        for session in older:
            spread = self.board.compare_sessions(last, session).geomean
            if spread:
                found.append((last, session, spread))
        return found

    # --- kernels ---

    def kernels(self, task: str) -> list[Passport]:
        rank = {c: n for n, c in enumerate(("LLM", "human", "composer"))}
        found = [p for p in self.board.passports.values() if p.task == task]
        return sorted(found, key=lambda p: (rank.get(column_of(p.author), 9), p.kernel))

    def source(self, passport: Passport) -> tuple[str, str]:
        """The kernel's text, or why it cannot be shown."""
        try:
            return self.library.source(passport), ""
        except LibraryError as e:
            return "", str(e)

    def expert(self, task: str) -> str | None:
        """Where the expert kernel stands in quack."""
        return f"quack.epilogue.{EXPERTS[task].epilogue.replace(':', '.')}" if task in EXPERTS else None


def receipts(records: Iterable[Record]) -> dict[str, tuple[float, float]]:
    """Reading -> its range over the receipts of a session."""
    found: dict[str, list[float]] = {}
    for r in records:
        for moment in ("before", "after"):
            for name, value in r.receipt[moment].items():
                if isinstance(value, (int, float)):
                    found.setdefault(name, []).append(value)
    return {name: (min(v), max(v)) for name, v in sorted(found.items())}


def throttles(records: Iterable[Record]) -> Counter[str | None]:
    """Throttle reading -> in how many of the receipts' two moments it was seen."""
    return Counter(r.receipt[moment].get("throttle") for r in records for moment in ("before", "after"))


def versions(records: Iterable[Record]) -> list[str]:
    """Baselines that say which version they are."""
    return sorted({f"{name}: {b.version}" for r in records for name, b in r.baselines.items() if b.version})


def quantiles(samples: list[float]) -> tuple[float, float, float, float, float]:
    """Smallest, lower quartile, median, upper quartile, largest."""
    low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return min(samples), low, middle, high, max(samples)


def relative_tax(kernel: list[float], gemm: list[float]) -> tuple[float, float, float]:
    """(kernel - GEMM) / GEMM of paired rounds: median, lower and upper quartile."""
    _, low, middle, high, _ = quantiles([k / g - 1 for k, g in zip(kernel, gemm, strict=True)])
    return middle, low, high
