"""Declarations: what a kernel reads, what it writes, and the traced function.

A kernel is ``@epilogue(name=Kind(), ...)`` around one function
``fn(acc, **operands) -> {output: value}``. Every operand and output names its
kind, so nothing is inferred from shapes and ``M == N`` is never ambiguous.
Shapes below use M, N of the GEMM ``acc = A @ B``; dtypes come from the task.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar


RESERVED = frozenset({"acc", "A", "B", "C", "D", "a", "b"})  # the GEMM's own tensors


class DeclarationError(ValueError):
    """A kernel's declarations contradict each other; the message says what to change."""


@dataclass(frozen=True)
class Kind:
    """Base of every declared operand or output."""

    family: ClassVar[str] = ""
    is_operand: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """Kind name as it is written in a kernel file."""
        return type(self).__name__


# --- operands ---------------------------------------------------------------


@dataclass(frozen=True)
class RowVecLoad(Kind):
    """Row vector ``(N,)``, broadcast along M (norm weight, bias, frequencies)."""

    family: ClassVar[str] = "vector"
    is_operand: ClassVar[bool] = True


@dataclass(frozen=True)
class ColVecLoad(Kind):
    """Column vector ``(M,)``, broadcast along N (rstd, statistics, positions)."""

    family: ClassVar[str] = "vector"
    is_operand: ClassVar[bool] = True


@dataclass(frozen=True)
class Scalar(Kind):
    """One fp32 number given at launch (alpha, a loss scale)."""

    family: ClassVar[str] = "vector"
    is_operand: ClassVar[bool] = True


@dataclass(frozen=True)
class TileLoad(Kind):
    """Matrix operand. ``width=1``: ``(M, N)``; ``width=2``: ``(M, 2N)``, 16-bit, read as pairs."""

    width: int = 1
    family: ClassVar[str] = "tile"
    is_operand: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.width not in (1, 2):
            raise DeclarationError(f"TileLoad(width={self.width!r}): width must be 1 or 2")


@dataclass(frozen=True)
class HeadRstd(Kind):
    """Per-(row, head) ``rsqrt(mean(acc^2) + eps)`` over each ``head_dim`` columns of the raw accumulator."""

    head_dim: int = 128
    eps: float = 1e-6
    family: ClassVar[str] = "stateful"
    is_operand: ClassVar[bool] = True


# --- outputs ----------------------------------------------------------------


@dataclass(frozen=True)
class TileStore(Kind):
    """Matrix output. ``width=1``: ``(M, N)``; ``1/2``: ``(M, N/2)``, one value per pair; ``2``: ``(M, 2N)``, pairs."""

    width: float = 1
    family: ClassVar[str] = "tile"

    def __post_init__(self) -> None:
        if self.width not in (1, 2, 0.5):
            raise DeclarationError(f"TileStore(width={self.width!r}): width must be 1/2, 1 or 2")


_COMBINES = ("add", "max", "max_abs")


@dataclass(frozen=True)
class _Reduce(Kind):
    combine: str = "add"
    product: bool = False
    family: ClassVar[str] = "reduce"

    def __post_init__(self) -> None:
        if self.combine not in _COMBINES:
            raise DeclarationError(f"{self.label}(combine={self.combine!r}): choose one of {_COMBINES}")
        if self.product and self.combine != "add":
            raise DeclarationError(f"{self.label}: product=True needs combine='add'")


@dataclass(frozen=True)
class ColVecReduce(_Reduce):
    """Reduce along N: one fp32 per row, ``(M,)``. ``product=True``: the function returns two factors."""


@dataclass(frozen=True)
class RowVecReduce(_Reduce):
    """Reduce along M: one fp32 per column, ``(N,)``. ``product=True``: the function returns two factors."""


@dataclass(frozen=True)
class OnlineLSEReduce(Kind):
    """Online log-sum-exp along N (running max and sum): fp32 ``(M,)``."""

    family: ClassVar[str] = "stateful"


