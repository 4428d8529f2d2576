"""Client of the worker: submit jobs, get answers, restart it when it dies."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from . import sandbox
from .verdict import HarnessError

WALL_SECONDS = {"declare": 20.0, "interpret": 60.0, "compile": 120.0, "expert": 120.0}
SILENCE_SECONDS = 15.0  # the worker ticks every 2 s once it is ready; a stopped one does not
MEMORY_BYTES = 24 << 30  # address space, most of it never resident: torch and LLVM map a lot


class Answer:
    """What one job returned: ``ok`` with ``result``, or ``error`` with type, message and line."""

    def __init__(self, message: dict, directory: Path):
        self.ok: bool = message["ok"]
        self.result: dict = message.get("result", {})
        self.error: dict = message.get("error", {})
        self.directory = directory

    def describe(self) -> str:
        """The error as one line for a person or a prompt."""
        e = self.error
        where = f"line {e['line']}: " if e.get("line") else ""
        code = f"   [{e['code'].strip()}]" if e.get("code") else ""
        kind = "" if e["type"] in ("timeout", "signal", "exit") else f"{e['type']}: "
        return f"{where}{kind}{e['message']}{code}"


class Pool:
    """A running worker; use as a context manager. Thread safe.

    Args:
        parallel: jobs at once; default: the CPUs this process may use.
    """

    def __init__(self, parallel: int | None = None):
        self.parallel = parallel or len(os.sched_getaffinity(0))
        self.scratch = Path(tempfile.mkdtemp(prefix="coda-agent-"))
        self._ids = itertools.count()
        self._waiting: dict[int, tuple[Future, Path]] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Pool":
        self._start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker with everything it runs and remove its scratch directory."""
        process, self._process = self._process, None
        if process:
            process.stdin.close()
            try:
                process.wait(timeout=5 if self._heard else 0)  # one that is still importing would not listen
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _start(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "verifier.worker", str(self.parallel)]
        self._errors = (self.scratch / "worker.log").open("wb")
        self._process = subprocess.Popen(
            sandbox.boxed(command, self.scratch),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=sandbox.environment(),
            cwd=self.scratch,
            start_new_session=True,  # Ctrl-C reaches us, not the worker
        )
        self._heard: float | None = None  # nothing yet: imports take their time
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()

    def _watch(self, process: subprocess.Popen) -> None:
        """Kill a worker that fell silent: a candidate may have stopped it."""
        while process.poll() is None:
            time.sleep(1.0)
            if self._heard is not None and time.monotonic() - self._heard > SILENCE_SECONDS:
                process.kill()
                return

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self._heard = time.monotonic()
            try:
                message = json.loads(line)
            except ValueError:
                continue  # not ours; the job it might have been for runs into its deadline
            with self._lock:
                future, directory = self._waiting.pop(message.get("id"), (None, None))
            if future is not None:
                future.set_result(Answer(message, directory))
        process.wait()
        with self._lock:
            lost, self._waiting = self._waiting, {}
        log = (self.scratch / "worker.log").read_text(errors="replace")[-1500:] if self.scratch.exists() else ""
        for future, _ in lost.values():
            future.set_exception(
                HarnessError(f"the compile worker ended (status {process.returncode}); run 'coda-agent doctor'\n{log}")
            )

    def submit(self, kind: str, source: str = "", wall_seconds: float | None = None, **fields: Any) -> Future:
        """Queue a job; the future yields an :class:`Answer` or raises HarnessError."""
        number = next(self._ids)
        directory = self.scratch / f"job-{number}"
        directory.mkdir()
        data = source.encode()
        (directory / "candidate.py").write_bytes(data)
        for name, tensors in list(fields.items()):
            if name == "inputs":
                import torch

                torch.save(fields.pop(name), directory / "inputs.pt")
        wall = wall_seconds or WALL_SECONDS[kind]
        job = {
            "id": number,
            "kind": kind,
            "dir": str(directory),
            "sha256": hashlib.sha256(data).hexdigest(),
            "wall_seconds": wall,
            "cpu_seconds": int(wall) + 5,
            "memory_bytes": MEMORY_BYTES,
            **fields,
        }
        future: Future = Future()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            self._waiting[number] = (future, directory)
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        return future
