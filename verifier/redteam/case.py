"""What a red-team case is, and how the files in ``cases/`` are read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from reference_kernels.tasks import Suite, load_suite

CASES = Path(__file__).resolve().parent / "cases"
OWN_SUITE = CASES / "suite.yaml"  # tasks of the honest controls and of exploits no listed task has room for

# the kernel that exploits are planted in unless they bring their own
_TEMPLATE = """\
from primitives import ColVecLoad, TileStore, epilogue{imports}

{module}
{decorator}
def gemm_rmsnorm({parameters}):
{body}    return {{"y": {value}}}
"""


class Case(BaseModel):
    """One exploit or control.

    ``how``: ``check`` (the whole check of a candidate), ``worker`` (straight to the
    worker that runs candidates, as if the policy had a hole), ``compiled`` (compile and
    resources only, as if policy and interpreter had one), ``gpu`` (the numerics of ``gpu``,
    as if everything before them had one).
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    codes: list[str] = Field(min_length=1)
    what: str
    how: Literal["check", "worker", "compiled", "gpu"] = "check"
    task: str = "gemm_rmsnorm"
    stage: Literal["accepted", "policy", "interpret", "compile", "resources", "numerics", "worker"]
    reason: str = ""  # a regular expression; it must name the fault that was planted
    # the kernel: given whole, or as parts of the honest gemm_rmsnorm
    source: str | None = None
    module: str = ""
    body: str = ""
    value: str = "acc * rstd"
    imports: str = ""
    parameters: str = "acc, rstd"
    decorator: str = "@epilogue(rstd=ColVecLoad(), y=TileStore())"
    repeat: dict[str, tuple[str, int]] = {}  # a word of the text -> what stands there, how many times
    job: Literal["declare", "interpret", "compile"] = "declare"
    wall_seconds: float | None = None
    needs_sandbox: bool = False  # without bubblewrap and Landlock nothing can stop it; said, not counted
    dtypes: tuple[Literal["bf16", "fp16"], ...] = ()  # fewer than the task's own, to save compiles
    configs: list[dict] = []  # controls: also compile in these
    tamper: str | None = None  # gpu cases: a name of ``gpu.TAMPERS``

    @model_validator(mode="after")
    def _says_why(self) -> Case:
        if self.stage != "accepted" and not self.reason:
            raise ValueError(f"case {self.name}: an exploit needs the reason it is rejected for")
        return self

    @property
    def text(self) -> str:
        """The kernel file."""
        body = "".join(f"    {line}\n" for line in self.body.splitlines())
        text = self.source or _TEMPLATE.format(
            imports=f", {self.imports}" if self.imports else "", module=self.module, decorator=self.decorator,
            parameters=self.parameters, body=body, value=self.value,
        )  # fmt: skip
        for word, (piece, times) in self.repeat.items():
            text = text.replace(word, piece * times)
        return text


def load_cases(*files: str) -> list[Case]:
    """The cases of these files of ``cases/``; all that hold cases for machines without a GPU by default."""
    files = files or ("policy", "contract", "numerics", "worker", "compiled", "controls")
    found = []
    for file in files:
        found += [Case(**c) for c in yaml.safe_load((CASES / f"{file}.yaml").read_text())["cases"]]
    names = [c.name for c in found]
    double = {n for n in names if names.count(n) > 1}
    if double:
        raise ValueError(f"red-team cases named twice: {sorted(double)}")
    return found


def suites() -> tuple[Suite, Suite]:
    """The tasks of ``tasks.yaml`` and those of the red team."""
    return load_suite(), load_suite(OWN_SUITE)
