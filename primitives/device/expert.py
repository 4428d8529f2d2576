"""Compile one of quack's own epilogues to an object file (trusted code, no candidate)."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from . import arch

import torch
from quack.gemm_config import GemmConfig
from quack.gemm_runtime import host

from .lower import LAUNCH, SYMBOL

# any shape will do (the compiled kernel is shape-generic); M != N keeps quack's inference unambiguous
_M, _N, _K = 256, 512, 64


def compile_expert(spec: dict, path: Path) -> dict:
    """Compile the library epilogue named by ``spec``.

    Args:
        spec: ``epilogue`` and ``arguments`` (library names), ``config``, ``act``,
            ``b_major``, and ``values``: quack argument -> (role, dtype name), where
            role is row, col, tile, wide, half, index, colreduce, rowreduce or select.

    Returns:
        Launch description as ``lower.compile_object`` gives it.
    """
    host.get_max_active_clusters = arch.max_active_clusters  # no driver here
    host.compile_gemm_kernel = _without_pdl(host.compile_gemm_kernel)
    module, _, name = spec["epilogue"].partition(":")
    mod = getattr(importlib.import_module(f"quack.epilogue.{module}"), name)
    if spec["arguments"]:
        mod = mod(**spec["arguments"])
    act = getattr(torch, spec["act"])
    config = spec["config"]
    tiles_m, tiles_n = -(-_M // config["tile_m"]), -(-_N // config["tile_n"])
    shapes = {
        "row": (_N,), "col": (_M,), "index": (_M,), "select": (_M,), "tile": (_M, _N), "wide": (_M, 2 * _N),
        "half": (_M, _N // 2), "colreduce": (_M, tiles_n), "rowreduce": (tiles_m, _N),
    }  # fmt: skip
    values = {n: torch.empty(shapes[role], dtype=getattr(torch, d)) for n, (role, d) in spec["values"].items()}
    b = torch.empty(_K, _N, dtype=act) if spec["b_major"] == "n" else torch.empty(_N, _K, dtype=act).mT
    out = {n: values.pop(n) for n in ("D", *mod.outputs) if n in values}
    c = values.pop("C", None)
    plan = mod.plan(
        torch.empty(_M, _K, dtype=act),
        b,
        c,
        out=out,
        config=GemmConfig(is_dynamic_persistent=False, device_capacity=9, **config),
        **values,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    plan.gemm_plan.compiled_fn.export_to_c(object_file_path=str(path), function_name=SYMBOL)
    fields = [f for f in plan.gemm_plan.gemm_cls.EpilogueArguments._fields if not f.startswith("split_k")]
    return {"symbol": SYMBOL, "fields": fields, "d": "D" if "D" in out else None, "c": "C" if c is not None else None}


def _without_pdl(compile_gemm_kernel):
    """The same launch attributes as our own kernels (see ``lower.LAUNCH``)."""

    def post_init(gemm):
        for attribute, value in LAUNCH:
            setattr(gemm, attribute, value)

    return functools.partial(_with_both, compile_gemm_kernel, post_init)


def _with_both(compile_gemm_kernel, ours, *args, post_init=None, **kwargs):
    def both(gemm):
        if post_init is not None:
            post_init(gemm)
        ours(gemm)

    return compile_gemm_kernel(*args, post_init=both, **kwargs)
