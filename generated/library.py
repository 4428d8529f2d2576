"""Read and write the library: ``<task>/<kernel>.py`` with its passport ``<kernel>.json``.

The index (``index.json``) is derived from the passports: for each task, device and
timed shape the fastest kernel and its configuration. Writes are atomic and locked,
so two runs can use one library at once.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

DEFAULT = Path(__file__).resolve().parent
LOCK_SECONDS = 30
Status = Literal["checked", "measured"]
_ShapeKey = Annotated[str, Field(pattern=r"^[1-9]\d*x[1-9]\d*x[1-9]\d*$")]
_INDEX = TypeAdapter(dict[str, dict[str, dict[_ShapeKey, dict[str, Any]]]])  # task -> device -> MxNxK -> entry
STATUS_TEXT = {"checked": "checked, not measured", "measured": "measured"}


class LibraryError(RuntimeError):
    """The library cannot be read or written; the message says what to do."""


class Passport(BaseModel):
    """The record beside every kernel: where it came from, what was proven, how fast it is."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    kernel: str  # id: <author>-<first 8 of the source hash>
    task: str
    author: str
    source_sha256: str
    status: Status = "checked"
    created: str = Field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    run: str | None = None
    model: str | None = None
    prompt_sha256: str | None = None
    tips: list[str] = []
    attempts: int | None = None
    cost: dict[str, Any] = {}
    isolation: str = ""
    toolchain: dict[str, str] = {}
    check: list[dict] = []  # verdicts of the GPU-free stages
    measure: list[dict] = []  # verdicts of the GPU stages
    timings: list[dict] = []  # one row per device and shape
    device: dict[str, Any] = {}
    ceilings: dict[str, Any] = {}
    reviewer: str | None = None
    review: str | None = None

    @property
    def status_text(self) -> str:
        return STATUS_TEXT[self.status]


def kernel_id(author: str, source: str) -> str:
    """``composer-1a2b3c4d``: stable for the same author and text."""
    slug = re.sub(r"[^a-z0-9.]+", "-", author.lower()).strip("-")
    return f"{slug}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


