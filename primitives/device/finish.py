"""Finalisers of per-tile partials on the GPU, one launch each.

PyTorch's own reductions of these thin matrices take two to five times as long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 32
_COLUMNS = 64


# Triton's own max drops a NaN that meets a number; PyTorch's keeps it
@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rows_kernel(partials, out, rows, tiles, stride, MAX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    identity = float("-inf") if MAX else 0.0
    total = tl.full((BLOCK_M,), identity, tl.float32)
    for start in range(0, tiles, BLOCK_T):
        col = start + tl.arange(0, BLOCK_T)
        inside = (row[:, None] < rows) & (col[None, :] < tiles)
        x = tl.load(partials + row[:, None] * stride + col[None, :], mask=inside, other=identity)
        total = _larger(total, tl.reduce(x, 1, _larger)) if MAX else total + tl.sum(x, 1)
    tl.store(out + row, total, mask=row < rows)


@triton.jit
def _columns_kernel(partials, out, tiles, cols, stride, MAX: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    identity = float("-inf") if MAX else 0.0
    total = tl.full((BLOCK_N,), identity, tl.float32)
    for start in range(0, tiles, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        inside = (tile[:, None] < tiles) & (col[None, :] < cols)
        x = tl.load(partials + tile[:, None] * stride + col[None, :], mask=inside, other=identity)
        total = _larger(total, tl.reduce(x, 0, _larger)) if MAX else total + tl.sum(x, 0)
    tl.store(out + col, total, mask=col < cols)


def reduce_rows(partials: torch.Tensor, largest: bool) -> torch.Tensor:
    """Sum (or maximum) over tiles: fp32 ``(M, tiles)`` -> ``(M,)``."""
    rows, tiles = partials.shape
    out = torch.empty(rows, device=partials.device, dtype=torch.float32)
    block = min(128, triton.next_power_of_2(tiles))
    grid = (triton.cdiv(rows, _ROWS),)
    _rows_kernel[grid](partials, out, rows, tiles, partials.stride(0), MAX=largest, BLOCK_M=_ROWS, BLOCK_T=block)
    return out


def reduce_columns(partials: torch.Tensor, largest: bool) -> torch.Tensor:
    """Sum (or maximum) over tiles: fp32 ``(tiles, N)`` -> ``(N,)``."""
    tiles, cols = partials.shape
    out = torch.empty(cols, device=partials.device, dtype=torch.float32)
    block = min(64, triton.next_power_of_2(tiles))
    grid = (triton.cdiv(cols, _COLUMNS),)
    _columns_kernel[grid](partials, out, tiles, cols, partials.stride(0), MAX=largest, BLOCK_T=block, BLOCK_N=_COLUMNS)
    return out


@triton.jit
def _lse_kernel(partials, out, rows, tiles, stride, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, tiles, BLOCK_T):
        col = start + tl.arange(0, BLOCK_T)
        inside = (row[:, None] < rows) & (col[None, :] < tiles)
        x = tl.load(partials + row[:, None] * stride + col[None, :], mask=inside, other=float("-inf"))
        new = tl.maximum(peak, tl.max(x, 1))
        # an all -inf prefix would make (-inf) - (-inf) = NaN; subtract 0 instead
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(x - base[:, None]), 1)
        peak = new
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(out + row, tl.log(total) + base, mask=row < rows)


def logsumexp_rows(partials: torch.Tensor) -> torch.Tensor:
    """log sum_t exp(partials[m, t]): fp32 ``(M, tiles)`` -> ``(M,)``; a row of -inf gives -inf."""
    rows, tiles = partials.shape
    out = torch.empty(rows, device=partials.device, dtype=torch.float32)
    block = min(128, triton.next_power_of_2(tiles))
    grid = (triton.cdiv(rows, _ROWS),)
    _lse_kernel[grid](partials, out, rows, tiles, partials.stride(0), BLOCK_M=_ROWS, BLOCK_T=block)
    return out
