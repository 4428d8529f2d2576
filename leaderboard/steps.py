"""Milliseconds per training step: what the measured kernels save in named models.

A step is the forward and backward pass over one micro-batch. Counted are the calls of
``models.yaml`` only; docs/leaderboard.md says what is left out. A shape that was not
measured is scaled from the nearest one that was: the bare GEMM's time by FLOPs, what a
kernel takes beyond it (or less) by the elements of its output, because that part does
not grow with K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from .board import Line, Shape, size_text
from .records import ResultsError

CONFIGURATIONS = Path(__file__).with_name("models.yaml")
AGAINST = ("torch.compile", "torch.compile:max-autotune")
Dimension = Annotated[str, Field(pattern=r"^(2 )?(hidden|ffn|qkv|attention|vocab)$")]


class Model(BaseModel):
    """Dimensions of a decoder-only Transformer; ``tokens`` is M of every GEMM."""

    model_config = ConfigDict(extra="forbid")
    tokens: PositiveInt
    hidden: PositiveInt
    ffn: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab: PositiveInt

    @property
    def attention(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def size(self, dimension: str) -> int:
        twice, _, name = dimension.rpartition(" ")
        return (2 if twice else 1) * getattr(self, name)


class Call(BaseModel):
    """One GEMM of a step."""

    model_config = ConfigDict(extra="forbid")
    what: str
    task: str
    per: Literal["layer", "step"]
    n: Dimension
    k: Dimension

    def shape(self, model: Model) -> Shape:
        return (model.tokens, model.size(self.n), model.size(self.k))

    def times(self, model: Model) -> int:
        return model.layers if self.per == "layer" else 1


class Configurations(BaseModel):
    model_config = ConfigDict(extra="forbid")
    models: dict[str, Model]
    calls: list[Call]


@dataclass(frozen=True)
class Part:
    """One call's share of a step, in milliseconds over all its repetitions."""

    what: str
    task: str
    shape: Shape
    times: int
    scaled_from: Shape | None  # None: this very shape was measured
    author: str
    fused_ms: float
    baseline_ms: float
    saved_ms: float


@dataclass(frozen=True)
class Estimate:
    """One model on one device against one baseline. The interval covers measuring noise, not the scaling."""

    model: str
    device: str
    tokens: int
    baseline: str
    parts: list[Part]
    missing: list[str]  # tasks without a measurement: there is no total then
    fused_ms: float | None = None
    baseline_ms: float | None = None
    saved_ms: float | None = None
    saved_low_ms: float | None = None
    saved_high_ms: float | None = None

    @property
    def saved_share(self) -> float | None:
        """Of the baseline's time in these calls, not of the whole step."""
        return self.saved_ms / self.baseline_ms if self.saved_ms is not None else None


def configurations(path: Path = CONFIGURATIONS) -> Configurations:
    """Models and calls.

    Raises:
        ResultsError: the file is not as it should be.
    """
    try:
        return Configurations.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise ResultsError(f"{path} is not a valid list of models: {e}") from e


def estimate(lines: list[Line], found: Configurations | None = None) -> list[Estimate]:
    """Every model on every device of the lines, against each of ``AGAINST`` that was timed anywhere."""
    found = found or configurations()
    return [
        _estimate(name, model, found.calls, [x for x in lines if x.device == device], device, baseline)
        for device in sorted({x.device for x in lines})
        for name, model in found.models.items()
        for baseline in AGAINST
        if any(baseline in x.cells for x in lines if x.device == device)
    ]


def _estimate(name: str, model: Model, calls: list[Call], lines: list[Line], device: str, baseline: str) -> Estimate:
    parts, missing = [], []
    noise: dict[int, list[float]] = {}  # line -> ms saved more at the ends of its interval: low, high
    for call in calls:
        shape = call.shape(model)
        usable = [x for x in lines if x.task == call.task and baseline in x.cells]
        if not usable:
            missing.append(call.task)
            continue
        line = min(usable, key=lambda x: (_distance(x.shape, shape), x.session))
        part, at_low, at_high = _part(call, model, line, baseline)
        parts.append(part)
        # the same measurement used for two calls errs in the same direction in both
        low, high = noise.get(id(line), (0.0, 0.0))
        noise[id(line)] = [low + part.saved_ms - at_low, high + at_high - part.saved_ms]
    base = Estimate(name, device, model.tokens, baseline, parts, sorted(set(missing)))
    if missing:
        return base
    saved = math.fsum(p.saved_ms for p in parts)
    low, high = (math.hypot(*(ends[i] for ends in noise.values())) for i in (0, 1))
    return Estimate(
        name, device, model.tokens, baseline, parts, [],
        fused_ms=math.fsum(p.fused_ms for p in parts), baseline_ms=math.fsum(p.baseline_ms for p in parts),
        saved_ms=saved, saved_low_ms=saved - low, saved_high_ms=saved + high,
    )  # fmt: skip


def _part(call: Call, model: Model, line: Line, baseline: str) -> tuple[Part, float, float]:
    """One call's part, and its saved milliseconds at both ends of the ratio's interval."""
    shape, (m, n, k), measured = call.shape(model), call.shape(model), line.shape
    by_flops = m * n * k / math.prod(measured)
    by_elements = m * n / (measured[0] * measured[1])
    gemm, ratio = line.cells["gemm"].us, line.cells[baseline].ratio
    times = call.times(model) * 1e-3

    def ms(us: float) -> float:
        return times * (gemm * by_flops + (us - gemm) * by_elements)

    def saved(factor: float) -> float:
        # what was saved, too, grows with the elements: the GEMM's own time is in both
        return times * by_elements * line.us * (factor - 1)

    part = Part(
        call.what, call.task, shape, call.times(model), None if shape == measured else measured, line.lead.author,
        fused_ms=ms(line.us), baseline_ms=ms(line.us) + saved(ratio.median), saved_ms=saved(ratio.median),
    )  # fmt: skip
    return part, saved(ratio.low), saved(ratio.high)


def _distance(a: Shape, b: Shape) -> float:
    return sum(abs(math.log(x / y)) for x, y in zip(a, b))


def to_measure(estimates: list[Estimate]) -> dict[str, list[str]]:
    """Task -> shapes that would replace scaling by measurement."""
    wanted: dict[str, set[Shape]] = {}
    for part in (p for e in estimates for p in e.parts if p.scaled_from):
        wanted.setdefault(part.task, set()).add(part.shape)
    return {task: [size_text(s) for s in sorted(shapes)] for task, shapes in sorted(wanted.items())}
