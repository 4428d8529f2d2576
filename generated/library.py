"""Read and write the library: ``<task>/<kernel>.py`` with its passport ``<kernel>.json``.

The index (``index.json``) is derived from the passports: for each task, device and
timed shape the fastest accepted kernel and its configuration. Writes are atomic and
locked, so two runs or two reviewers can use one library at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock, Timeout
from pydantic import Field, TypeAdapter, ValidationError

from .passport import Decision, Passport, kernel_id

__all__ = ["DEFAULT", "Conflict", "Library", "LibraryError", "Passport", "kernel_id", "write_atomically"]

DEFAULT = Path(__file__).resolve().parent
LOCK_SECONDS = 30
_ShapeKey = Annotated[str, Field(pattern=r"^[1-9]\d*x[1-9]\d*x[1-9]\d*$")]
_INDEX = TypeAdapter(dict[str, dict[str, dict[_ShapeKey, dict[str, Any]]]])  # task -> device -> MxNxK -> entry


class LibraryError(RuntimeError):
    """The library cannot be read or written; the message says what to do."""


class Conflict(LibraryError):
    """The library changed since the reviewer looked; the message says what happened."""


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

    def scan(self) -> tuple[list[Passport], list[str]]:
        """Every readable passport, and why the others are not."""
        found, problems = [], []
        for path in sorted(self.root.glob("*/*.json")):
            try:
                found.append(self._read(path))
            except LibraryError as e:
                problems.append(str(e))
        return found, problems

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
            write_atomically(path, source)
            write_atomically(path.with_suffix(".json"), passport.model_dump_json(indent=1) + "\n")
            self._reindex()
        return path

    # --- deciding ---

    def seen(self, passport: Passport) -> str:
        """What a decision about a kernel rests on: its text, evidence, history, and the task's accepted kernels."""
        accepted = [q.kernel for q in self.scan()[0] if q.task == passport.task and q.state == "accepted"]
        facts = [passport.model_dump(mode="json"), accepted]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def decide(self, passport: Passport, decision: Decision, seen: str) -> Passport:
        """Add a decision to a kernel's history.

        Args:
            seen: ``seen(passport)`` at the moment the reviewer was shown the evidence.

        Raises:
            Conflict: somebody decided, or the kernel or its rivals changed, since then.
            LibraryError: the decision is not possible in this state, or the library cannot be written.
        """
        with self._locked():
            fresh = self._read(self.path(passport).with_suffix(".json"))
            if self.seen(fresh) != seen:
                raise Conflict(self._news(passport, fresh))
            refusal = fresh.refusal(decision.verb)
            if refusal:
                raise LibraryError(refusal)
            self.source(fresh)  # never decide about a text that is not the one that was checked
            fresh.history.append(decision)
            write_atomically(self.path(fresh).with_suffix(".json"), fresh.model_dump_json(indent=1) + "\n")
            self._reindex()
        return fresh

    def _news(self, before: Passport, fresh: Passport) -> str:
        name = f"{fresh.task}/{fresh.kernel}"
        if len(fresh.history) > len(before.history):
            last = fresh.history[-1]
            return f"{name}: {last.reviewer} decided meanwhile ({last.verb}: {last.reason}); look at it again"
        if fresh != before:
            return f"{name} was checked or measured again meanwhile; look at it again"
        return f"another kernel of {fresh.task} was accepted or retired meanwhile; compare {name} with it again"

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
        """Derive ``index.json``: task -> device -> shape -> fastest accepted kernel and configuration.

        A corrupt passport is left out: what it says cannot be served, and must not hinder the others.
        """
        index: dict[str, dict] = {}
        for p in (p for p in self.scan()[0] if p.state == "accepted"):
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
        write_atomically(self.root / "index.json", json.dumps(index, indent=1, sort_keys=True) + "\n")

    # --- choosing ---

    def best(self, task: str, device: str, shape: tuple[int, int, int]) -> dict:
        """The fastest accepted kernel for the nearest measured shape.

        Returns:
            ``{"kernel", "config", "measured_shape", ...}``; ``measured_shape`` is the
            timed shape with the closest logarithmic distance.

        Raises:
            LibraryError: no accepted kernel was measured for this task on this device.
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
            waiting = [p.kernel for p in self.passports(task) if p.state == "proposed" and p.timings]
            todo = f"proposed: {', '.join(waiting)}; run 'coda-agent review {task}'" if waiting else "run 'coda-agent measure'"
            raise LibraryError(f"no accepted kernel for {task} was measured on {device} (measured on: {have}); {todo}")

        def distance(key: str) -> float:
            return sum(abs(math.log(int(a) / b)) for a, b in zip(key.split("x"), shape))

        key = min(shapes, key=distance)
        return {**shapes[key], "measured_shape": [int(x) for x in key.split("x")]}


def write_atomically(path: Path, text: str) -> None:
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
