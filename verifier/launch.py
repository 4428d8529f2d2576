"""Launch a compiled artefact from its manifest alone; no candidate code is ever imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from primitives import declare
from primitives.shapes import finish, partial_shape
from reference_kernels.expert import EXPERTS, signed
from reference_kernels.tasks import ACT_DTYPES, Task

from .manifest import Artefact, sha256
from .verdict import HarnessError

POISON = float("nan")


class Buffers:
    """One set of operands and outputs of a task at one shape, on the GPU."""

    def __init__(
        self, task: Task, artefact: Artefact, a: Tensor, b: Tensor, operands: dict[str, Tensor], poison: bool = True
    ):
        self.m, self.k = a.shape
        self.n = b.shape[1]
        self.a, self.b = a, b
        act = ACT_DTYPES[artefact.act]
        dtypes = task.torch_dtypes(act)
        self.kinds = {n: s.declared for n, s in task.outputs.items()}
        config = artefact.config
        self.outputs: dict[str, Tensor] = {}
        for name in artefact.covers or task.outputs:
            shape = partial_shape(self.kinds[name], self.m, self.n, config["tile_m"], config["tile_n"])
            self.outputs[name] = torch.empty(shape, dtype=dtypes[name], device=a.device)
        signs = EXPERTS[task.name].signs if artefact.author.startswith("expert:") else {}
        self.operands = {n: signed(t, signs.get(n)) for n, t in operands.items()}
        # a selection leaves rows without a target unwritten: they are NaN by contract
        for name, kind in self.kinds.items():
            if name in self.outputs and (poison or isinstance(kind, declare.ColVecSelect)):
                self.outputs[name].fill_(POISON)

    def poison(self) -> None:
        """Fill every output with NaN so that anything not written shows."""
        for t in self.outputs.values():
            t.fill_(POISON)

    def finished(self) -> dict[str, Tensor]:
        """Outputs with partial reductions folded."""
        return {n: finish(self.kinds[n], t) for n, t in self.outputs.items()}

    @property
    def has_partials(self) -> bool:
        return any(isinstance(k, (declare.ColVecReduce, declare.RowVecReduce, declare.OnlineLSEReduce))
                   for n, k in self.kinds.items() if n in self.outputs)  # fmt: skip

    @property
    def nbytes(self) -> int:
        tensors = [self.a, self.b, *self.operands.values(), *self.outputs.values()]
        return sum(t.numel() * t.element_size() for t in tensors)


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
