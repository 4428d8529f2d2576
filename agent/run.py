"""Runs: one ``generate`` invocation, kept as an append-only journal of JSON lines."""

from __future__ import annotations

import datetime
import json
import os
import secrets
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from verifier.verdict import HarnessError

DEFAULT_DIR = Path("runs")


class Run:
    """A journal on disk; every event is flushed before the next step begins."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.id = directory.name
        self.path = directory / "journal.jsonl"
        self._lock = FileLock(directory / ".lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise HarnessError(f"run {self.id} is already going on in another process") from None

    @classmethod
    def start(cls, root: Path, **facts: Any) -> "Run":
        """Create a run directory named by time and a random suffix.

        Raises:
            HarnessError: the directory cannot be written.
        """
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        directory = root / f"{stamp}-{secrets.token_hex(2)}"
        try:
            directory.mkdir(parents=True)
        except OSError as e:
            raise HarnessError(f"cannot write runs to {root}: {e.strerror}; choose another place with --runs DIR") from e
        run = cls(directory)
        run.log("start", **facts)
        return run

    @classmethod
    def resume(cls, root: Path, name: str) -> "Run":
        """Open an existing run by id, unique prefix, or ``last``.

        Raises:
            HarnessError: none or several match.
        """
        found = sorted(p.parent for p in root.glob("*/journal.jsonl"))
        match = found[-1:] if name == "last" else [p for p in found if p.name.startswith(name)]
        if len(match) != 1:
            have = ", ".join(p.name for p in found) or "no runs"
            raise HarnessError(f"{'several' if match else 'no'} run(s) match {name!r} in {root}; there are: {have}")
        return cls(match[0])

    def log(self, event: str, **data: Any) -> None:
        """Append one event, on disk before this returns."""
        line = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"), "event": event, **data}
        try:
            with self.path.open("a") as f:
                f.write(json.dumps(line) + "\n")
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise HarnessError(f"cannot write the journal {self.path}: {e.strerror}; free space, then --resume {self.id}") from e

    def events(self) -> list[dict]:
        """All complete events; a line cut off by a power cut is dropped."""
        out = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                out.append(json.loads(line))
            except ValueError:
                continue
        return out

    def finished_tasks(self) -> dict[str, dict]:
        """Tasks whose end is in the journal, with that event."""
        return {e["task"]: e for e in self.events() if e["event"] == "task_end"}

    def close(self) -> None:
        self._lock.release()
