"""Client of the GPU worker: one process, JSON lines, killed with its group when it does not answer."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

from .sandbox import ROOT
from .verdict import HarnessError


_ENVIRONMENT = frozenset(
    {"PATH", "HOME", "LANG", "USER", "TMPDIR", "LD_LIBRARY_PATH", "CPATH", "LIBRARY_PATH", "CC", "CXX",
     "XDG_CACHE_HOME", "CODA_BASELINES_PATH"}
)  # fmt: skip


class WorkerLost(Exception):
    """The worker hung or died while it ran a command; ``reason`` is fit for a verdict."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


class CommandFailed(Exception):
    """The worker answered with an error; it lives on unless CUDA itself failed."""

    def __init__(self, error: str, trace: str):
        self.error, self.trace = error, trace
        super().__init__(error)


class NoGpu(HarnessError):
    """There is no usable Hopper GPU here; the message says what to do."""


class GpuWorker:
    """A GPU worker that restarts itself after a loss. Use as a context manager."""

    START_SECONDS = 180.0

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._buffer = b""

    def __enter__(self) -> "GpuWorker":
        self._start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker with everything it started."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        process.stdout.close()
        try:
            process.stdin.close()  # flushes, and there is nobody left to read
        except BrokenPipeError:
            pass

    def _start(self) -> None:
        self.close()
        # what CUDA, PyTorch and Triton need; an allow-list, so that no secret of the caller's reaches the worker
        environment = {
            n: v for n, v in os.environ.items()
            if n in _ENVIRONMENT or n.startswith(("CUDA_", "NVIDIA_", "TORCH", "PYTORCH_", "TRITON_", "LC_"))
        }  # fmt: skip
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "verifier.gpu_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            hello = self._answer(self.START_SECONDS)
        except WorkerLost as e:
            raise NoGpu(f"the GPU worker does not start: {e.reason}; run 'coda-agent doctor'") from e
        if not hello.get("ready"):
            self.close()
            raise NoGpu(
                f"{hello.get('fault')}. Measure on a machine with a Hopper GPU, or make a bundle here: "
                "coda-agent bundle TASK --out DIR, then there: coda-agent measure DIR"
            )

    def call(self, cmd: str, timeout: float = 120.0, **fields: Any) -> dict:
        """Run one command.

        Raises:
            WorkerLost: no answer within ``timeout`` seconds, or the process died.
            CommandFailed: the command raised.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._process.stdin.write(json.dumps({"cmd": cmd, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as e:
            self.close()
            raise WorkerLost("the worker process died") from e
        answer = self._answer(timeout)
        if not answer["ok"]:
            if answer.get("fatal"):  # it is about to exit; the next command must not meet it
                self.close()
            raise CommandFailed(answer["error"], answer.get("trace", ""))
        return answer["result"]

    def _answer(self, timeout: float) -> dict:
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.close()
                    raise WorkerLost(f"no answer within {timeout:g} s; the kernel hangs")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    status = self._process.wait()
                    self.close()
                    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                    raise WorkerLost(f"the worker process ended ({how})")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


def require_gpu() -> dict:
    """Facts of this machine's GPU.

    Raises:
        NoGpu: there is none that can run the kernels.
    """
    with GpuWorker() as worker:
        return worker.call("hello")
