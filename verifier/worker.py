"""The worker that runs candidate Python: interprets and compiles, one forked process per job.

Started in the box of ``verifier.sandbox``; speaks JSON lines. It imports torch and
CuTeDSL once, then forks per job, so a candidate that hangs, crashes or eats
memory ends alone and the next one starts from a clean process.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from pathlib import Path

from verifier.sandbox import confine, limit_job

EXPORTS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "int32": "int32"}
TICK_SECONDS = 2.0
_SUBREAPER = 36  # prctl(2): orphans of our jobs become our children
_MAX_ERROR = 2000  # characters of an error message that travel back


def _load_program(job: dict):
    """Import the candidate and find its one Program; the bytes must be the linted ones."""
    from primitives import Program

    path = Path(job["dir"]) / "candidate.py"
    if hashlib.sha256(path.read_bytes()).hexdigest() != job["sha256"]:
        raise RuntimeError("candidate.py is not the file that passed the policy")
    spec = importlib.util.spec_from_file_location("candidate", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["candidate"] = module  # the DSL looks functions up by module
    spec.loader.exec_module(module)
    programs = [v for v in vars(module).values() if isinstance(v, Program)]
    if len(programs) != 1:
        raise ValueError(f"a kernel file has exactly one @epilogue function, this one has {len(programs)}")
    return programs[0]


def _dtypes(names: dict) -> dict:
    import torch

    return {n: getattr(torch, EXPORTS[d]) for n, d in names.items()}


def _declare(job: dict) -> dict:
    return _load_program(job).describe()


def _interpret(job: dict) -> dict:
    import torch

    from primitives.interpret import interpret

    program = _load_program(job)
    outputs = []
    for case in torch.load(Path(job["dir"]) / "inputs.pt", weights_only=True):
        outputs.append(
            interpret(
                program,
                case["a"],
                case["b"],
                case["operands"],
                _dtypes(job["dtypes"]),
                tile=tuple(case["tile"]),
            )
        )
    torch.save(outputs, Path(job["dir"]) / "outputs.pt")
    return program.describe()


def _compile(job: dict) -> dict:
    from primitives.device.lower import Config, compile_object

    program = _load_program(job)
    path = Path(job["dir"]) / "kernel.o"
    launch = compile_object(
        program, _dtypes(job["dtypes"]), _dtypes({"act": job["act"]})["act"], Config(**job["config"]), path, job["b_major"]
    )
    if hashlib.sha256((Path(job["dir"]) / "candidate.py").read_bytes()).hexdigest() != job["sha256"]:
        raise RuntimeError("candidate.py changed while it was compiled")
    return {**program.describe(), "launch": launch}


def _compile_expert(job: dict) -> dict:
    """Compile one of quack's own epilogues (trusted code, no candidate involved)."""
    from primitives.device.expert import compile_expert

    return {"launch": compile_expert(job["expert"], Path(job["dir"]) / "kernel.o")}


KINDS = {"declare": _declare, "interpret": _interpret, "compile": _compile, "expert": _compile_expert}


def _error(exc: BaseException, path: str) -> dict:
    """What went wrong, with the author's own line when the fault lies there."""
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if f.filename.endswith("candidate.py")]
    line = frames[-1].lineno if frames else getattr(exc, "lineno", None)
    code = frames[-1].line if frames else None
    return {"type": type(exc).__name__, "message": str(exc)[:_MAX_ERROR], "line": line, "code": code}


