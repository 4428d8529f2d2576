"""Shapes, traffic and floor that follow from declarations alone.

The traffic model counts each operand read once and each output written once
(finished reductions, not partials), plus A and B read once: the least any
kernel can move. ``floor`` turns it into the time no kernel beats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

import torch

from . import declare
from .declare import Kind


def shape_of(kind: Kind, m: int, n: int) -> tuple[int, ...]:
    """Shape of a declared operand or finished output for a GEMM of ``m`` x ``n``."""
    if isinstance(kind, declare.RowVecLoad | declare.RowVecReduce):
        return (n,)
    if isinstance(kind, (declare.ColVecLoad, *declare.ROW_RESULTS)):
        return (m,)
    if isinstance(kind, declare.TileLoad | declare.TileStore):
        return (m, int(n * kind.width))
    return ()  # Scalar, HeadRstd


def partial_shape(kind: Kind, m: int, n: int, tile_m: int, tile_n: int) -> tuple[int, ...]:
    """Shape of the fp32 buffer the kernel writes: one partial per CTA tile along the reduced axis."""
    if isinstance(kind, declare.ColVecReduce | declare.OnlineLSEReduce):
        return (m, -(-n // tile_n))
    if isinstance(kind, declare.RowVecReduce):
        return (-(-m // tile_m), n)
    return shape_of(kind, m, n)


def finish(kind: Kind, partials: torch.Tensor) -> torch.Tensor:
    """Fold per-tile partials into the finished value (the finaliser, any device)."""
    if isinstance(kind, declare.OnlineLSEReduce):
        if partials.is_cuda:
            from .device.finish import logsumexp_rows

            return logsumexp_rows(partials)
        return torch.logsumexp(partials, dim=-1)
    if isinstance(kind, declare.ColVecReduce | declare.RowVecReduce):
        rows, largest = isinstance(kind, declare.ColVecReduce), kind.combine != "add"
        if partials.is_cuda:
            from .device import finish as device

            return (device.reduce_rows if rows else device.reduce_columns)(partials, largest)
        axis = -1 if rows else 0
        return partials.amax(axis) if largest else partials.sum(axis)
    return partials


@dataclass(frozen=True)
class Traffic:
    """Bytes per tensor and matmul FLOPs of one call."""

    reads: dict[str, int]
    writes: dict[str, int]
    flops: int

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    def floor_us(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Microseconds below which no kernel can be: max(compute, traffic) at measured rates."""
        return 1e6 * max(self.flops / flops_per_s, self.bytes / bytes_per_s)


def traffic(
    kinds: Mapping[str, Kind], dtypes: Mapping[str, torch.dtype], act: torch.dtype, m: int, n: int, k: int
) -> Traffic:
    """Traffic of ``acc = A(m,k) @ B(k,n)`` with the declared operands and outputs."""
    reads = {"A": m * k * act.itemsize, "B": k * n * act.itemsize}
    writes: dict[str, int] = {}
    for name, kind in kinds.items():
        size = torch.Size(shape_of(kind, m, n)).numel() * dtypes[name].itemsize
        if isinstance(kind, declare.HeadRstd | declare.Scalar):
            continue  # no tensor crosses
        (reads if kind.is_operand else writes)[name] = size
    return Traffic(reads, writes, 2 * m * n * k)