@dataclass(frozen=True)
class ColVecSelect(Kind):
    """Value at column ``index[m]`` of each row: fp32 ``(M,)``.

    ``index`` names an int32 operand ``(M,)`` that the function does not see;
    rows whose index is outside ``[0, N)`` keep the fill value NaN.
    """

    index: str = "target"
    family: ClassVar[str] = "stateful"


OPERAND_KINDS = (RowVecLoad, ColVecLoad, Scalar, TileLoad, HeadRstd)
OUTPUT_KINDS = (TileStore, ColVecReduce, RowVecReduce, OnlineLSEReduce, ColVecSelect)
ROW_RESULTS = (ColVecReduce, OnlineLSEReduce, ColVecSelect)  # results of shape (M,)


# --- the program ------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """One declared epilogue: the traced function plus its operands and outputs."""

    fn: Callable[..., dict]
    operands: dict[str, Kind]
    outputs: dict[str, Kind]
    pairs: str | None = None
    doc: str = ""
    index_operands: dict[str, str] = field(default_factory=dict)  # index operand -> select output

    @property
    def name(self) -> str:
        return self.fn.__name__

    @property
    def tile_stores(self) -> dict[str, TileStore]:
        return {n: k for n, k in self.outputs.items() if isinstance(k, TileStore)}

    @property
    def sinks(self) -> dict[str, Kind]:
        """Outputs that are reductions or selections, in declared order."""
        return {n: k for n, k in self.outputs.items() if not isinstance(k, TileStore)}

    def describe(self) -> dict[str, Any]:
        """The declarations as plain data: what crosses process boundaries instead of code."""

        def plain(kinds: dict[str, Kind]) -> dict:
            return {n: {"kind": k.label, **vars(k)} for n, k in kinds.items()}

        return {
            "name": self.name,
            "doc": self.doc,
            "pairs": self.pairs,
            "operands": plain(self.operands),
            "outputs": plain(self.outputs),
            "index": dict(self.index_operands),
        }

    @staticmethod
    def from_description(description: dict[str, Any]) -> "Program":
        """A program that can be launched or compared but not traced (the inverse of ``describe``)."""

        def kinds(plain: dict) -> dict[str, Kind]:
            out = {}
            for name, options in plain.items():
                cls = {k.__name__: k for k in (*OPERAND_KINDS, *OUTPUT_KINDS)}[options["kind"]]
                out[name] = cls(**{k: v for k, v in options.items() if k != "kind"})
            return out

        def untraceable(acc, **operands):
            raise DeclarationError("this program was rebuilt from its declarations and has no function")

        untraceable.__name__ = description["name"]
        return Program(
            untraceable,
            kinds(description["operands"]),
            kinds(description["outputs"]),
            description["pairs"],
            description.get("doc", ""),
            dict(description["index"]),
        )

    def result(self, value: Any) -> dict:
        """Check what the traced function returned against the declared outputs.

        Raises:
            DeclarationError: not a dict, or its keys differ from the declared outputs.
        """
        if not isinstance(value, dict):
            raise DeclarationError(
                f"{self.name}() must return a dict {{output: value}}, got {type(value).__name__}"
            )
        missing, extra = set(self.outputs) - set(value), set(value) - set(self.outputs)
        if missing or extra:
            raise DeclarationError(
                f"{self.name}() returns {sorted(value)} but declares {sorted(self.outputs)}"
                + (f"; missing {sorted(missing)}" if missing else "")
                + (f"; not declared {sorted(extra)}" if extra else "")
            )
        return value


def epilogue(*, pairs: str | None = None, **declarations: Kind) -> Callable[[Callable], Program]:
    """Declare a kernel: ``@epilogue(rstd=ColVecLoad(), y=TileStore())``.

    Args:
        pairs: ``"acc"`` hands the function neighbouring accumulator columns as a
            pair (and full-width tiles and row vectors too); ``"tile"`` keeps the
            accumulator single and reads the one ``TileLoad(width=2)`` as pairs.
        **declarations: operand and output kinds by name. The function's
            parameters after ``acc`` are the operands, its dict keys the outputs.

    Raises:
        DeclarationError: a parameter without a declaration, an unused
            declaration, or widths that do not fit ``pairs``.
    """

    def wrap(fn: Callable) -> Program:
        return _build(fn, pairs, declarations)

    return wrap


