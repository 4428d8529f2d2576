# ruff: noqa: E501  (tables of cases, one a line)
"""The whole check: each wrong candidate ends at the right stage, with a reason that helps.

Everything is real: sandboxed worker, CuTeDSL compile for sm_90a, disassembly.
"""

import json
import time

import pytest

from agent.composer import compose
from reference_kernels.tasks import load_suite
from verifier import sandbox
from verifier.check import DEFAULT_CONFIG, check
from verifier.interpretation import cases, dtype_names, judge_interpretation
from verifier.manifest import Artefact, sha256
from verifier.policy import check_policy
from verifier.resources import check_resources

SUITE = load_suite()
SEED = 20260301  # inputs are fixed here; test_numerics covers other seeds

IMPORTS = """\
from primitives import (
    ColVecLoad, ColVecReduce, RowVecLoad, TileLoad, TileStore, cute, epilogue, pack, primitive, relu, silu, unpack,
)

"""


def task(name):
    """A task of the suite in bf16 only, which halves the compiles."""
    return SUITE[name].model_copy(update={"dtypes": ("bf16",)})


def rmsnorm(body, weight="RowVecLoad()", sumsq="ColVecReduce(product=True)"):
    declared = f"sumsq={sumsq}, " if sumsq else ""
    return (
        f"{IMPORTS}\n@epilogue(residual=TileLoad(), weight={weight}, h=TileStore(), {declared}y=TileStore())\n"
        f"def gemm_residual_rmsnorm(acc, residual, weight):\n    {body}\n"
    )


def swiglu(body):
    return (
        f'{IMPORTS}\n@epilogue(rstd=ColVecLoad(), y=TileStore(width=1 / 2), pairs="acc")\n'
        f"def gemm_rmsnorm_swiglu_lean(acc, rstd):\n    {body}\n"
    )


def rope(body):
    return (
        f'{IMPORTS}\n@epilogue(cos_sin=TileLoad(), d=TileStore(), o=TileStore(), pairs="acc")\n'
        f"def gemm_rope(acc, cos_sin):\n    x, y = unpack(acc)\n    cos, sin = unpack(cos_sin)\n    {body}\n"
    )


def custom(device):
    return (
        f"{IMPORTS}\n@primitive(cpu=relu)\ndef mine(x):\n    {device}\n\n\n"
        '@epilogue(y=TileStore(), rstd=ColVecLoad())\ndef gemm_rmsnorm(acc, rstd):\n    return {"y": acc * rstd + mine(rstd) - mine(rstd)}\n'
    )


