"""Launch a compiled artefact from its manifest alone; no candidate code is ever imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from primitives import declare
from primitives.shapes import finish, partial_shape
from reference_kernels.expert import EXPERTS, signed
from reference_kernels.tasks import ACT_DTYPES, Task

from .guard import Guarded, first_damage
from .manifest import Artefact, sha256
from .verdict import HarnessError

POISON = float("nan")


class Buffers:
    """One set of operands and outputs of a task at one shape, on the device of the operands.

    ``guard`` says what lies between guard bands (``verifier.guard``): nothing, the outputs, or the
    outputs and copies of everything that is read.
    """

    def __init__(
        self,
        task: Task,
        artefact: Artefact,
        a: Tensor,
        b: Tensor,
        operands: dict[str, Tensor],
        poison: bool = True,
        guard: Literal["none", "outputs", "all"] = "none",
    ):
        self.m, self.k = a.shape
        self.n = b.shape[1]
        self.guards: dict[str, Guarded] = {}
        act = ACT_DTYPES[artefact.act]
        dtypes = task.torch_dtypes(act)
        self.kinds = {n: s.declared for n, s in task.outputs.items()}
        config = artefact.config
        self.outputs: dict[str, Tensor] = {}
        for name in artefact.covers or task.outputs:
            shape = partial_shape(self.kinds[name], self.m, self.n, config["tile_m"], config["tile_n"])
            if guard == "none":
                self.outputs[name] = torch.empty(shape, dtype=dtypes[name], device=a.device)
            else:
                self.guards[name] = Guarded(shape, dtypes[name], a.device)
                self.outputs[name] = self.guards[name].tensor
        signs = EXPERTS[task.name].signs if artefact.author.startswith("expert:") else {}
        read = {"A": a, "B": b, **{n: signed(t, signs.get(n)) for n, t in operands.items()}}
        if guard == "all":
            copies = {n: Guarded.copy(t) for n, t in read.items()}
            self.guards |= copies
            read = {n: g.tensor for n, g in copies.items()}
        self.a, self.b, self.operands = read.pop("A"), read.pop("B"), read
        # a selection leaves rows without a target unwritten: they are NaN by contract
        for name, kind in self.kinds.items():
            if name in self.outputs and (poison or isinstance(kind, declare.ColVecSelect)):
                self.outputs[name].fill_(POISON)

    def poison(self) -> None:
        """Fill every output with NaN so that anything not written shows."""
        for t in self.outputs.values():
            t.fill_(POISON)

    def damage(self) -> str:
        """Which tensor was written outside and where, or an empty string; see ``guard``."""
        return first_damage(self.guards)

    def finished(self) -> dict[str, Tensor]:
        """Outputs with partial reductions folded."""
        return {n: finish(self.kinds[n], t) for n, t in self.outputs.items()}

    @property
    def has_partials(self) -> bool:
        return any(isinstance(k, (declare.ColVecReduce, declare.RowVecReduce, declare.OnlineLSEReduce))
                   for n, k in self.kinds.items() if n in self.outputs)  # fmt: skip


class Kernel:
    """A loaded object file that can be bound to buffers and called."""

    def __init__(self, artefact: Artefact, directory: Path):
        path = directory / artefact.object
        if sha256(path) != artefact.object_sha256:
            raise HarnessError(f"{path} is not the object its manifest names; compile it again")
        import cutlass.cute as cute

        self.artefact = artefact
        self.function = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[artefact.symbol]

    def bind(self, buffers: Buffers) -> Callable[[], None]:
        """A zero-argument launch on the current stream; arguments are resolved once."""
        art = self.artefact

        def tensor(name: str | None):
            if name is None:
                return None
            name = art.renames.get(name, name)
            return buffers.outputs.get(name, buffers.operands.get(name))

        by_value = (declare.HeadRstd,)
        constants = {n for n, k in art.declared.operands.items() if isinstance(k, by_value)} if art.program else set()
        epilogue = tuple(None if f in constants else tensor(f) for f in art.fields) + (None, None)
        sms = torch.cuda.get_device_properties(buffers.a.device).multi_processor_count
        clusters = sms // (art.config["cluster_m"] * art.config["cluster_n"])
        # quack's TileSchedulerOptions: clusters, raster order, swizzle, semaphore, batch order, all-gather
        scheduler = (clusters, None, art.config["max_swizzle_size"], None, None, None)
        arguments = (buffers.a, buffers.b, tensor(art.d), tensor(art.c), epilogue, scheduler, None, None, None)
        function = self.function
        return lambda: function(*arguments)
