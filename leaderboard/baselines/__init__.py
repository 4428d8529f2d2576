"""Other libraries as baselines: small adapters, none of them required.

An adapter is a module of this package with

* ``PACKAGE`` and ``INSTALL``: the distribution that has to be installed, and how;
* ``operations()``: imports the library and returns what the ways below call;
* ``WAYS``: task -> way -> ``prepare(operations, a, b, operands)`` (see ``verifier.baselines.Prepared``);
* ``LEFT_OUT``: task -> why the library has no counterpart of it.

A library whose pins disagree with ours can be installed into a folder of its own
(``pip install --no-deps --target DIR``) that ``CODA_BASELINES_PATH`` names; only the GPU worker sees it.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from importlib import metadata
from types import ModuleType

import torch

from reference_kernels.tasks import Task
from verifier.baselines import PYTORCH, Prepare, Unavailable

ADAPTERS = ("liger", "flashinfer", "coda")
PATH_VARIABLE = "CODA_BASELINES_PATH"


def load(name: str, task: Task, act: torch.dtype) -> tuple[dict[str, Prepare], str]:
    """The ways in which library ``name`` computes ``task``, and its version.

    Raises:
        Unavailable: no such adapter, not installed, no counterpart of the task, or the import failed.
    """
    if name not in ADAPTERS:
        known = ", ".join(f"{n} ({state})" for n, state in available().items())
        raise Unavailable(f"no baseline {name!r}; there are: {known}")
    adapter, version = _adapter(name), installed(name)
    if version is None:
        raise Unavailable(f"not installed: {adapter.INSTALL}")
    if task.name not in adapter.WAYS:
        raise Unavailable(adapter.LEFT_OUT.get(task.name, f"{adapter.PACKAGE} has no counterpart of {task.name}"))
    for folder in reversed(_folders()):
        if folder not in sys.path:
            sys.path.insert(0, folder)
            # libraries that compile in processes of their own import themselves there
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    try:
        operations = adapter.operations()
    except Exception as e:  # whatever importing a library may raise
        raise Unavailable(f"{adapter.PACKAGE} {version} cannot be imported: {type(e).__name__}: {e}") from e
    ways = {way: partial(prepare, operations) for way, prepare in adapter.WAYS[task.name].items()}
    return ways, f"{adapter.PACKAGE} {version}"


def installed(name: str) -> str | None:
    """Version of the library behind adapter ``name``, or None; imports nothing of it."""
    return version_of(_adapter(name).PACKAGE)


def version_of(package: str) -> str | None:
    found = next(iter(metadata.distributions(name=package, path=[*_folders(), *sys.path])), None)
    return found.version if found else None


def available() -> dict[str, str]:
    """Every baseline that can be asked for: its package and version, or how to install it."""
    states = {n: f"torch {torch.__version__}" for n in ("gemm", *PYTORCH)}
    for name in ADAPTERS:
        adapter, version = _adapter(name), installed(name)
        states[name] = f"{adapter.PACKAGE} {version}" if version else f"not installed: {adapter.INSTALL}"
    return states


def _adapter(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def _folders() -> list[str]:
    return [f for f in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if f]
