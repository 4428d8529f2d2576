"""Finaliser of log-sum-exp partials on the GPU: one launch instead of PyTorch's five."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 32


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
