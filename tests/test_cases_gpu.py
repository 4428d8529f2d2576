"""Public bug reports that only a Hopper GPU can show; skipped elsewhere. Each docstring names its source.

Needs nothing of ``conftest.py``: ``python3 -m pytest --noconftest tests/test_cases_gpu.py``.
"""

import math

import pytest
import torch

from agent.composer import compose
from primitives.shapes import finish
from reference_kernels.tasks import Task, load_suite
from reference_kernels.truth import make_inputs
from verifier.bundle import CONFIGS
from verifier.check import make_artefact, save_artefact, submit_compile
from verifier.launch import Buffers, Kernel
from verifier.manifest import Artefact
from verifier.pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Task, source and configuration -> a loaded kernel."""
    with Pool() as pool:

        def load(task: Task, source: str, config: dict) -> Kernel:
            answer = submit_compile(pool, source, task, "bf16", config).result(timeout=300)
            assert answer.ok, answer.describe()
            made = make_artefact(answer, source, task, "bf16", "composer", config)
            path = save_artefact(made, answer.directory / "kernel.o", tmp_path_factory.mktemp("object"))
            return Kernel(Artefact.model_validate_json(path.read_text()), path.parent)

        yield load


@pytest.mark.parametrize("name", ["gemm_residual_rmsnorm_bwd", "gemm_cross_entropy"])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1]], ids=["first", "last"])
def test_500_repeats_are_bit_equal(compiled, name, config):
    """NVIDIA/cutlass #2162, #2760: rarely a patch of 128 x 32 differs; 500 runs with other work between."""
    task = load_suite()[name]
    kernel = compiled(task, compose(task), config)
    a, b, operands = make_inputs(task, (1000, 1040, 520), torch.bfloat16, 0, "cuda")
    buffers = Buffers(task, kernel.artefact, a, b, operands)
    launch = kernel.bind(buffers)
    launch()
    torch.cuda.synchronize()
    first = {n: t.clone() for n, t in buffers.outputs.items()}
    assert all(finish(buffers.kinds[n], t).isfinite().all() for n, t in first.items())
    noise, differs = torch.empty(1 << 24, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    other = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for i in range(500):
        buffers.poison()
        if i % 3:  # the caches and the schedule are not what they were
            noise.normal_()
        if i % 2:
            other @ other
        launch()
        for n, t in buffers.outputs.items():
            bits = torch.int16 if t.element_size() == 2 else torch.int32
            differs += (t.view(bits) != first[n].view(bits)).sum()
    assert int(differs) == 0


EXTREMES = """\
from primitives import TileLoad, TileStore, epilogue, maximum, minimum, relu


@epilogue(x=TileLoad(), y=TileStore(), top=TileStore(), low=TileStore())
def extremes(acc, x):
    return {"y": relu(acc), "top": maximum(acc, x), "low": minimum(acc, x)}
"""


def test_relu_maximum_and_minimum_keep_nan(compiled):
    """HanGuo97/coda-kernels, lessons learned: relu([-inf, nan, inf, -1]) = [0, nan, inf, 0], on the device, too."""
    task = Task(
        name="extremes", summary="extremes", math="extremes", operands={"x": {"kind": "TileLoad"}},
        outputs={n: {"kind": "TileStore"} for n in ("y", "top", "low")},
        ops=[f"{n} = residual_add(acc, x)" for n in ("y", "top", "low")],  # the source below is not composed
        dtypes=("bf16",), timed=((256, 256, 64),), ragged=((8, 16, 8),),
    )  # fmt: skip
    one, x = (torch.tensor(v, dtype=torch.bfloat16, device="cuda").repeat(2) for v in (
        [-INF, NAN, INF, -1.0, 2.0, 0.0, NAN, 3.0],
        [1.0, 1.0, -INF, -2.0, NAN, -3.0, NAN, INF],
    ))  # fmt: skip
    a, b = torch.zeros(8, 8, device="cuda").bfloat16(), torch.zeros(8, 16, device="cuda").bfloat16()
    a[:, 0], b[0] = 1.0, one  # acc is ``one`` in every row, exactly
    kernel = compiled(task, EXTREMES, CONFIGS[0])
    buffers = Buffers(task, kernel.artefact, a, b, {"x": x.expand(8, 16).contiguous()})
    kernel.bind(buffers)()
    torch.cuda.synchronize()
    for name, want in {"y": one.relu(), "top": torch.maximum(one, x), "low": torch.minimum(one, x)}.items():
        torch.testing.assert_close(buffers.outputs[name], want.expand(8, 16), rtol=0, atol=0, equal_nan=True)
