"""What this machine can do, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from verifier import sandbox
from verifier.driver import MIN_DRIVER, installed_driver, too_old
from verifier.gpu import NoGpu, require_gpu
from verifier.resources import cuobjdump
from verifier.verdict import HarnessError

# the versions this release was proven with, and the range it accepts
SUPPORTED = {
    "torch": ("2.9", "2.14"),
    "nvidia-cutlass-dsl": ("4.8.1", "4.9"),
    "quack-kernels": ("0.6.5", "0.7"),
    "apache-tvm-ffi": ("0.1.15", "0.2"),
    "triton": ("3.5", None),
}
UPDATE = f"update the NVIDIA driver to {MIN_DRIVER} or newer"
ELSEWHERE = "measure elsewhere: coda-agent bundle TASK --out DIR"
MIN_FREE_GB, MIN_MEMORY_GB = 2, 6


@dataclass
class Finding:
    """One line of the doctor's report."""

    what: str
    ok: bool
    found: str
    mend: str = ""
    needed: bool = True  # False: something works without it

    def as_dict(self) -> dict:
        return dict(vars(self))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", text.split("+")[0])[:3])


def _packages() -> list[Finding]:
    out = []
    for name, (low, high) in SUPPORTED.items():
        want = f">={low}" + (f",<{high}" if high else "")
        try:
            have = importlib.metadata.version(name)
            where = importlib.metadata.distribution(name).locate_file("")
        except importlib.metadata.PackageNotFoundError:
            out.append(Finding(name, False, "not installed", f"pip install '{name}{want}'"))
            continue
        ok = _version(have) >= _version(low) and (high is None or _version(have) < _version(high))
        out.append(Finding(name, ok, f"{have} in {where}", "" if ok else f"pip install '{name}{want}'"))
    return out + _import_of_cutlass()


def _import_of_cutlass() -> list[Finding]:
    """Whatever else answers to ``import cutlass``: a package of that name, or any folder earlier on the path."""
    # the path is searched anew: this process may have imported the right one already
    spec = importlib.machinery.PathFinder.find_spec("cutlass")
    if spec is None:
        return []
    package = spec.submodule_search_locations
    where = Path(next(iter(package)) if package else spec.origin)
    if "nvidia_cutlass_dsl" in where.parts:
        return []
    try:
        importlib.metadata.version("cutlass")
        mend = "pip uninstall cutlass"
    except importlib.metadata.PackageNotFoundError:
        mend = f"rename {where}, or take {where.parent} off PYTHONPATH"
    return [Finding("cutlass", False, f"'import cutlass' finds {where}, not CuTeDSL", mend)]


def _gpu() -> Finding:
    try:
        facts = require_gpu()
    except NoGpu as e:
        driver = installed_driver()
        mend = UPDATE if driver and too_old(driver) else ELSEWHERE
        return Finding("GPU", False, str(e).split(". Measure")[0], mend, False)
    driver = facts.get("driver")
    if driver and too_old(driver):
        return Finding("GPU", False, f"{facts['device']}, driver {driver}", UPDATE, False)
    return Finding("GPU", True, f"{facts['device']}, driver {driver or 'unknown'}, torch {facts['torch']}", needed=False)


def examine(library: Path, gpu: bool = True) -> list[Finding]:
    """Every finding; ``gpu=False`` skips starting a GPU process."""
    python_ok = sys.version_info >= (3, 11)
    found = [Finding("Python", python_ok, platform.python_version(), "" if python_ok else "use Python 3.11 or newer")]
    found += _packages()
    try:
        found.append(Finding("cuobjdump", True, str(cuobjdump())))
    except HarnessError as e:
        found.append(Finding("cuobjdump", False, str(e), "pip install triton"))
    level, mend = sandbox.level()
    found.append(Finding("sandbox", level == sandbox.FULL, level, mend, needed=False))
    free = shutil.disk_usage(library if library.exists() else Path.cwd()).free / 2**30
    found.append(Finding("disk", free >= MIN_FREE_GB, f"{free:.0f} GiB free", "" if free >= MIN_FREE_GB else f"free {MIN_FREE_GB} GiB"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found.append(Finding("memory", memory >= MIN_MEMORY_GB, f"{memory:.0f} GiB", "" if memory >= MIN_MEMORY_GB else f"checks need {MIN_MEMORY_GB} GiB"))
    writable = os.access(library if library.exists() else library.parent, os.W_OK)
    found.append(Finding("library", writable, str(library), "" if writable else "choose another with --library DIR"))
    if gpu:
        found.append(_gpu())
    return found