def _run_child(job: dict, write_fd: int) -> None:
    """Runs in the forked process; never returns."""
    os.setpgid(0, 0)  # its own group, so a deadline kills whatever it started
    log = os.open(os.path.join(job["dir"], "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        os.environ["TMPDIR"] = tempfile.tempdir = job["dir"]
        os.chdir(job["dir"])
        limit_job(job["cpu_seconds"], job["memory_bytes"])
        confine(Path(job["dir"]))
        answer = {"ok": True, "result": KINDS[job["kind"]](job)}
    except BaseException as e:  # the boundary: whatever a candidate does becomes data
        answer = {"ok": False, "error": _error(e, job["dir"])}
    os.write(write_fd, json.dumps(answer).encode())
    os._exit(0)


class Server:
    """Forks one process per job, at most ``parallel`` at once, and reports each end."""

    def __init__(self, parallel: int):
        self.parallel = parallel
        self.queue: deque[dict] = deque()
        self.running: dict[int, tuple[dict, int, float, bytearray]] = {}  # read fd -> job, pid, deadline, data
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.buffer = b""
        self.open = True
        self.ticked = time.monotonic()

    def serve(self) -> None:
        while self.open or self.queue or self.running:
            while self.queue and len(self.running) < self.parallel:
                self._start(self.queue.popleft())
            for key, _ in self.selector.select(timeout=0.1):
                if key.fd == 0:
                    self._read_jobs()
                else:
                    self._read_answer(key.fd)
            self._enforce_deadlines()
            if time.monotonic() - self.ticked > TICK_SECONDS:
                self.ticked = time.monotonic()
                _send({"tick": True})  # still here; silence makes the parent start another worker

    def _read_jobs(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self.open = False
            self.selector.unregister(0)
            self.queue.clear()
            for job, pid, _, _ in self.running.values():
                os.killpg(pid, signal.SIGKILL)
            return
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        self.queue.extend(json.loads(line) for line in lines)

    def _start(self, job: dict) -> None:
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            # a candidate that writes to every descriptor must not answer for other jobs
            for fd in (_out, read_fd, self.selector.fileno(), *self.running):
                os.close(fd)
            _run_child(job, write_fd)
        os.close(write_fd)
        try:
            os.setpgid(pid, pid)
        except OSError:
            pass  # the child did it first
        self.running[read_fd] = (job, pid, time.monotonic() + job["wall_seconds"], bytearray())
        self.selector.register(read_fd, selectors.EVENT_READ)

    def _read_answer(self, fd: int) -> None:
        data = os.read(fd, 1 << 16)
        if data:
            self.running[fd][3].extend(data)
            return
        job, pid, _, answer = self._finish(fd)
        _, status = os.waitpid(pid, 0)
        self._kill_strays()
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            error = {"type": "signal", "message": f"the process ended by {name}", "line": None, "code": None}
            _send({"id": job["id"], "ok": False, "error": error})
            return
        try:
            message = json.loads(bytes(answer))
        except ValueError:
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("ok"), bool):
            text = f"the process ended without an answer (status {status})"
            message = {"ok": False, "error": {"type": "exit", "message": text, "line": None, "code": None}}
        # the id last: what a candidate writes cannot answer for another job
        _send({**message, "id": job["id"]})

    def _finish(self, fd: int):
        self.selector.unregister(fd)
        os.close(fd)
        job = self.running.pop(fd)
        try:
            os.killpg(job[1], signal.SIGKILL)  # whatever the job left behind
        except OSError:
            pass
        return job

    def _kill_strays(self) -> None:
        """Kill children that are no running job: a job's daemons, which fall to us as their subreaper."""
        jobs = {pid for _, pid, _, _ in self.running.values()}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) not in jobs:
                try:
                    parent = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
                    if parent == os.getpid():
                        os.kill(int(entry), signal.SIGKILL)
                        os.waitpid(int(entry), 0)
                except OSError:
                    continue  # it ended meanwhile

    def _enforce_deadlines(self) -> None:
        for fd, (job, pid, deadline, _) in list(self.running.items()):
            if time.monotonic() > deadline:
                self._finish(fd)
                os.waitpid(pid, 0)
                self._kill_strays()
                message = f"no answer within {job['wall_seconds']:g} s"
                error = {"type": "timeout", "message": message, "line": None, "code": None}
                _send({"id": job["id"], "ok": False, "error": error})


def _send(message: dict) -> None:
    os.write(_out, json.dumps(message).encode() + b"\n")


def main() -> None:
    global _out
    _out = os.dup(1)  # keep the channel; anything printed by imports goes to stderr
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    import torch

    import primitives.interpret  # noqa: F401
    import primitives.device.lower  # noqa: F401

    torch.set_num_threads(1)
    _send({"ready": True, "pid": os.getpid()})
    Server(int(sys.argv[1])).serve()


if __name__ == "__main__":
    main()
