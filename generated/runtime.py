"""Call the best kernel of the library: compile its source once, then launch from the manifest.

    kernel = load("gemm_rmsnorm_swiglu", (4096, 4096, 4096))
    outputs = kernel(a, b, rstd=rstd)          # {"z": (M, N), "y": (M, N/2)}
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from primitives.shapes import shape_of
from reference_kernels.tasks import ACT_DTYPES, Suite, Task, load_suite
from verifier.bundle import CONFIGS
from verifier.check import make_artefact, save_artefact, submit_compile
from verifier.launch import Buffers, Kernel
from verifier.manifest import Artefact, config_key, other_compilers, toolchain
from verifier.pool import Pool

from .library import Library, LibraryError

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "coda-agent"


class LoadedKernel:
    """A callable ``(a, b, **operands) -> outputs`` for any M, N, K of its task."""

    def __init__(self, task: Task, artefact: Artefact, directory: Path, chosen: dict):
        self.task, self.artefact, self.chosen = task, artefact, chosen
        self._kernel = Kernel(artefact, directory)

    def __call__(self, a: Tensor, b: Tensor, **operands: Tensor) -> dict[str, Tensor]:
        """Run the kernel on the current stream.

        Args:
            a: ``(M, K)``; b: ``(K, N)`` (pass ``weight.mT`` for a task that stores ``(N, K)``).
            operands: the task's operands by name.

        Raises:
            LibraryError: an operand is missing or has the wrong shape, dtype or device.
        """
        self._check(a, b, operands)
        buffers = Buffers(self.task, self.artefact, a, b, operands, poison=False)
        self._kernel.bind(buffers)()
        return buffers.finished()

    def _check(self, a: Tensor, b: Tensor, operands: dict[str, Tensor]) -> None:
        act = ACT_DTYPES[self.artefact.act]
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
            raise LibraryError(f"{self.task.name}: a (M, K) and b (K, N) expected, got {tuple(a.shape)} and {tuple(b.shape)}")
        m, n = a.shape[0], b.shape[1]
        try:
            self.task.check_shape(m, n, a.shape[1])
        except ValueError as e:
            raise LibraryError(f"{self.task.name}: {e}") from None
        b_row_major = b.stride(1) == 1
        if a.stride(1) != 1 or b_row_major != (self.task.b == "kn") or (not b_row_major and b.stride(0) != 1):
            layout = "b contiguous" if self.task.b == "kn" else "b = weight.mT of a contiguous (N, K) weight"
            raise LibraryError(f"{self.task.name}: needs a contiguous and {layout}")
        want = {n_: (shape_of(s.declared, m, n), s.torch_dtype(act)) for n_, s in self.task.operands.items()}
        for name, tensor in {"a": a, "b": b, **operands}.items():
            if tensor.device != a.device or not tensor.is_cuda:
                raise LibraryError(f"{self.task.name}: {name} must be on the GPU of a, is on {tensor.device}")
            if tensor.data_ptr() % 16:
                raise LibraryError(f"{self.task.name}: {name} must start at a multiple of 16 bytes; pass a copy")
        if a.dtype != act or b.dtype != act:
            raise LibraryError(f"{self.task.name}: a and b must be {act}, are {a.dtype} and {b.dtype}")
        for name, (shape, dtype) in want.items():
            tensor = operands.get(name)
            if tensor is None:
                raise LibraryError(f"{self.task.name}: operand {name} {shape} {dtype} is missing")
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                got = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise LibraryError(f"{self.task.name}: {name} must be contiguous {shape} {dtype}, is {got}")


def load(
    task: str,
    shape: tuple[int, int, int],
    act: str = "bf16",
    library: Library | None = None,
    suite: Suite | None = None,
    device: str | None = None,
    any_toolchain: bool = False,
) -> LoadedKernel:
    """The best measured kernel for ``task`` near ``shape`` on this GPU.

    The object is compiled in the sandbox on first use and cached by source, configuration
    and toolchain.

    Args:
        any_toolchain: also compile with other versions than the kernel was proven with.

    Raises:
        LibraryError: nothing measured for the device, other compilers than it was proven with, or the source no
            longer compiles.
    """
    library, suite = library or Library(), suite or load_suite()
    spec = suite[task]
    chosen = library.best(task, device or torch.cuda.get_device_name(), shape)
    passport = library.find(f"{task}/{chosen['kernel']}")
    source = library.source(passport)
    other = other_compilers(passport.toolchain)
    if other and not any_toolchain:  # it may compile, and compute something else (vllm #47571)
        raise LibraryError(
            f"{task}/{passport.kernel} was proven with {other}; prove it again with 'coda-agent measure {task}', "
            "install those versions, or pass any_toolchain=True"
        )
    config = next((c for c in CONFIGS if config_key(c) == chosen["config"]), None)
    if config is None:
        raise LibraryError(f"{task}: configuration {chosen['config']} is not known to this version; measure again")
    key = hashlib.sha256(json.dumps([source, config, act, spec.b, toolchain()], sort_keys=True).encode()).hexdigest()
    directory = CACHE / key[:32]
    manifests = list(directory.glob("*.json"))
    if not manifests:
        with Pool(1) as pool:
            answer = submit_compile(pool, source, spec, act, config).result()
            if not answer.ok:
                raise LibraryError(f"{task}/{passport.kernel} does not compile here: {answer.describe()}")
            artefact = make_artefact(answer, source, spec, act, passport.author, config)
            manifests = [save_artefact(artefact, answer.directory / "kernel.o", directory)]
    artefact = Artefact.model_validate_json(manifests[0].read_text())
    return LoadedKernel(spec, artefact, directory, {**chosen, "author": passport.author})
