"""Guard bands, with kernels that are a line of Python writing where it must not."""

from __future__ import annotations

import pytest
import torch

from primitives.shapes import finish
from reference_kernels.tasks import ACT_DTYPES, load_suite
from reference_kernels.truth import make_inputs
from verifier.bundle import CONFIGS
from verifier.guard import BAND, Guarded
from verifier.launch import Buffers
from verifier.manifest import Artefact

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32]


def beyond(t: torch.Tensor, offset: int) -> torch.Tensor:
    """The element ``offset`` elements from the first of ``t``, wherever that is."""
    return torch.as_strided(t, (1,), (1,), t.storage_offset() + offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (200, 3), (5, 272), (128, 64)])
def test_one_element_past_either_end_is_noticed_and_placed(dtype, shape):
    guarded = Guarded(shape, dtype, "cpu")
    guarded.tensor.fill_(0)
    assert guarded.damage() == ""
    last = guarded.tensor.numel()
    beyond(guarded.tensor, last - 1).fill_(1)
    assert guarded.damage() == ""
    beyond(guarded.tensor, last).fill_(1)
    assert guarded.damage() == "written outside the tensor (after its end, first at byte offset 0)"
    beyond(guarded.tensor, -1).fill_(1)
    assert f"before its start, first {dtype.itemsize} bytes before it; after its end" in guarded.damage()


def test_a_write_far_outside_is_placed():
    guarded = Guarded((100,), torch.float32, "cpu")
    beyond(guarded.tensor, 100 + 37).fill_(0.0)
    assert guarded.damage().endswith("(after its end, first at byte offset 148)")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_outside_is_not_a_number_and_no_index(dtype):
    guarded = Guarded.copy(torch.zeros(7, 9, dtype=dtype))
    for offset in (-1, 63, -(BAND // dtype.itemsize), 63 + BAND // dtype.itemsize - 1):
        value = beyond(guarded.tensor, offset)
        assert bool(value.isnan()) if dtype.is_floating_point else int(value) == -1


@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_does_not_change(dtype):
    for shape in [(1,), (129, 400), (3, 5)]:
        guarded = Guarded(shape, dtype, "cpu")
        first = guarded.tensor.untyped_storage().data_ptr()
        assert (guarded.tensor.data_ptr() - first) % 256 == 0


@pytest.mark.parametrize("made", [lambda t: t, lambda t: t.mT, lambda t: t.permute(1, 0)])
def test_a_copy_keeps_values_and_layout(made):
    original = made(torch.randn(6, 10).to(torch.bfloat16))
    copy = Guarded.copy(original)
    assert torch.equal(copy.tensor, original) and copy.tensor.stride() == original.stride()
    copy.tensor.fill_(1)
    assert copy.damage() == "" and not torch.equal(copy.tensor, original)


# --- the buffers of a launch ---------------------------------------------------------------


def buffers(name: str, guard: str, act: str = "bf16", shape=(200, 272, 136)) -> Buffers:
    task = load_suite()[name]
    artefact = Artefact(
        kernel=name, task=name, author="me", act=act, b=task.b, source_sha256="", object="", object_sha256="",
        symbol="", fields=[], d=None, c=None, config=CONFIGS[0], program={}, toolchain={}, isolation="",
    )  # fmt: skip
    return Buffers(task, artefact, *make_inputs(task, shape, ACT_DTYPES[act], 1), guard=guard)


@pytest.mark.parametrize("act", list(ACT_DTYPES))
@pytest.mark.parametrize("name", list(load_suite().tasks))
def test_every_tensor_of_a_launch_lies_between_bands(name, act):
    b = buffers(name, "all", act)
    tensors = {"A": b.a, "B": b.b, **b.operands, **b.outputs}
    assert set(b.guards) == set(tensors)
    a, plain_b, operands = make_inputs(b_task := load_suite()[name], (200, 272, 136), ACT_DTYPES[act], 1)
    for n, t in {"A": a, "B": plain_b, **operands}.items():
        assert torch.equal(tensors[n], t) and tensors[n].stride() == t.stride()
    assert all(tensors[n].dtype == d for n, d in b_task.torch_dtypes(ACT_DTYPES[act]).items())
    assert b.damage() == ""
    b.poison()
    assert b.damage() == "" and all(bool(t.isnan().all()) for t in b.outputs.values())
    for n, t in tensors.items():
        fresh = buffers(name, "all", act)
        t = {"A": fresh.a, "B": fresh.b, **fresh.operands, **fresh.outputs}[n]
        beyond(t, t.numel()).fill_(1)
        assert fresh.damage() == f"{n}: written outside the tensor (after its end, first at byte offset 0)"


def test_a_partial_too_many_shows_in_the_band():
    """What a kernel does that has more tiles than the manifest says."""
    b = buffers("gemm_residual_rmsnorm", "outputs")
    partials = b.outputs["sumsq"]
    rows, columns = partials.shape
    assert columns == 3
    for row in range(rows):
        for column in range(columns + 1):  # one too many: the next row's first, and for the last row nobody's
            beyond(partials, row * columns + column).fill_(1.0)
    assert b.damage() == "sumsq: written outside the tensor (after its end, first at byte offset 0)"
    assert finish(b.kinds["sumsq"], partials).shape == (rows,)


def test_only_what_was_asked_for_is_copied():
    task = load_suite()["gemm_rmsnorm"]
    assert set(buffers(task.name, "outputs").guards) == set(task.outputs)
    assert buffers(task.name, "none").guards == {} and buffers(task.name, "none").damage() == ""
