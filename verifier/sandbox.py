"""The box in which candidate Python runs: no network, read-only files, empty environment.

Built on bubblewrap (https://github.com/containers/bubblewrap), which sets up the
namespaces of the worker, and on Landlock (package ``landlock``), which narrows each
job to its own scratch directory, so that candidates cannot see each other. Without
them candidates still run in a separate process with limits, and every passport and
``coda-agent doctor`` say that isolation is degraded.
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FULL, NO_LANDLOCK, DEGRADED = "bubblewrap+landlock", "bubblewrap, jobs not separated", "process limits only"


@functools.lru_cache(maxsize=1)
def level() -> tuple[str, str]:
    """``(level, what to do)``: which isolation this machine offers; the hint is empty when full."""
    bwrap = shutil.which("bwrap")
    if not bwrap:
        return DEGRADED, "install bubblewrap (Debian: apt-get install bubblewrap)"
    probe = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "true"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as e:
        return DEGRADED, f"bubblewrap does not run here: {e}"
    if done.returncode:
        return DEGRADED, f"bubblewrap cannot make namespaces here: {done.stderr.strip()[:200]}"
    try:
        import landlock

        landlock.landlock_abi_version()
    except ImportError:
        return NO_LANDLOCK, "pip install landlock==1.0.0.dev5"
    except OSError as e:  # the kernel was built without it
        return NO_LANDLOCK, f"Landlock is not available in this kernel: {e}"
    return FULL, ""


def confine(directory: Path) -> None:
    """Narrow this process to reading what the worker may read and writing ``directory`` only."""
    if level_in_worker() != FULL:
        return
    from landlock import FSAccess, Ruleset

    read = FSAccess.READ_FILE | FSAccess.READ_DIR | FSAccess.EXECUTE
    rules = Ruleset()
    for path in (*_readable(), "/proc", "/dev"):
        rules.allow(path, rules=read if os.path.isdir(path) else FSAccess.READ_FILE | FSAccess.EXECUTE)
    rules.allow("/dev/null", rules=FSAccess.READ_FILE | FSAccess.WRITE_FILE)
    rules.allow(directory, rules=FSAccess.all())
    rules.apply()


def level_in_worker() -> str:
    """The level that the parent established, told to the worker through its environment."""
    return os.environ.get(_LEVEL, DEGRADED)


_LEVEL = "CODA_AGENT_ISOLATION"
# What a candidate must not see: references, tolerances, other candidates.
_HIDDEN = ("reference_kernels", "leaderboard", "generated", "agent", "tests", "tasks.yaml")
_WORKER_FILES = ("verifier/__init__.py", "verifier/sandbox.py", "verifier/worker.py")


def _readable() -> list[str]:
    """What the worker may read: the interpreter, its packages, our primitives."""
    paths = {
        sys.prefix, sys.base_prefix, sys.exec_prefix, sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages(),
        str(ROOT / "primitives"), *(str(ROOT / f) for f in _WORKER_FILES),
    }  # fmt: skip
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"]
    return [p for p in (*system, *sorted(paths)) if os.path.exists(p)]


def environment() -> dict[str, str]:
    """The whole environment of the worker: nothing of the caller's, so no secret can leak."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CUTE_DSL_ARCH": "sm_90a",
        "QUACK_ARCH": "90",
        "QUACK_CACHE_ENABLED": "0",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        _LEVEL: level()[0],
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def boxed(command: list[str], scratch: Path) -> list[str]:
    """``command`` wrapped so that only ``scratch`` and a private /tmp are writable."""
    if level()[0] == DEGRADED:
        return command
    readable = _readable()
    binds = [arg for path in readable for arg in ("--ro-bind", path, path)]
    for name in _HIDDEN:  # an installed copy lies inside site-packages, which is readable
        path = ROOT / name
        if path.is_dir() and any(path.is_relative_to(p) for p in readable):
            binds += ["--tmpfs", str(path)]
    return [
        "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
        # /tmp first: an interpreter or a checkout may itself lie below it
        "--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev", *binds,
        "--bind", str(scratch), str(scratch), "--chdir", str(scratch), "--", *command,
    ]  # fmt: skip


def limit_job(cpu_seconds: int, memory_bytes: int) -> None:
    """Limits of one job, set in its own process before any candidate code runs."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
