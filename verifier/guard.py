"""Tensors between two guard bands: what a kernel writes outside of them shows, and what it reads there is NaN.

A launch gets tensors that lie inside larger allocations. Both bands are filled with ones, bit by
bit: NaN in every floating-point dtype, -1 in int32. A band does not change the alignment.
"""

from __future__ import annotations

import torch
from torch import Tensor

BAND = 1 << 16  # bytes; a multiple of every alignment that TMA or a vector access asks for
_STEP = 256  # whole allocations are multiples of this
_FILL = 0xFF


class Guarded:
    """One tensor of any dtype, shape and dense layout, with a band of ``BAND`` bytes before and at least as much after.

    Attributes:
        tensor: uninitialised; the element after its last one is the first of the band.
    """

    def __init__(self, shape, dtype: torch.dtype, device, stride=None):
        shape = torch.Size(shape)
        stride = torch.empty(shape, device="meta").stride() if stride is None else stride
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if shape.numel() else 0
        size = count * dtype.itemsize
        whole = torch.full((BAND + -(-size // _STEP) * _STEP + BAND,), _FILL, dtype=torch.uint8, device=device)
        self._before, self._after = whole[:BAND], whole[BAND + size :]
        self.tensor = whole[BAND : BAND + size].view(dtype).as_strided(shape, stride)

    @classmethod
    def copy(cls, t: Tensor) -> Guarded:
        """``t`` between bands, in its layout (a transposed view stays one)."""
        guarded = cls(t.shape, t.dtype, t.device, t.stride())
        guarded.tensor.copy_(t)
        return guarded

    def damage(self) -> str:
        """Where a band was written, or an empty string."""
        places = []
        before, after = ((band != _FILL).nonzero() for band in (self._before, self._after))
        if len(before):
            places.append(f"before its start, first {BAND - int(before[0])} bytes before it")
        if len(after):
            places.append(f"after its end, first at byte offset {int(after[0])}")
        return f"written outside the tensor ({'; '.join(places)})" if places else ""


def first_damage(guards: dict[str, Guarded]) -> str:
    """The first damaged tensor and where, or an empty string."""
    return next((f"{name}: {where}" for name, g in guards.items() if (where := g.damage())), "")
