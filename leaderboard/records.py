"""Results as JSON lines: one record per kernel, size, device and session; written once, never edited.

Everything the leaderboard shows comes from these records; a record without its
evidence is not shown as a result (``evidence``).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from generated.library import DEFAULT as DEFAULT_LIBRARY
from generated.library import Library, LibraryError, write_atomically
from generated.passport import Passport, now
from verifier import measure

DEFAULT = Path(__file__).resolve().parent / "results.jsonl"
ROUNDING = 2e-3  # samples keep four digits: what follows from them agrees with the record to this factor


class ResultsError(LibraryError):
    """The results cannot be read or written; the message says what to do."""


class Interval(BaseModel):
    """A median of paired ratios with its 95 % interval."""

    model_config = ConfigDict(extra="forbid")
    median: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat


class Baseline(BaseModel):
    """What a kernel was timed against, in the same session on the same inputs."""

    model_config = ConfigDict(extra="forbid")
    us: PositiveFloat  # median over rounds
    ratio: Interval  # how many times faster the kernel is
    version: str | None = None
    covers: list[str] | None = None  # the outputs it computes; None: all of the task's
    config: str | None = None


class Record(BaseModel):
    """One kernel at one size, measured in one session. Times in microseconds, medians over rounds."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    task: str
    kernel: str  # id in the library
    author: str
    source_sha256: str
    object_sha256: str
    same_object_as: str | None = None  # author whose identical machine code was timed in its place
    shape: tuple[PositiveInt, PositiveInt, PositiveInt]  # M, N, K
    act: str
    config: str
    finalists: dict[str, float] = {}  # configuration -> total µs in the final round
    device: str
    environment: dict[str, Any]  # driver, cuda, torch, nvidia-cutlass-dsl, quack-kernels, ...
    session: str
    measured: str = Field(default_factory=now)  # UTC
    commit: str | None  # of the harness that compiled it
    command: str
    kernel_us: PositiveFloat
    total_us: PositiveFloat  # with the fold of partial reductions
    finish_us: float
    iqr_us: float = Field(ge=0)
    tax_us: float  # kernel minus the bare GEMM
    floor_us: PositiveFloat
    share_of_floor: PositiveFloat
    flops: PositiveFloat
    bytes: PositiveFloat
    matmul_flops: PositiveFloat  # measured FLOP/s behind the floor
    copy_bytes: PositiveFloat  # measured bytes/s behind the floor
    baselines: dict[str, Baseline]  # "gemm" always; "expert", "torch.compile", "liger", ...
    left_out: dict[str, str] = {}  # baseline -> why it was not timed
    samples_us: dict[str, list[float]]  # per round: "kernel", "total" and every baseline
    rounds: PositiveInt
    wall_over_events: PositiveFloat
    receipt: dict[str, Any]  # clocks, power, temperature, throttle reasons before and after
    numerics: str  # reason of the numerics verdict of the same session

    @property
    def key(self) -> tuple:
        """Identity: the same kernel, size, device and session."""
        return (self.task, self.kernel, self.shape, self.device, self.session)


def record(row: dict, passport: Passport, *, session: dict, commit: str | None, command: str) -> Record:
    """The record of one timed row of ``verifier.measure``.

    Args:
        row: a row of ``Measurement.rows``.
        passport: the kernel's, with the verdicts of this session.
        session: ``{"device": facts, "ceilings": rates}``.
    """
    baselines = {n: {**b, "ratio": row["ratios"][n]} for n, b in row["baselines"].items()}
    numerics = next(v["reason"] for v in passport.measure if v["stage"] == "numerics" and v["passed"])
    taken = Record.model_fields.keys() & row.keys() - {"baselines", "device"}
    facts = session["device"]
    return Record(
        **{f: row[f] for f in taken},
        kernel=passport.kernel,
        author=passport.author,
        source_sha256=passport.source_sha256,
        device=facts["device"],
        # the torch that counts is the one on the GPU machine
        environment={**passport.toolchain, **{k: v for k, v in facts.items() if k != "device"}},
        commit=commit,
        command=command,
        matmul_flops=session["ceilings"]["matmul_flops"],
        copy_bytes=session["ceilings"]["copy_bytes"],
        baselines=baselines,
        numerics=numerics,
    )


def results_file(library: Path | None) -> Path:
    """Where the results of a library are kept: the repository's own, or beside a library of your own."""
    return DEFAULT if library is None or library.resolve() == DEFAULT_LIBRARY else library / "results.jsonl"