class Library:
    """A directory of kernels."""

    def __init__(self, root: Path | None = None):
        self.root = Path(root) if root else DEFAULT

    # --- reading ---

    def passports(self, task: str | None = None) -> Iterator[Passport]:
        """Every passport, sorted by task and kernel.

        Raises:
            LibraryError: a passport is corrupt.
        """
        pattern = f"{task}/*.json" if task else "*/*.json"
        for path in sorted(self.root.glob(pattern)):
            yield self._read(path)

    def _read(self, path: Path) -> Passport:
        try:
            passport = Passport.model_validate_json(path.read_bytes())
        except (OSError, ValidationError, ValueError) as e:
            first = str(e).splitlines()[0]
            raise LibraryError(f"{path} is not a valid passport ({first}); restore it or delete it with its .py file") from e
        if (passport.task, passport.kernel) != (path.parent.name, path.stem):
            raise LibraryError(f"{path} does not belong here: it is the passport of {passport.task}/{passport.kernel}; delete it")
        return passport

    def find(self, kernel: str) -> Passport:
        """A passport by ``kernel``, ``task/kernel`` or the path of its file.

        Raises:
            LibraryError: none or several match.
        """
        name = Path(kernel).with_suffix("").parts[-2:] if kernel.endswith((".py", ".json")) else kernel.split("/")
        task = name[0] if len(name) == 2 else None
        found = [p for p in self.passports(task) if p.kernel == name[-1] or p.task == name[-1] and task is None]
        if not found:
            have = ", ".join(f"{p.task}/{p.kernel}" for p in self.passports()) or "nothing yet"
            raise LibraryError(f"no kernel {kernel!r} in {self.root}; it holds: {have}")
        if len(found) > 1:
            names = ", ".join(f"{p.task}/{p.kernel}" for p in found)
            raise LibraryError(f"{kernel!r} names several kernels, choose one of: {names}")
        return found[0]

    def source(self, passport: Passport) -> str:
        """Text of the kernel; refuses a file that is not the one the passport is about.

        Raises:
            LibraryError: missing, or changed since it was checked.
        """
        path = self.path(passport)
        try:
            content = path.read_bytes()
        except OSError as e:
            raise LibraryError(f"cannot read {path}: {e.strerror}") from e
        if hashlib.sha256(content).hexdigest() != passport.source_sha256:
            raise LibraryError(f"{path} was changed after it was checked; run 'coda-agent check {path}' and add it again")
        try:
            return content.decode()  # line ends as they are: they are part of what was checked
        except UnicodeDecodeError as e:
            raise LibraryError(f"{path} is not UTF-8 text; delete it with its .json file") from e

    def path(self, passport: Passport) -> Path:
        return self.root / passport.task / f"{passport.kernel}.py"

    # --- writing ---

    def add(self, source: str, passport: Passport) -> Path:
        """Store a kernel; an existing passport of the same kernel is replaced.

        Raises:
            LibraryError: not writable, disk full, or another run holds the lock for too long.
        """
        with self._locked():
            folder = self.root / passport.task
            folder.mkdir(parents=True, exist_ok=True)
            path = self.path(passport)
            _write_atomically(path, source)
            _write_atomically(path.with_suffix(".json"), passport.model_dump_json(indent=1) + "\n")
            self._reindex()
        return path

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / ".lock", timeout=LOCK_SECONDS):
                yield
        except Timeout as e:
            raise LibraryError(f"{self.root} is locked by another run for over {LOCK_SECONDS} s; try again") from e
        except OSError as e:
            raise LibraryError(
                f"cannot write the library {self.root}: {e.strerror or e}; choose another with --library DIR"
            ) from e

    def _reindex(self) -> None:
        """Derive ``index.json``: task -> device -> shape -> fastest kernel and configuration."""
        index: dict[str, dict] = {}
        for p in self.passports():
            for row in p.timings:
                shapes = index.setdefault(p.task, {}).setdefault(row["device"], {})
                key = "x".join(map(str, row["shape"]))
                best = shapes.get(key)
                if best is None or row["ratios"]["gemm"]["median"] > best["speed_vs_gemm"]:
                    shapes[key] = {
                        "kernel": p.kernel,
                        "config": row["config"],
                        "total_us": row["total_us"],
                        # sessions are never compared by absolute time, only through the bare GEMM
                        "speed_vs_gemm": row["ratios"]["gemm"]["median"],
                    }
        _write_atomically(self.root / "index.json", json.dumps(index, indent=1, sort_keys=True) + "\n")

    # --- choosing ---

    def best(self, task: str, device: str, shape: tuple[int, int, int]) -> dict:
        """The fastest measured kernel for the nearest measured shape.

        Returns:
            ``{"kernel", "config", "measured_shape", ...}``; ``measured_shape`` is the
            timed shape with the closest logarithmic distance.

        Raises:
            LibraryError: nothing was measured for this task on this device.
        """
        path = self.root / "index.json"
        try:
            index = _INDEX.validate_json(path.read_bytes())
        except (OSError, ValueError) as e:
            raise LibraryError(f"{self.root} has no readable index; run 'coda-agent generate {task}'") from e
        devices = index.get(task, {})
        shapes = devices.get(device)
        if not shapes:
            have = ", ".join(devices) or "no device"
            raise LibraryError(f"nothing measured for {task} on {device} (measured on: {have}); run 'coda-agent measure'")

        def distance(key: str) -> float:
            return sum(abs(math.log(int(a) / b)) for a, b in zip(key.split("x"), shape))

        key = min(shapes, key=distance)
        return {**shapes[key], "measured_shape": [int(x) for x in key.split("x")]}


def _write_atomically(path: Path, text: str) -> None:
    """All or nothing: a full disk or a power cut leaves the old file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