def _build(fn: Callable, pairs: str | None, declarations: dict[str, Kind]) -> Program:
    where = f"@epilogue on {fn.__name__}()"
    if pairs not in (None, "acc", "tile"):
        raise DeclarationError(f"{where}: pairs={pairs!r}; choose 'acc', 'tile' or leave it out")
    for name, kind in declarations.items():
        if not isinstance(kind, Kind):
            raise DeclarationError(
                f"{where}: {name}={kind!r} is not a kind; write e.g. {name}=TileLoad()"
            )
        if name in RESERVED:
            raise DeclarationError(f"{where}: {name!r} is a name of the GEMM itself, rename it")
    operands = {n: k for n, k in declarations.items() if k.is_operand}
    outputs = {n: k for n, k in declarations.items() if not k.is_operand}
    index = {k.index: n for n, k in outputs.items() if isinstance(k, ColVecSelect)}
    params = list(inspect.signature(fn).parameters.values())
    if not params or params[0].name != "acc":
        raise DeclarationError(f"{where}: the first parameter must be acc")
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD or p.default is not p.empty for p in params):
        raise DeclarationError(f"{where}: plain parameters only (no defaults, *args or **kwargs)")
    names = [p.name for p in params[1:]]
    undeclared = [n for n in names if n not in operands]
    if undeclared:
        raise DeclarationError(
            f"{where}: parameter(s) {undeclared} not declared; add e.g. {undeclared[0]}=ColVecLoad()"
        )
    hidden = [n for n in index if n in names or n in operands]
    if hidden:
        raise DeclarationError(
            f"{where}: {hidden} is read by ColVecSelect itself; neither declare it nor make it a parameter"
        )
    unused = [n for n in operands if n not in names]
    if unused:
        raise DeclarationError(f"{where}: operand(s) {unused} declared but not parameters")
    if not outputs:
        raise DeclarationError(f"{where}: declares no output")
    _check_pairs(where, pairs, operands, outputs)
    ordered = {n: operands[n] for n in names}
    return Program(fn, ordered, outputs, pairs, inspect.getdoc(fn) or "", index)


def _check_pairs(where: str, pairs: str | None, operands: dict, outputs: dict) -> None:
    """Which widths are possible in which pairing (quack's epilogue modes)."""
    stores = [k.width for k in outputs.values() if isinstance(k, TileStore)]
    wide_loads = sum(isinstance(k, TileLoad) and k.width == 2 for k in operands.values())
    if pairs is None and (wide_loads or any(w != 1 for w in stores)):
        raise DeclarationError(f"{where}: widths other than 1 need pairs='acc' or pairs='tile'")
    if pairs == "acc":
        if wide_loads or 2 in stores:
            raise DeclarationError(f"{where}: width=2 needs pairs='tile'")
        if any(isinstance(k, _Reduce) and k.product for k in outputs.values()):
            raise DeclarationError(f"{where}: product=True is not available with pairs='acc'")
        if any(isinstance(k, (OnlineLSEReduce, ColVecSelect)) for k in outputs.values()):
            raise DeclarationError(f"{where}: OnlineLSEReduce/ColVecSelect need pairs=None")
    if pairs == "tile":
        if 0.5 in stores:
            raise DeclarationError(f"{where}: width=1/2 needs pairs='acc'")
        if wide_loads != 1 or stores.count(2) != 1:
            raise DeclarationError(
                f"{where}: pairs='tile' needs exactly one TileLoad(width=2) and one TileStore(width=2)"
            )
    if pairs is not None and any(isinstance(k, HeadRstd) for k in operands.values()) and pairs == "tile":
        raise DeclarationError(f"{where}: HeadRstd is not available with pairs='tile'")
