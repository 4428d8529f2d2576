"""The artefact: an object file and the JSON manifest that says how to launch it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from primitives.declare import Program

COMPILERS = ("nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")  # what decides the bytes of an object
PACKAGES = (*COMPILERS, "torch")


def toolchain() -> dict[str, str]:
    """Versions of what compiles and runs a kernel."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return {**found, "python": platform.python_version()}


def other_compilers(then: dict[str, str]) -> str:
    """How the compilers here differ from those of a toolchain, or an empty string."""
    here = toolchain()
    changed = [n for n in COMPILERS if then.get(n) != here[n]]
    return ", ".join(f"{n} {then.get(n, 'of an unknown version')}, here is {here[n]}" for n in changed)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def config_key(config: dict[str, Any]) -> str:
    """The short name of a configuration, as rows and file names spell it."""
    c = config
    kind = "pp" if c["pingpong"] else "coop"
    return f"{c['tile_m']}x{c['tile_n']}_c{c['cluster_m']}{c['cluster_n']}_{kind}_s{c['max_swizzle_size']}"


class Artefact(BaseModel):
    """One compiled kernel in one configuration; all the GPU worker ever learns about a candidate.

    ``fields`` is the order of the epilogue arguments; ``d`` and ``c`` name the
    tensors that cross as the GEMM's own output and C operand. Sizes are dynamic.
    """

    model_config = ConfigDict(extra="forbid")

    kernel: str
    task: str
    author: str
    act: str
    b: str
    source_sha256: str
    object: str  # file name beside the manifest
    object_sha256: str
    symbol: str
    fields: list[str]
    d: str | None
    c: str | None
    renames: dict[str, str] = {}  # expert kernels: argument name -> the task's tensor
    covers: list[str] | None = None  # expert kernels: which of the task's outputs they produce
    config: dict[str, Any]
    program: dict[str, Any]
    toolchain: dict[str, str]
    isolation: str

    @property
    def config_key(self) -> str:
        return config_key(self.config)

    @property
    def declared(self) -> Program:
        return Program.from_description(self.program)