def append(path: Path, records: Iterable[Record]) -> None:
    """Add records at the end, all lines or none; a record that is already there is not added again.

    Raises:
        ResultsError: the file cannot be written, or holds what is not a record.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=30):
            known = {r.key for r in load(path)}
            text = path.read_bytes().decode() if known else ""
            lines = [text] if not text or text.endswith("\n") else [text, "\n"]
            for r in records:
                if r.key not in known:
                    known.add(r.key)
                    lines.append(r.model_dump_json() + "\n")
            if lines != [text]:
                write_atomically(path, "".join(lines))
    except OSError as e:  # FileLock's Timeout is one too
        raise ResultsError(f"cannot write results to {path}: {e.strerror or e}") from e


def load(path: Path = DEFAULT) -> list[Record]:
    """Every record of a file, in order; none when there is no file.

    Raises:
        ResultsError: a line is not a valid record; the message names file and line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as e:
        raise ResultsError(f"cannot read results from {path}: {e.strerror}") from e
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(Record.model_validate_json(line))
        except (ValidationError, ValueError) as e:
            problem = "; ".join(str(e).splitlines()[1:3]) if isinstance(e, ValidationError) else str(e)
            raise ResultsError(f"{path}, line {number} is not a valid record ({problem}); mend or delete it") from e
    return records


def evidence(record: Record, library: Library, passports: dict[tuple[str, str], Passport]) -> str:
    """Why a record is not shown as a result, or an empty string.

    Args:
        passports: ``(task, kernel)`` to passport, of ``library``.
    """
    passport = passports.get((record.task, record.kernel))
    if passport is None:
        return "its kernel is not in the library"
    if passport.source_sha256 != record.source_sha256:
        return "its kernel's text is not the one that was measured"
    try:
        library.source(passport)
    except LibraryError as e:
        return str(e)
    if any(not v["passed"] for v in passport.measure):
        return "its kernel failed a later measurement"
    if passport.state == "rejected":
        return f"its kernel was rejected by {passport.reviewer}: {passport.review}"
    readings = [record.receipt.get(when) or {} for when in ("before", "after")]
    if any(r.get(what) is None for r in readings for what in ("sm_clock_mhz", "power_w", "temperature_c")):
        return "it has no receipt of clocks, power and temperature; measure where nvidia-ml-py is installed"
    return _unproven(record)


def _unproven(r: Record) -> str:
    """Which of a record's numbers do not follow from its samples and rates, or an empty string."""
    needed = {"kernel", "total", "gemm", *r.baselines}
    whole = r.samples_us.keys() == needed and all(len(s) == r.rounds for s in r.samples_us.values())
    if not whole or "gemm" not in r.baselines:
        return "its samples are incomplete"
    kernel, total, gemm = (r.samples_us[n] for n in ("kernel", "total", "gemm"))
    # name -> (stated, what follows, how large the numbers it was made from are)
    follow: dict[str, tuple[float, float, float]] = {
        "kernel_us": (r.kernel_us, statistics.median(kernel), r.kernel_us),
        "total_us": (r.total_us, statistics.median(total), r.total_us),
        "finish_us": (r.finish_us, statistics.median(t - k for t, k in zip(total, kernel)), r.total_us),
        "tax_us": (r.tax_us, statistics.median(k - g for k, g in zip(kernel, gemm)), r.total_us),
        "floor_us": (r.floor_us, 1e6 * max(r.flops / r.matmul_flops, r.bytes / r.copy_bytes), r.floor_us),
        "share_of_floor": (r.share_of_floor, r.floor_us / r.kernel_us, r.share_of_floor),
    }
    for name, b in r.baselines.items():
        follow[f"time of {name}"] = (b.us, statistics.median(r.samples_us[name]), b.us)
        for part, value in measure.ratio(r.samples_us[name], total).items():
            follow[f"ratio to {name} ({part})"] = (getattr(b.ratio, part), value, value)
    for name, (stated, value, scale) in follow.items():
        if abs(stated - value) > ROUNDING * scale:
            return f"its {name} is {stated:.4g}, but {value:.4g} follows from its samples"
    if r.share_of_floor > measure.IMPOSSIBLE:
        return f"{r.share_of_floor:.0%} of the floor is not possible"
    return ""


def shown(records: list[Record], library: Library) -> tuple[list[Record], list[tuple[Record, str]]]:
    """The records that have their evidence, and the others with the reason."""
    passports = {(p.task, p.kernel): p for p in library.scan()[0]}
    good, bad, seen = [], [], set()
    for r in records:
        reason = "the same kernel, size, device and session stand in an earlier line" if r.key in seen else ""
        seen.add(r.key)
        reason = reason or evidence(r, library, passports)
        bad.append((r, reason)) if reason else good.append(r)
    return good, bad
