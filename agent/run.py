"""Runs: one ``generate`` invocation, kept as an append-only journal of JSON lines."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from verifier.verdict import HarnessError

from .prompt import Prompt
from .redact import redact


class Run:
    """A journal on disk; every event is flushed before the next step begins. Thread safe."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.id = directory.name
        self.path = directory / "journal.jsonl"
        self._writing = threading.Lock()
        self._whole = False  # the journal is known to end in a line end
        self._lock = FileLock(directory / ".lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise HarnessError(f"run {self.id} is already going on in another process") from None

    @classmethod
    def start(cls, root: Path, **facts: Any) -> Run:
        """Create a run directory named by time and a random suffix.

        Raises:
            HarnessError: the directory cannot be written.
        """
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        directory = root / f"{stamp}-{secrets.token_hex(2)}"
        try:
            directory.mkdir(parents=True)
        except OSError as e:
            raise HarnessError(
                f"cannot write runs to {root}: {e.strerror}; choose another place with --runs DIR"
            ) from e
        run = cls(directory)
        run.log("start", **facts)
        return run

    @classmethod
    def resume(cls, root: Path, name: str) -> Run:
        """Open an existing run by id, unique prefix, or ``last``.

        Raises:
            HarnessError: none or several match.
        """
        return cls(find_run(root, name))

    @property
    def limits(self) -> Path:
        """The file with the run's limits, which ``runs extend`` rewrites."""
        return self.directory / "limits.json"

    def log(self, event: str, **data: Any) -> None:
        """Append one event, on disk before this returns."""
        line = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"), "event": event, **data}
        try:
            with self._writing, self.path.open("a") as f:
                f.write(self._separator() + redact(json.dumps(line)) + "\n")
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise HarnessError(
                f"cannot write the journal {self.path}: {e.strerror}; free space, then --resume {self.id}"
            ) from e

    def _separator(self) -> str:
        """A line end when a power cut left half a line, so that the next event is not glued to it."""
        if self._whole:
            return ""
        self._whole = True
        data = self.path.read_bytes() if self.path.exists() else b""
        return "\n" if data and not data.endswith(b"\n") else ""

    def keep_prompt(self, prompt: Prompt) -> None:
        """Store a prompt under its hash, once."""
        path = self.directory / "prompts" / f"{prompt.sha256}.json"
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text(redact(json.dumps(asdict(prompt), indent=1)) + "\n")

    def prompt(self, sha256: str) -> Prompt:
        """A prompt that was kept."""
        return read_prompt(self.directory, sha256)

    def events(self) -> list[dict]:
        """All complete events; a line cut off by a power cut is dropped."""
        return read_events(self.directory)

    def finished_tasks(self) -> dict[str, dict]:
        """Tasks whose end is in the journal, with that event."""
        return {e["task"]: e for e in self.events() if e["event"] == "task_end"}

    def active_seconds(self) -> float:
        """Time this run was at work so far: from each start or resume to the last event before the next."""
        total, since, last = 0.0, None, None
        for e in self.events():
            now = datetime.datetime.fromisoformat(e["time"])
            if e["event"] in ("start", "resume"):
                total += (last - since).total_seconds() if since else 0.0
                since = now
            last = now
        return total + ((last - since).total_seconds() if since else 0.0)

    def close(self) -> None:
        self._lock.release()


def run_directories(root: Path) -> list[Path]:
    """Every run below ``root``, in the order in which they were started."""

    def started(directory: Path) -> tuple[str, str]:
        # the name holds whole seconds only, and a random end
        first = next(iter(read_events(directory)), {})
        return first.get("time", ""), directory.name

    return sorted((p.parent for p in root.glob("*/journal.jsonl")), key=started)


def find_run(root: Path, name: str) -> Path:
    """Directory of a run by id, unique prefix, or ``last``; does not lock it.

    Raises:
        HarnessError: none or several match.
    """
    found = run_directories(root)
    match = found[-1:] if name == "last" else [p for p in found if p.name.startswith(name)]
    if len(match) != 1:
        have = ", ".join(p.name for p in found) or "no runs"
        raise HarnessError(f"{'several' if match else 'no'} run(s) match {name!r} in {root}; there are: {have}")
    return match[0]


def read_events(directory: Path) -> list[dict]:
    """All complete events of a run, also of one that is going on."""
    out, path = [], directory / "journal.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            out.append(event)
    return out


def read_prompt(directory: Path, sha256: str) -> Prompt:
    """A prompt of a run.

    Raises:
        HarnessError: it is gone or damaged.
    """
    path = directory / "prompts" / f"{sha256}.json"
    try:
        data = json.loads(path.read_text())
        return Prompt(data["static"], data["task"], tuple(data["tips"]), tuple(data["examples"]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise HarnessError(f"cannot read the prompt {path}: {e}") from e