H = "h = acc + residual\n    "
WRONG = {
    # task, source, stage, what the reason must say
    "forbidden": ("gemm_rmsnorm", "import torch\n", "policy", ["line 1", "only 'from primitives import"]),
    "other task": ("gemm_rmsnorm", compose(SUITE["gemm_swiglu_lean"]), "policy", ["rstd", "ColVecLoad", "declare it"]),
    "row vector declared as column": (
        "gemm_residual_rmsnorm", rmsnorm(H + 'return {"h": h, "sumsq": (h, h), "y": h * weight}', weight="ColVecLoad()"),
        "policy", ["weight must be declared RowVecLoad()", "not ColVecLoad()"],
    ),
    "output not declared": (
        "gemm_residual_rmsnorm", rmsnorm(H + 'return {"h": h, "y": h * weight}', sumsq=""),
        "policy", ["sumsq=ColVecReduce", "declare it"],
    ),
    "maximum instead of sum": (
        "gemm_residual_rmsnorm", rmsnorm(H + 'return {"h": h, "sumsq": h, "y": h * weight}', sumsq='ColVecReduce(combine="max")'),
        "policy", ["sumsq must be declared", "combine='add'", "combine='max'"],
    ),
    "declarations that do not load": (
        "gemm_rmsnorm", f"{IMPORTS}\n@epilogue(rstd=ColVecLoad(), y=TileStore())\ndef gemm_rmsnorm(acc):\n    return {{\"y\": acc}}\n",
        "policy", ["declared but not parameters", "rstd"],
    ),
    "output not returned": (
        "gemm_residual_rmsnorm", rmsnorm(H + 'return {"h": h, "y": h * weight}'), "interpret", ["missing ['sumsq']"],
    ),
    "pairs forgotten": (
        "gemm_rmsnorm", f"{IMPORTS}\n@epilogue(rstd=ColVecLoad(), y=TileStore())\ndef gemm_rmsnorm(acc, rstd):\n"
        '    a, b = unpack(acc)\n    return {"y": a * rstd}\n',
        "interpret", ["line 8", "unpack() needs a pair", "[a, b = unpack(acc)]"],
    ),
    "gate and up swapped": (
        "gemm_rmsnorm_swiglu_lean", swiglu('gate, up = unpack(acc * rstd)\n    return {"y": silu(up) * gate}'),
        "interpret", ["y: ", "% of elements wrong", "M=200 N=272 K=136", "smallest failing case M=1 N=16 K=8"],
    ),
    "rstd dropped": (
        "gemm_rmsnorm_swiglu_lean", swiglu('gate, up = unpack(acc)\n    return {"y": silu(gate) * up}'), "interpret", ["y: ", "% of elements wrong"],
    ),
    "rstd once instead of twice": (
        "gemm_rmsnorm_swiglu_lean", swiglu('gate, up = unpack(acc)\n    return {"y": silu(gate * rstd) * up}'), "interpret", ["y: "],
    ),
    "silu left out": (
        "gemm_rmsnorm_swiglu_lean", swiglu('gate, up = unpack(acc * rstd)\n    return {"y": gate * up}'), "interpret", ["y: "],
    ),
    "rotated by plus theta": (
        "gemm_rope", rope('return {"d": acc, "o": pack(x * cos - y * sin, y * cos + x * sin)}'), "interpret", ["o: ", "truth"],
    ),
    "one sign of the rotation": (
        "gemm_rope", rope('return {"d": acc, "o": pack(x * cos + y * sin, y * cos + x * sin)}'), "interpret", ["o: ", "only in odd columns"],
    ),
    "halves of the rotation swapped": (
        "gemm_rope", rope('return {"d": acc, "o": pack(y * cos - x * sin, x * cos + y * sin)}'), "interpret", ["o: "],
    ),
    "product without square": (
        "gemm_residual_rmsnorm", rmsnorm(H + 'return {"h": h, "sumsq": (h, 1.0), "y": h * weight}'), "interpret", ["sumsq: "],
    ),
    "mean instead of sum": (
        "gemm_residual_rmsnorm", rmsnorm(H + 'return {"h": h, "sumsq": (h, h / 272.0), "y": h * weight}'),
        "interpret", ["sumsq: ", "0.003676 x the truth"],
    ),
    "statistic before the residual": (
        "gemm_residual_rmsnorm", rmsnorm(H + 'return {"h": h, "sumsq": (acc, acc), "y": h * weight}'), "interpret", ["sumsq: "],
    ),
    "statistic of the weighted values": (
        "gemm_residual_rmsnorm", rmsnorm(H + 'y = h * weight\n    return {"h": h, "sumsq": (y, y), "y": y}'), "interpret", ["sumsq: "],
    ),
    # Veltkamp's splitting rounds h to the eight bits of bf16, in fp32 arithmetic alone
    "statistic of values rounded to bf16": (
        "gemm_residual_rmsnorm",
        rmsnorm(H + 't = h * 65537.0\n    low = t - (t - h)\n    return {"h": h, "sumsq": (low, low), "y": h * weight}'),
        "interpret", ["sumsq: ", "exceeds"],
    ),
    "device code that does not compile": (
        "gemm_rmsnorm", custom("return cute.math.fma(x)"), "compile", ["does not compile for sm_90a in bf16", "line 8", "[return cute.math.fma(x)]"],
    ),
    "device code without a value": (
        "gemm_rmsnorm", custom("return cute.math.exp(x, 1.0, 2.0, 3.0)"), "compile", ["does not compile for sm_90a in bf16", "line 8"],
    ),
}  # fmt: skip


# every check that reaches the interpreter has begun to compile, too; only these take that long way
WHOLE_CHECK = [n for n, c in WRONG.items() if c[2] != "interpret"] + ["output not returned", "gate and up swapped"]


@pytest.mark.parametrize("name", WHOLE_CHECK)
def test_wrong_candidate(name, pool):
    name, source, stage, fragments = WRONG[name]
    seen = []
    report = check(source, task(name), pool, seed=SEED, progress=seen.append)
    assert not report.passed
    assert report.failure.stage == stage, report.failure.reason
    assert all(v.passed for v in report.verdicts[:-1]) and report.verdicts[-1] is report.failure
    for text in fragments:
        assert text in report.failure.reason
    assert "Traceback" not in report.failure.reason and len(report.failure.reason) < 2500
    assert seen[-1] == stage and report.artefacts == []
    json.dumps(report.as_dict())  # goes into journals and passports


@pytest.mark.parametrize("name", [n for n in WRONG if n not in WHOLE_CHECK])
def test_wrong_values(name, pool):
    """The interpret stage alone, without the compiles that a check starts beside it."""
    name, source, stage, fragments = WRONG[name]
    assert stage == "interpret" and check_policy(source).passed
    first, again = interpretation(name, source, pool), interpretation(name, source, pool)
    assert not first.passed and first.stage == "interpret"
    for text in fragments:
        assert text in first.reason
    assert again.reason == first.reason  # the seed is all it takes to see it again


