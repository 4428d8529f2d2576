"""The task specification: schema and loader of ``tasks.yaml`` (and of a user's own suite)."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

import primitives
from primitives import declare

DEFAULT_SUITE = Path(__file__).resolve().parent.parent / "tasks.yaml"
ACT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {**ACT_DTYPES, "fp32": torch.float32, "int32": torch.int32}
FILLS = ("normal", "rstd", "cos_sin", "position", "frequency", "target")
_OP_LINE = re.compile(r"^([a-z_][a-z0-9_]*)\s*=\s*([a-z_][a-z0-9_]*)\(([^()]*)\)$")
_NAME = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = declare.RESERVED | {"pairs"}  # the GEMM's own tensors and the option of @epilogue
_TMA_BYTES = 16  # TMA needs every row of a matrix to start at a multiple of 16 bytes

Size = Annotated[int, Field(ge=1, le=1 << 20)]
Shape = tuple[Size, Size, Size]


class SuiteError(ValueError):
    """The suite cannot be used; the message names file, line, field and reason."""


_USABLE = "an ASCII identifier (no Python keyword, no leading '__')"


def _usable(name: str) -> bool:
    """Can a kernel file use this name for a tensor, a value or its function?"""
    return bool(_NAME.fullmatch(name)) and not keyword.iskeyword(name)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorSpec(_Model):
    """One operand or output: its kind with the kind's own options, and its dtype."""

    kind: Literal[primitives.KINDS]
    dtype: Literal["act", "fp32", "int32"] | None = None
    fill: Literal[FILLS] = "normal"
    width: Literal[0.5, 1, 2] = 1
    combine: Literal["add", "max", "max_abs"] = "add"
    index: str | None = None
    head_dim: int = Field(default=128, ge=8, le=256)
    eps: float = 1e-6
    # an output's NaN and infinities: exactly where the fp64 reference has them, or any of them there
    special: Literal["propagate", "nonfinite"] = "propagate"

    @property
    def declared(self) -> declare.Kind:
        """The primitive this tensor must be declared as (reductions: up to ``product=``)."""
        cls = getattr(declare, self.kind)
        options = {
            "TileLoad": {"width": self.width},
            "TileStore": {"width": self.width},
            "ColVecReduce": {"combine": self.combine},
            "RowVecReduce": {"combine": self.combine},
            "ColVecSelect": {"index": self.index},
            "HeadRstd": {"head_dim": self.head_dim, "eps": self.eps},
        }.get(self.kind, {})
        return cls(**options)

    def torch_dtype(self, act: torch.dtype) -> torch.dtype:
        default = "act" if self.kind in ("TileLoad", "TileStore") else "fp32"
        name = self.dtype or default
        return act if name == "act" else DTYPES[name]


class OpLine(_Model):
    """``name = op(arguments)``: one Transformer operation of the task."""

    name: str
    op: str
    args: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.op}({', '.join(self.args)})"


