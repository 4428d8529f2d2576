"""Pairs: two neighbouring columns (2j, 2j+1) handled as one value.

Gate/up columns of a SwiGLU and the two halves of a RoPE rotation are stored
interleaved so that both members of a pair land in the registers of the same
thread of the Hopper accumulator. A kernel that declares ``pairs="acc"`` or
``pairs="tile"`` receives such values as a :class:`Pair`.
"""

from __future__ import annotations

from typing import Any


class Pair(tuple):
    """Two lanes ``(a, b)``; ``+ - * /`` and unary minus act lane by lane.

    A plain value broadcasts to both lanes: ``pair * rstd`` scales both.
    """

    __slots__ = ()

    def __new__(cls, a: Any, b: Any) -> "Pair":
        return tuple.__new__(cls, (a, b))

    @staticmethod
    def lanes(value: Any) -> tuple:
        """``(a, b)`` of a pair, ``(value, value)`` of anything else."""
        return tuple(value) if isinstance(value, Pair) else (value, value)

    def __add__(self, other):
        b = Pair.lanes(other)
        return Pair(self[0] + b[0], self[1] + b[1])

    __radd__ = __add__

    def __mul__(self, other):
        b = Pair.lanes(other)
        return Pair(self[0] * b[0], self[1] * b[1])

    __rmul__ = __mul__

    def __sub__(self, other):
        b = Pair.lanes(other)
        return Pair(self[0] - b[0], self[1] - b[1])

    def __rsub__(self, other):
        b = Pair.lanes(other)
        return Pair(b[0] - self[0], b[1] - self[1])

    def __truediv__(self, other):
        b = Pair.lanes(other)
        return Pair(self[0] / b[0], self[1] / b[1])

    def __rtruediv__(self, other):
        b = Pair.lanes(other)
        return Pair(b[0] / self[0], b[1] / self[1])

    def __neg__(self):
        return Pair(-self[0], -self[1])

    # comparisons are lane by lane too (a condition for where()), not the order of tuples
    def __lt__(self, other):
        b = Pair.lanes(other)
        return Pair(self[0] < b[0], self[1] < b[1])

    def __le__(self, other):
        b = Pair.lanes(other)
        return Pair(self[0] <= b[0], self[1] <= b[1])

    def __gt__(self, other):
        b = Pair.lanes(other)
        return Pair(self[0] > b[0], self[1] > b[1])

    def __ge__(self, other):
        b = Pair.lanes(other)
        return Pair(self[0] >= b[0], self[1] >= b[1])


def pack(a: Any, b: Any) -> Pair:
    """Join two lanes into a pair (column 2j gets ``a``, column 2j+1 gets ``b``)."""
    return Pair(a, b)


def unpack(value: Pair) -> tuple:
    """Split a pair into its two lanes.

    Raises:
        TypeError: the value is not a pair; the kernel did not declare ``pairs=``.
    """
    if not isinstance(value, Pair):
        raise TypeError(
            "unpack() needs a pair: declare pairs='acc' (neighbouring accumulator columns) "
            "or pairs='tile' (a TileLoad(width=2) operand) in @epilogue(...)"
        )
    return value[0], value[1]
