"""Runs probes of the tips log: ``python -m agent.probe FILE...``, one JSON line per file.

Every probe is a script with a namespace of its own; they share this process, so that
PyTorch and the compile worker are started once. A probe fails by raising.
"""

from __future__ import annotations

import functools
import json
import re
import runpy
import sys
from contextlib import redirect_stdout

from primitives import KINDS, VOCABULARY
from verifier.check import DEFAULT_CONFIG
from verifier.pool import Pool
from verifier.resources import read_resources


@functools.lru_cache(maxsize=1)
def _pool() -> Pool:
    return Pool().__enter__()


def kernel(expression: str, **operands: str) -> str:
    """A kernel file that stores ``expression`` of ``acc`` and fp32 operands, given as name -> kind."""
    names = {n for n in re.findall(r"\w+", expression) if n in VOCABULARY} | set(operands.values())
    imports = ", ".join(sorted(names | {"TileStore", "epilogue"}))
    declared = "".join(f"{name}={kind}(), " for name, kind in operands.items())
    parameters = ", ".join(("acc", *operands))
    return f"from primitives import {imports}\n\n@epilogue({declared}y=TileStore())\ndef f({parameters}):\n    return {{'y': {expression}}}\n"


def compiled(expression: str, **operands: str) -> dict | None:
    """Resources of the compiled :func:`kernel`, None when it does not compile."""
    assert set(operands.values()) <= set(KINDS)
    dtypes = {name: "fp32" for name in operands} | {"y": "bf16"}
    job = _pool().submit(
        "compile", kernel(expression, **operands), act="bf16", dtypes=dtypes, config=DEFAULT_CONFIG, b_major="n"
    )
    answer = job.result()
    return read_resources(answer.directory / "kernel.o") if answer.ok else None


def mufu(expression: str, **operands: str) -> int:
    """Special-function instructions of the compiled kernel, over all unrolled elements of a thread."""
    return sum(compiled(expression, **operands)["mufu"].values())


def main() -> None:
    for path in sys.argv[1:]:
        said = None
        try:
            with redirect_stdout(sys.stderr):
                runpy.run_path(path)
        except SystemExit as e:
            said = str(e.code) if e.code else None
        except Exception as e:
            said = f"{type(e).__name__}: {e}"
        print(json.dumps({"file": path, "failed": said}), flush=True)
    if _pool.cache_info().currsize:
        _pool().close()


if __name__ == "__main__":
    # probes import this module by name: run that copy, so that there is one worker and not two
    from agent.probe import main as run

    run()