class Task(_Model):
    """One fused operation: GEMM + ordered ops, operands, outputs, sizes, dtypes."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    summary: str
    math: str
    paper: int | None = Field(default=None, ge=1, le=10)
    b: Literal["kn", "nk"] = "kn"
    operands: dict[str, TensorSpec] = {}
    outputs: dict[str, TensorSpec] = Field(min_length=1)
    ops: tuple[OpLine, ...] = Field(min_length=1)
    reference: str | None = None
    dtypes: tuple[Literal["bf16", "fp16"], ...] = Field(min_length=1)
    timed: tuple[Shape, ...] = Field(min_length=1)
    ragged: tuple[Shape, ...] = Field(min_length=1)
    max_ratio: float = Field(default=2.0, gt=0)  # paper's rule: max error against the same-dtype reference
    mean_ratio: float = Field(default=1.5, gt=0)

    @field_validator("name")
    @classmethod
    def _names_a_function(cls, name: str) -> str:
        if not _usable(name) or name in primitives.VOCABULARY:
            raise ValueError(f"{name!r} is a Python keyword or the name of a primitive; the kernel could not have it")
        return name

    @field_validator("ops", mode="before")
    @classmethod
    def _parse_ops(cls, lines: Any) -> Any:
        if not isinstance(lines, (list, tuple)):
            raise ValueError("a list of 'name = op(arguments)' lines")
        parsed = []
        for line in lines:
            if isinstance(line, dict):  # a dumped task, on its way to another process
                parsed.append(OpLine.model_validate(line))
                continue
            match = _OP_LINE.match(line.strip()) if isinstance(line, str) else None
            if not match:
                raise ValueError(f"{line!r} is not of the form 'name = op(arguments)'")
            name, op, args = match.groups()
            parsed.append(OpLine(name=name, op=op, args=tuple(a.strip() for a in args.split(",") if a.strip())))
        return tuple(parsed)

    @model_validator(mode="after")
    def _consistent(self) -> Task:
        overlap = set(self.operands) & set(self.outputs)
        if overlap:
            raise ValueError(f"{sorted(overlap)} named both operand and output")
        for name in (*self.operands, *self.outputs):
            if name in _RESERVED or not _usable(name):
                raise ValueError(f"tensor name {name!r} is reserved or not {_USABLE}")
        for name, spec in self.operands.items():
            if not spec.declared.is_operand:
                raise ValueError(f"operand {name!r}: {spec.kind} is an output kind")
            if spec.special != "propagate":
                raise ValueError(f"operand {name!r}: 'special' is a rule for outputs")
        for name, spec in self.outputs.items():
            if spec.declared.is_operand:
                raise ValueError(f"output {name!r}: {spec.kind} is an operand kind")
            if spec.kind == "ColVecSelect":
                index = self.operands.get(spec.index or "")
                if index is None or index.dtype != "int32":
                    raise ValueError(f"output {name!r}: index must name an int32 operand")
        known = {"acc", *self.operands}
        for line in self.ops:
            unknown = [a for a in line.args if a not in known]
            if unknown:
                raise ValueError(f"op '{line}': {unknown} not defined before this line")
            if not _usable(line.name):
                raise ValueError(f"op '{line}': {line.name!r} is not {_USABLE}")
            if line.name in known:
                raise ValueError(f"op '{line}': {line.name!r} already defined")
            known.add(line.name)
        missing = set(self.outputs) - {line.name for line in self.ops}
        if missing:
            raise ValueError(f"no op produces output(s) {sorted(missing)}")
        for shape in (*self.timed, *self.ragged):
            self.check_shape(*shape)
        return self

    def check_shape(self, m: int, n: int, k: int) -> None:
        """Refuse shapes TMA cannot address.

        Raises:
            ValueError: a row of A, B or of a stored matrix is not a multiple of 16 bytes.
        """
        if (k * 2) % _TMA_BYTES:
            raise ValueError(f"shape {m}x{n}x{k}: K must be a multiple of 8 (16-byte rows of A)")
        widths = [s.width for s in (*self.operands.values(), *self.outputs.values()) if s.kind.startswith("Tile")]
        step = 16 if 0.5 in widths else 8
        if n % step:
            raise ValueError(f"shape {m}x{n}x{k}: N must be a multiple of {step} (16-byte rows)")
        for name, spec in self.operands.items():
            if spec.kind == "HeadRstd" and n % spec.head_dim:
                raise ValueError(f"shape {m}x{n}x{k}: N must be a multiple of {name}.head_dim={spec.head_dim}")

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {**self.operands, **self.outputs}

    def torch_dtypes(self, act: torch.dtype) -> dict[str, torch.dtype]:
        """dtype of every operand and output for activation dtype ``act``."""
        return {n: s.torch_dtype(act) for n, s in self.tensors.items()}

    @property
    def special_values(self) -> str:
        """What is demanded of outputs where the inputs hold NaN or an infinity, in one line."""
        loose = [n for n, s in self.outputs.items() if s.special == "nonfinite"]
        parts = ["NaN and infinities exactly where the fp64 reference has them, and nowhere else"]
        if loose:
            parts.append(f"in {', '.join(loose)} any of them counts there")
        parts += [
            f"{n} is NaN where {s.index} is outside the columns"
            for n, s in self.outputs.items()
            if s.kind == "ColVecSelect"
        ]
        return "; ".join(parts)

    @property
    def kinds(self) -> dict[str, declare.Kind]:
        """Declared kind of every tensor; an index operand counts as the ColVecLoad it is."""
        return {n: s.declared for n, s in self.tensors.items()}

    def mismatch(self, program: declare.Program) -> str | None:
        """Why ``program`` does not fit this task, or None when it does.

        Operand and output names, kinds and options must agree; ``pairs`` and
        ``product=`` are the kernel's own business.
        """
        want = {n: k for n, k in self.kinds.items() if n not in program.index_operands}
        got = {**program.operands, **program.outputs}
        for name in sorted(set(want) - set(got)):
            return f"task {self.name} needs {name}={_spell(want[name])}; declare it"
        for name in sorted(set(got) - set(want)):
            return f"{name}={_spell(got[name])} is not part of task {self.name}; it has {sorted(want)}"
        for name in want:
            if _spell(want[name]) != _spell(got[name]):
                return f"{name} must be declared {_spell(want[name])}, not {_spell(got[name])}"
        return None


def _spell(kind: declare.Kind) -> str:
    options = {k: v for k, v in vars(kind).items() if k != "product"}
    return f"{kind.label}({', '.join(f'{k}={v!r}' for k, v in options.items())})"


class Suite(_Model):
    """A set of tasks and where it was read from."""

    path: Path
    tasks: dict[str, Task]

    def __getitem__(self, name: str) -> Task:
        if name not in self.tasks:
            raise SuiteError(f"no task {name!r} in {self.path}; it has: {', '.join(self.tasks)}")
        return self.tasks[name]

    @property
    def timed(self) -> set[tuple[str, Shape]]:
        """Every (task, M x N x K) that the suite is timed at."""
        return {(t.name, shape) for t in self.tasks.values() for shape in t.timed}


def load_suite(path: Path | None = None) -> Suite:
    """Read a suite file.

    Raises:
        SuiteError: missing file, YAML error or wrong field, with line, field and reason.
    """
    path = Path(path) if path else DEFAULT_SUITE
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or "not a text file"
        raise SuiteError(f"cannot read suite {path}: {reason}; give a file with --tasks FILE") from e
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise SuiteError(f"{path}:{line}: not valid YAML: {getattr(e, 'problem', e)}") from e
    if not isinstance(data, dict) or not isinstance(data.get("tasks"), dict) or not data["tasks"]:
        where = _line(root, ("tasks",))
        raise SuiteError(f"{path}:{where}: field 'tasks': a mapping of task name to task is needed")
    defaults = data.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise SuiteError(f"{path}:{_line(root, ('defaults',))}: field 'defaults': must be a mapping")
    if data.get("version") != 1:
        raise SuiteError(f"{path}:{_line(root, ('version',))}: field 'version': must be 1")
    unknown = set(data) - {"version", "defaults", "tasks"}
    if unknown:
        key = sorted(unknown)[0]
        raise SuiteError(f"{path}:{_line(root, (key,))}: field '{key}': unknown; use version, defaults, tasks")
    tasks = {}
    for name, body in data["tasks"].items():
        if not isinstance(body, dict):
            raise SuiteError(f"{path}:{_line(root, ('tasks', name))}: field 'tasks.{name}': must be a mapping")
        if "name" in body:
            where = _line(root, ("tasks", name, "name"))
            raise SuiteError(f"{path}:{where}: field 'tasks.{name}.name': the key above is the name; remove this")
        try:
            tasks[name] = Task(name=name, **{**defaults, **body})
        except ValidationError as e:
            first = e.errors()[0]
            loc = tuple(first["loc"])
            inherited = bool(loc) and loc[0] in defaults and loc[0] not in body
            keys = ("defaults", *loc) if inherited else ("tasks", name, *loc)
            where, dotted = _line(root, keys), ".".join(str(p) for p in keys)
            reason = first["msg"].removeprefix("Value error, ")
            raise SuiteError(f"{path}:{where}: field '{dotted}': {reason}") from e
    return Suite(path=path, tasks=tasks)


def _line(node: yaml.Node | None, keys: tuple) -> int:
    """Line of the deepest part of ``keys`` that exists in the document."""
    line = 1
    for key in keys:
        child = None
        if isinstance(node, yaml.MappingNode):
            child = next(((k, v) for k, v in node.value if k.value == str(key)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            child = (node.value[key], node.value[key])
        if child is None:
            break
        line, node = child[0].start_mark.line + 1, child[1]
    return line
