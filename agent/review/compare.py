"""What a proposed kernel is held against: the nearest accepted kernel, its text, its times and its resources."""

from __future__ import annotations

import ast
import difflib
import math
import re
import statistics
from dataclasses import dataclass
from typing import Any, Literal

from generated.library import Library, LibraryError
from generated.passport import Passport
from leaderboard.board import quotient
from leaderboard.records import Interval
from reference_kernels.tasks import Task
from verifier.resources import spills

_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Base:
    """The kernel that the diff is made against; ``what`` says how it was found."""

    what: Literal["incumbent", "nearest", "nothing"]
    why: str
    passport: Passport | None = None
    source: str = ""


def speed(passport: Passport) -> float:
    """Geometric mean of the ratios to the bare GEMM over everything timed; 0 when nothing was."""
    ratios = [r["ratios"]["gemm"]["median"] for r in passport.timings]
    return statistics.geometric_mean(ratios) if ratios else 0.0


def base_of(passport: Passport, source: str, library: Library, passports: list[Passport]) -> Base:
    """The fastest accepted kernel of the same task, else the accepted kernel with the most similar program."""
    readable: list[tuple[Passport, str]] = []
    for p in passports:
        if p.state == "accepted" and (p.task, p.kernel) != (passport.task, passport.kernel):
            try:
                readable.append((p, library.source(p)))
            except LibraryError:
                continue  # its text is not the one that was accepted
    same = [found for found in readable if found[0].task == passport.task]
    if same:
        best, text = max(same, key=lambda found: (speed(found[0]), found[0].created))
        return Base("incumbent", "the incumbent: the accepted kernel of this task", best, text)
    if readable:
        share, best, text = max(((similarity(source, text), p, text) for p, text in readable), key=lambda x: x[0])
        why = f"the accepted program most like it, {share:.0%}; its own task has none accepted"
        return Base("nearest", why, best, text)
    return Base("nothing", "no kernel is accepted yet: every line is new")


def similarity(a: str, b: str) -> float:
    """How alike two kernel programs are, from 0 to 1, whatever their layout, comments and docstrings."""
    return difflib.SequenceMatcher(None, _tokens(a), _tokens(b), autojunk=False).ratio()


def _tokens(source: str) -> list[str]:
    try:
        functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    except SyntaxError:
        functions = []
    return _TOKEN.findall("\n".join(map(ast.unparse, functions)) or source)


# --- text -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One row of a diff; numbers count from 1, None where the side has no such line."""

    changed: bool
    before: int | None
    after: int | None


def aligned(before: str, after: str) -> list[Line]:
    """The two texts side by side, line by line."""
    a, b = before.splitlines(), after.splitlines()
    rows: list[Line] = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for k in range(max(i2 - i1, j2 - j1)):
            left, right = i1 + k + 1, j1 + k + 1
            rows.append(Line(tag != "equal", left if left <= i2 else None, right if right <= j2 else None))
    return rows


def unified(before: str, after: str, names: tuple[str, str]) -> list[str]:
    """A unified diff with the whole of both texts as context: kernels are short."""
    a, b = before.splitlines(), after.splitlines()
    return list(difflib.unified_diff(a, b, *names, n=max(len(a), len(b)), lineterm=""))


# --- times ----------------------------------------------------------------------------------------


def timing_rows(passport: Passport, base: Base, task: Task | None) -> list[dict[str, Any]]:
    """Every timed size with the ratio to each rival (median, low, high); above 1 the kernel is faster."""
    rivals = base.passport.timings if base.what == "incumbent" and base.passport else []
    rows = []
    for row in sorted(passport.timings, key=lambda r: (r["device"], math.prod(r["shape"]))):
        versus = {}
        rival = next((r for r in rivals if (r["device"], r["shape"]) == (row["device"], row["shape"])), None)
        if rival:
            versus["incumbent"] = {"us": rival["total_us"], **_through_gemm(row, rival)}
        for name in sorted(row["ratios"], key=_order):
            versus[name] = {**_interval(row["ratios"][name]), **_baseline(row, name, task)}
        kept = ("device", "shape", "config", "session")
        numbers = ("total_us", "finish_us", "tax_us", "share_of_floor")
        rows.append(
            {**{k: row.get(k) for k in (*kept, *numbers)}, "versus": versus, "left_out": row.get("left_out", {})}
        )
    return rows


def _order(name: str) -> tuple[int, str]:
    known = ("torch.compile", "expert", "gemm", "torch.compile:max-autotune", "liger")
    return (known.index(name) if name in known else len(known) - 1, name)


def _interval(ratio: dict) -> dict[str, float]:
    middle = ratio["median"]
    return {"median": middle, "low": ratio.get("low", middle), "high": ratio.get("high", middle)}


def _baseline(row: dict, name: str, task: Task | None) -> dict[str, Any]:
    """Time, version and scope of a baseline; older rows keep the time in other fields."""
    told = row.get("baselines", {}).get(name, {})
    older = row.get(f"{name}_us", row.get("baseline_us", {}).get(name))
    covers = told.get("covers", row["ratios"][name].get("covers"))
    partial = covers is not None and task is not None and not set(task.outputs) <= set(covers)
    return {"us": told.get("us", older), "version": told.get("version"), "partial": partial}


def _through_gemm(row: dict, rival: dict) -> dict[str, Any]:
    """A kernel against another by way of the bare GEMM that both were timed with, in rounds of their own."""
    digest = row.get("object_sha256")
    if digest and digest == rival.get("object_sha256"):
        return {"median": 1.0, "low": 1.0, "high": 1.0, "same_code": True}
    mine, its = (Interval(**_interval(r["ratios"]["gemm"])) for r in (row, rival))
    return {**quotient(mine, its).model_dump(), "same_code": False}


# --- resources ------------------------------------------------------------------------------------


def used(passport: Passport | None) -> dict[str, int]:
    """Registers, spills, shared memory, instruction counts of the checked object (128x128 tile); empty if unknown."""
    verdicts = passport.check if passport else []
    told = next((v.get("evidence", {}) for v in verdicts if v["stage"] == "resources"), {})
    if "registers" not in told:
        return {}
    counts = told.get("counts", {})
    first = {"registers": told["registers"], "spills": spills(counts), "stack bytes": told["stack_bytes"]}
    shared = {"shared bytes": told["shared_bytes"]} if "shared_bytes" in told else {}
    rest = {n: c for n, c in counts.items() if n not in ("STL", "LDL")}
    return {**first, **shared, "instructions": told["instructions"], **rest}


def resources(before: Passport | None, after: Passport) -> dict[str, dict[str, int | None]]:
    """Resource -> before and after; None where one side is unknown."""
    old, new = used(before), used(after)
    return {
        n: {"before": old.get(n, 0) if old else None, "after": new.get(n, 0) if new else None} for n in {**new, **old}
    }
