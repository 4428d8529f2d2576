"""Shapes, finalisers of partial results and the traffic model, against numbers by hand."""

import math

import pytest
import torch

from primitives import (
    ColVecLoad,
    ColVecReduce,
    ColVecSelect,
    HeadRstd,
    OnlineLSEReduce,
    RowVecLoad,
    RowVecReduce,
    Scalar,
    TileLoad,
    TileStore,
)
from primitives.shapes import finish, partial_shape, shape_of, traffic


@pytest.mark.parametrize(
    "kind, finished, partial",
    [
        (ColVecReduce(), (200,), (200, 3)),
        (ColVecReduce(combine="max"), (200,), (200, 3)),
        (OnlineLSEReduce(), (200,), (200, 3)),
        (RowVecReduce(), (272,), (4, 272)),
        (ColVecSelect(), (200,), (200,)),
        (TileStore(width=0.5), (200, 136), (200, 136)),
        (TileStore(width=2), (200, 544), (200, 544)),
        (TileLoad(width=2), (200, 544), (200, 544)),
        (RowVecLoad(), (272,), (272,)),
        (ColVecLoad(), (200,), (200,)),
        (Scalar(), (), ()),
        (HeadRstd(), (), ()),
    ],
)
def test_shapes(kind, finished, partial):
    assert shape_of(kind, 200, 272) == finished
    assert partial_shape(kind, 200, 272, 64, 128) == partial
    assert partial_shape(ColVecReduce(), 200, 272, 64, 272) == (200, 1)
    assert partial_shape(RowVecReduce(), 192, 272, 64, 128) == (3, 272)


PARTIALS = torch.tensor([[1.0, 2.0, -3.0], [4.0, 5.0, 6.0]])


@pytest.mark.parametrize(
    "kind, partials, want",
    [
        (ColVecReduce(), PARTIALS, [0, 15]),
        (ColVecReduce(combine="max"), PARTIALS, [2, 6]),
        (RowVecReduce(), PARTIALS, [5, 7, 3]),
        (RowVecReduce(combine="max_abs"), PARTIALS.abs(), [4, 5, 6]),
        (OnlineLSEReduce(), torch.tensor([[1.0, 3.0], [0.5, 0.0], [0.0, 0.0]]).log(), [math.log(4), math.log(0.5), -math.inf]),
        (OnlineLSEReduce(), torch.tensor([[1000.0, 1000.0]]), [1000 + math.log(2)]),
        (ColVecSelect(), PARTIALS[0], [1, 2, -3]),
    ],
)
def test_finish(kind, partials, want):
    torch.testing.assert_close(finish(kind, partials), torch.tensor(want, dtype=torch.float32), rtol=1e-7, atol=0)


BF16, FP32 = torch.bfloat16, torch.float32
RESIDUAL_NORM = {
    "residual": (TileLoad(), BF16), "weight": (RowVecLoad(), BF16), "h": (TileStore(), BF16),
    "y": (TileStore(), BF16), "sumsq": (ColVecReduce(), FP32),
}  # fmt: skip
SWIGLU_BWD = {
    "z": (TileLoad(width=2), BF16), "dz": (TileStore(width=2), BF16), "y": (TileStore(), BF16),
    "zdz": (ColVecReduce(), FP32), "alpha": (Scalar(), FP32), "r": (HeadRstd(), FP32),
}  # fmt: skip
CROSS_ENTROPY = {
    "target": (ColVecLoad(), torch.int32), "logit": (ColVecSelect(), FP32), "lse": (OnlineLSEReduce(), FP32),
    "half": (TileStore(width=0.5), BF16), "dw": (RowVecReduce(), FP32),
}  # fmt: skip


def traffic_of(declared, m, n, k):
    return traffic({x: d[0] for x, d in declared.items()}, {x: d[1] for x, d in declared.items()}, BF16, m, n, k)


@pytest.mark.parametrize(
    "declared, reads, writes",
    [
        (RESIDUAL_NORM, {"residual": 108800, "weight": 544}, {"h": 108800, "y": 108800, "sumsq": 800}),
        (SWIGLU_BWD, {"z": 217600}, {"dz": 217600, "y": 108800, "zdz": 800}),
        (CROSS_ENTROPY, {"target": 800}, {"logit": 800, "lse": 800, "half": 54400, "dw": 1088}),
    ],
)
def test_traffic_by_hand(declared, reads, writes):
    t = traffic_of(declared, 200, 272, 136)
    assert t.reads == {"A": 54400, "B": 73984, **reads} and t.writes == writes
    assert t.flops == 14796800
    assert t.bytes == 128384 + sum(reads.values()) + sum(writes.values())


def test_floor_is_the_larger_of_compute_and_traffic():
    t = traffic_of(RESIDUAL_NORM, 200, 272, 136)
    assert t.bytes == 456128
    assert t.floor_us(flops_per_s=1e12, bytes_per_s=1e15) == pytest.approx(14.7968)
    assert t.floor_us(flops_per_s=1e18, bytes_per_s=1e12) == pytest.approx(0.456128)
