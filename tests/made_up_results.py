"""Records whose numbers follow from made-up samples, and a library they belong to."""

from __future__ import annotations

import hashlib
import statistics
from pathlib import Path

from generated.library import Library, Passport, kernel_id
from leaderboard.records import Record
from verifier.measure import ratio

SHAPE = (4096, 4096, 4096)
READING = {"sm_clock_mhz": 1500, "power_w": 600.0, "temperature_c": 50, "throttle": "0x0"}
NUMERICS = {"stage": "numerics", "passed": True, "reason": "18 cases", "evidence": {"worst": {"y": {}, "h": {}}}}
ROUNDS = 9


def source_of(task: str, author: str) -> str:
    return f"# {task} by {author}\n"


def passport_of(task: str = "gemm_rmsnorm", author: str = "composer", **changes) -> Passport:
    source = source_of(task, author)
    sha = hashlib.sha256(source.encode()).hexdigest()
    made = Passport(kernel=kernel_id(author, source), task=task, author=author, source_sha256=sha, measure=[NUMERICS])
    return made.model_copy(update=changes)


def wobbly(us: float) -> list[float]:
    """Nine rounds around ``us`` that rise and fall together for everything timed in them."""
    return [us * (1 + 0.001 * (i - ROUNDS // 2)) for i in range(ROUNDS)]


def made_up(
    us: float | list[float] = 250.0,
    task: str = "gemm_rmsnorm",
    author: str = "composer",
    session: str = "s1",
    shape: tuple[int, int, int] = SHAPE,
    baselines: dict[str, float | list[float]] | None = None,
    covers: dict[str, list[str]] | None = None,
    fold: float = 0.0,
    **changes,
) -> Record:
    """A record. ``us`` and ``baselines``: microseconds, or the samples themselves; ``fold``: on top of the kernel."""

    def rounds(value: float | list[float]) -> list[float]:
        return value if isinstance(value, list) else wobbly(value)

    kernel = rounds(us)
    total = [k + fold for k in kernel]
    timed = {n: rounds(v) for n, v in ({"gemm": 200.0} | (baselines or {})).items()}
    passport = passport_of(task, author)
    flops, floor = 2.0 * shape[0] * shape[1] * shape[2], 1e6 * 2.0 * shape[0] * shape[1] * shape[2] / 8e14
    facts = {
        "task": task, "kernel": passport.kernel, "author": author, "source_sha256": passport.source_sha256,
        "object_sha256": f"object of {task} by {author}", "shape": shape, "act": "bf16", "config": "128x128",
        "device": "NVIDIA H200", "environment": {"driver": "1", "torch": "2"}, "session": session,
        "measured": f"2026-01-01T00:00:0{sum(map(ord, session)) % 10}+00:00", "commit": "c" * 40,
        "command": "coda-agent measure BUNDLE",
        "kernel_us": statistics.median(kernel), "total_us": statistics.median(total),
        "finish_us": statistics.median(t - k for t, k in zip(total, kernel)), "iqr_us": 1.0,
        "tax_us": statistics.median(k - g for k, g in zip(kernel, timed["gemm"])),
        "floor_us": floor, "share_of_floor": floor / statistics.median(kernel), "flops": flops, "bytes": 1e6,
        "matmul_flops": 8e14, "copy_bytes": 4e12,
        "baselines": {
            n: {"us": statistics.median(s), "ratio": ratio(s, total), "covers": (covers or {}).get(n)}
            for n, s in timed.items()
        },
        "samples_us": {"kernel": kernel, "total": total, **timed}, "rounds": len(kernel), "wall_over_events": 1.0,
        "receipt": {"before": READING, "after": READING}, "numerics": "18 cases",
    }  # fmt: skip
    return Record.model_validate(facts | changes)


def library_of(root: Path, records: list[Record]) -> Library:
    """A library with the kernels of the records."""
    lib = Library(root)
    for task, author in {(r.task, r.author) for r in records}:
        lib.add(source_of(task, author), passport_of(task, author))
    return lib