def interpretation(name, source, pool):
    inputs = cases(task(name), "bf16", SEED)
    plain = [{k: v for k, v in case.items() if k in ("a", "b", "operands", "tile")} for case in inputs]
    answer = pool.submit("interpret", source, inputs=plain, dtypes=dtype_names(task(name), "bf16")).result(timeout=120)
    return judge_interpretation(task(name), "bf16", inputs, answer, SUITE.path, SEED, time.perf_counter())


@pytest.fixture(scope="module")
def accepted(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artefacts")
    seen = []
    name = "gemm_residual_rmsnorm"
    report = check(
        compose(SUITE[name]), SUITE[name], pool, author="composer", keep=folder, seed=SEED, progress=seen.append
    )
    return report, folder, seen


def test_composed_kernel_passes_every_stage_in_order(accepted):
    report, _, seen = accepted
    assert report.passed and report.failure is None, report.failure
    assert seen == ["policy", "interpret", "compile", "resources"]
    assert [(v.stage, v.evidence.get("act")) for v in report.verdicts] == [
        ("policy", None), ("interpret", "bf16"), ("interpret", "fp16"), ("interpret", "fp32"),
        ("compile", "bf16"), ("compile", "fp16"), ("resources", None),
    ]  # fmt: skip
    assert report.isolation == sandbox.level()[0] and report.seconds > 0
    assert report.program["name"] == "gemm_residual_rmsnorm"
    for verdict in report.verdicts:
        assert verdict.passed and verdict.reason and verdict.seconds >= 0
        if verdict.stage == "interpret":
            assert verdict.evidence["seed"] == SEED and set(verdict.evidence["worst"]) == {"h", "sumsq", "y"}


def test_artefacts_are_saved_with_matching_hashes(accepted):
    report, folder, _ = accepted
    manifests = sorted(folder.glob("*.json"))
    assert len(manifests) == 2 and len(list(folder.glob("*.o"))) == 2
    for path in manifests:
        manifest = Artefact.model_validate_json(path.read_text())
        assert manifest in report.artefacts
        assert sha256(folder / manifest.object) == manifest.object_sha256
        assert (
            manifest.task == "gemm_residual_rmsnorm"
            and manifest.author == "composer"
            and manifest.config == DEFAULT_CONFIG
        )
        assert set(manifest.fields) | {manifest.d} == {"residual", "weight", "h", "sumsq", "y"}
        assert manifest.declared.outputs.keys() == {"h", "sumsq", "y"}
        assert "source" not in manifest.model_dump() and "def gemm" not in path.read_text()  # no candidate code travels
    assert {Artefact.model_validate_json(p.read_text()).act for p in manifests} == {"bf16", "fp16"}


def test_resources_of_the_compiled_kernel(accepted):
    used = accepted[0].verdicts[-1].evidence
    assert used["counts"]["HGMMA"] > 0 and used["counts"]["UTMALDG"] > 0 and used["counts"]["UTMASTG"] > 0
    assert used["counts"].get("STL", 0) == used["counts"].get("LDL", 0) == used["local_bytes"] == 0
    assert 0 < used["registers"] <= 255 and 0 < used["shared_bytes"] <= 227 * 1024
    assert "no spills" in accepted[0].verdicts[-1].reason


def test_object_without_a_kernel_is_a_verdict(tmp_path):
    for content in (b"", b"\x7fELF", b"\x7fELF" * 100, b"x" * 1000):
        (tmp_path / "k.o").write_bytes(content)
        verdict = check_resources(tmp_path / "k.o")
        assert not verdict.passed and verdict.stage == "resources" and "no cubin" in verdict.reason


def test_dtypes_compile_to_different_kernels(accepted):
    """Dao-AILab/quack #131: no cache returns the object of another variant."""
    hashes = {v.evidence["act"]: v.evidence["object_sha256"] for v in accepted[0].verdicts if v.stage == "compile"}
    assert set(hashes) == {"bf16", "fp16"} and len(set(hashes.values())) == 2


def test_reference_of_a_suite_that_is_missing_is_a_harness_error_not_a_verdict(pool):
    from reference_kernels.tasks import SuiteError

    mine = task("gemm_rmsnorm").model_copy(update={"name": "gemm_mine"})
    with pytest.raises(SuiteError, match="no built-in reference; add 'reference: file.py:function'"):
        check(compose(mine), mine, pool, seed=1)
