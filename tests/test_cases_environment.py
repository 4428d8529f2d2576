"""Public bug reports about installs, drivers, compilers and hanging kernels as tests. Each docstring names its source.

Environments are made, not imitated: packages are directories on the path, a GPU worker is a
process that speaks the protocol, a crash is a crash.
"""

import functools
import hashlib
import io
import json
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from agent import doctor
from agent.composer import compose
from agent.generate import keep_measurement
from generated import runtime
from generated.library import Library, LibraryError, Passport, kernel_id
from generated.passport import Decision
from reference_kernels.tasks import SuiteError, load_suite
from verifier import driver as drivers
from verifier.bundle import CONFIGS
from verifier.check import DEFAULT_CONFIG, _compile_failed
from verifier.gpu import GpuWorker, NoGpu
from verifier.manifest import PACKAGES, config_key, toolchain
from verifier.measure import Bundle, Measurement, Session
from verifier.policy import check_policy
from verifier.verdict import HarnessError, Verdict

FIXTURES = Path(__file__).resolve().parent / "fixtures"
SUITE = load_suite()

GOOD = """\
from primitives import ColVecLoad, TileStore, epilogue


@epilogue(r=ColVecLoad(), y=TileStore())
def first_scale(acc, r):
    return {"y": acc * r}
"""


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command line in this process: (exit code, the JSON it printed)."""
    from agent.cli import main

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["coda-agent", *map(str, arguments), "--json"])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code or 0, json.loads(capsys.readouterr().out)

    return run


STAND_IN = """\
#!{python}
import json, os, sys, time
def send(**message):
    os.write(1, json.dumps(message).encode() + b"\\n")
send(ok=True, ready=True)
for line in sys.stdin:
    command = json.loads(line)
    what = command.get("manifest", "")
    if "A" in what:
        time.sleep(600)
    if "M" in what:
        send(ok=False, error="OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB", fatal=False)
        continue
    if "B" in what:
        send(ok=False, error="AcceleratorError: CUDA error: an illegal memory access was encountered", fatal=True)
        os._exit(1)
    facts = {{"device": "NVIDIA H200", "driver": {driver!r}, "torch": "2.11.0", "pid": os.getpid()}}
    send(ok=True, result={{**facts, "passed": True, "reason": "", "findings": []}})
"""


@pytest.fixture
def gpu_machine(tmp_path, monkeypatch):
    """Make the process that the client starts a stand-in for a worker on a GPU with this driver."""

    def make(driver="580.159.04"):
        script = tmp_path / "python"
        script.write_text(STAND_IN.format(python=sys.executable, driver=driver))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return make


# --- kernels that hang, fault or crash the compiler ------------------------------------------------


def test_a_hang_and_a_memory_fault_cost_one_candidate_each(gpu_machine):
    """KernelBench #164, emmy #215, cutlass #2879: A waits for ever, B stores out of bounds, C is right and passes."""
    gpu_machine()
    with GpuWorker() as worker:
        session = Session(worker, Bundle(Path("/"), {}, [], {}))
        first = worker.call("hello")["pid"]
        start = time.monotonic()
        hung = session._guarded("numerics", 1.0, manifest="A")
        assert 1.0 <= time.monotonic() - start < 10
        assert not hung["passed"] and hung["reason"] == "no answer within 1 s; the kernel hangs"
        second = worker.call("hello")["pid"]
        fault = session._guarded("numerics", 20.0, manifest="B")
        assert not fault["passed"] and fault["reason"].startswith("memory fault: ")
        after = session._guarded("numerics", 20.0, manifest="C")
        assert after["passed"] and len({first, second, after["pid"]}) == 3  # each from a clean process


def test_exhausted_memory_is_no_fault_of_a_candidate(gpu_machine):
    """gemm_swiglu_bwd at 8192x28672x8192: 36 configurations have 101 GB of outputs, and honest kernels failed."""
    gpu_machine()
    with GpuWorker() as worker:
        session = Session(worker, Bundle(Path("/"), {}, [], {}))
        with pytest.raises(HarnessError, match=r"memory does not hold .*3\.50 GiB.*smaller --shape"):
            session._guarded("add", 20.0, manifest="M")
        left_out = session._guarded("add_baseline", 20.0, manifest="M")  # a baseline is left out, with the reason
        assert not left_out["passed"] and "out of memory" in left_out["reason"]


def test_a_crash_of_the_compiler_is_a_verdict_with_a_short_log(pool):
    """cutlass #3429, #3420, #2676: a dead backend leaves its signal and the end of its log; the next job is served."""
    body = "    import os\n    print('x' * 9000, flush=True)\n    print('the last words', flush=True)\n    os.abort()\n"
    source = GOOD.replace("    return", f"{body}    return")
    job = {"act": "bf16", "dtypes": {"r": "fp32", "y": "bf16"}, "config": DEFAULT_CONFIG, "b_major": "n"}
    answer = pool.submit("compile", source, **job).result(timeout=120)
    verdict = _compile_failed(answer, "bf16", time.perf_counter())
    assert verdict.stage == "compile" and not verdict.passed
    assert verdict.reason == "does not compile for sm_90a in bf16: the process ended by SIGABRT"
    assert "the last words" in verdict.evidence["log"] and len(verdict.evidence["log"]) <= 800
    assert pool.submit("declare", GOOD).result(timeout=60).ok


def test_a_candidate_cannot_call_the_compiler():
    """cutlass #3429: a candidate that compiles its own kernel function is refused as text."""
    body = "@primitive(cpu=relu)\ndef mine(x):\n    return cute.compile(x)\n\n\n"
    source = GOOD.replace("import ", "import cute, primitive, relu, ").replace("@epilogue", f"{body}@epilogue")
    verdict = check_policy(source)
    assert not verdict.passed and "line 6: attribute call; only cute.math.*" in verdict.reason
    allowed = source.replace("cute.compile(x)", "cute.arch.fmax(x, 0.0)")
    assert check_policy(allowed).passed


def test_an_endless_compile_ends_at_its_limit(pool):
    """pytorch #186800: a compile that never ends is a verdict after a wall limit, never a wait."""
    source = GOOD.replace("    return", "    while True:\n        pass\n    return")
    job = {"act": "bf16", "dtypes": {"r": "fp32", "y": "bf16"}, "config": DEFAULT_CONFIG, "b_major": "n"}
    start = time.monotonic()
    answer = pool.submit("compile", source, wall_seconds=2.0, **job).result(timeout=60)
    verdict = _compile_failed(answer, "bf16", time.perf_counter())
    assert verdict.reason == "does not compile for sm_90a in bf16: no answer within 2 s"
    assert 2.0 <= time.monotonic() - start < 15


@pytest.mark.parametrize("shape, admitted", [("[8, 1048576, 64]", True), ("[8, 1048592, 64]", False)])
def test_the_width_of_a_row_is_bounded(tmp_path, shape, admitted):
    """pytorch #190843: N = 2^20 is the widest row; beyond it the suite is refused, with the bound."""
    file = tmp_path / "suite.yaml"
    text = (FIXTURES / "suite.yaml").read_text()
    file.write_text(text.replace("[[136, 272, 72]]", f"[{shape}]"))
    if admitted:
        assert load_suite(file)["first_scale"].ragged == ((8, 1 << 20, 64),)
        return
    with pytest.raises(SuiteError, match="field 'defaults.ragged.0.1': .*less than or equal to 1048576"):
        load_suite(file)


# --- source text -----------------------------------------------------------------------------------


def test_text_from_standard_input_is_compiled_from_a_file(call):
    """cutlass #2636: the DSL re-reads function source from disk, so text through stdin is written to a file first."""
    code, report = call("check", "-", "--tasks", FIXTURES / "suite.yaml", "--seed", 3, stdin=GOOD)
    assert code == 0 and report["task"] == "first_scale"
    assert [v["stage"] for v in report["verdicts"]] == ["policy", "interpret", "interpret", "compile", "resources"]


# --- installs ----------------------------------------------------------------------------------------


def install(folder, name, version):
    """A distribution as pip leaves it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def package(name):
    return next(f for f in doctor._packages() if f.what == name)


def test_doctor_without_any_package(tmp_path, monkeypatch, gpu_machine, call):
    """cutlass #3001, #2801: with nothing installed every package is named with the command that installs it; exit 1."""
    gpu_machine()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    code, report = call("doctor")
    missing = {f["what"]: f["mend"] for f in report["findings"] if f["found"] == "not installed"}
    assert code == 1 and not report["ok"] and set(missing) == set(doctor.SUPPORTED)
    assert missing["nvidia-cutlass-dsl"] == "pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9'"


@pytest.mark.parametrize("how", ["installed", "folder", "file"])
def test_doctor_with_the_wrong_cutlass(tmp_path, monkeypatch, gpu_machine, call, how):
    """cutlass #3034, #2699: whatever hides CuTeDSL from 'import cutlass' is told with its place and the fix; exit 1."""
    gpu_machine()
    code, report = call("doctor")
    assert code == 0 and "cutlass" not in {f["what"] for f in report["findings"]}
    wrong = tmp_path / ("cutlass.py" if how == "file" else "cutlass")
    if how == "file":
        wrong.write_text("")
    else:
        wrong.mkdir()
        (wrong / "__init__.py").write_text("")
    if how == "installed":
        install(tmp_path, "cutlass", "0.2.0")
    monkeypatch.syspath_prepend(tmp_path)
    code, report = call("doctor")
    found = next(f for f in report["findings"] if f["what"] == "cutlass")
    assert code == 1 and not found["ok"] and str(wrong) in found["found"]
    mend = "pip uninstall cutlass" if how == "installed" else f"rename {wrong}, or take {tmp_path} off PYTHONPATH"
    assert found["mend"] == mend


@pytest.mark.parametrize(
    "name, version, fits",
    [
        ("nvidia-cutlass-dsl", "4.7.3", False), ("nvidia-cutlass-dsl", "4.8.0", False),
        ("nvidia-cutlass-dsl", "4.8.1", True), ("nvidia-cutlass-dsl", "4.8.10", True),
        ("nvidia-cutlass-dsl", "4.9.0", False), ("nvidia-cutlass-dsl", "4.10.1", False),
        ("quack-kernels", "0.5.9", False), ("quack-kernels", "0.6.5", True), ("quack-kernels", "0.7.0", False),
        ("apache-tvm-ffi", "0.1.14", False), ("apache-tvm-ffi", "0.1.15.post2", True),
        ("apache-tvm-ffi", "0.2.0", False),
        ("torch", "2.8.1", False), ("torch", "2.11.0+cu130", True), ("torch", "2.14.0", False),
    ],
)  # fmt: skip
def test_doctor_one_version_up_and_down(tmp_path, monkeypatch, name, version, fits):
    """vllm #43141, #47570, #43738, tritonbench #1169: names moved from DSL 4.4 to 4.6: the range is checked."""
    install(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    found = package(name)
    low, high = doctor.SUPPORTED[name]
    assert found.ok is fits and found.needed
    assert found.found == f"{version} in {tmp_path}"  # which one, and where it lies
    assert found.mend == ("" if fits else f"pip install '{name}>={low},<{high}'")


def test_kernels_record_the_versions_they_were_proven_with():
    """vllm #47571: every kernel of the library names the packages that made it, all in doctor's range."""
    passports = list(Library().passports())
    assert len(passports) >= 16
    for passport in passports:
        assert {*PACKAGES, "python"} <= set(passport.toolchain)
        for name in PACKAGES:
            low, high = doctor.SUPPORTED[name]
            assert doctor._version(low) <= doctor._version(passport.toolchain[name]) < doctor._version(high)


@pytest.mark.parametrize(
    "driver, ok", [("550.54.15", False), ("575.57.08", False), ("580.65.06", True), ("590.1", True)]
)
def test_doctor_with_an_old_driver(gpu_machine, call, driver, ok):
    """cutlass #2804: a driver below R580 is told as such: the message says driver, not GPU or architecture."""
    gpu_machine(driver)
    code, report = call("doctor")
    found = next(f for f in report["findings"] if f["what"] == "GPU")
    assert code == 0 and found["ok"] is ok  # checking and bundling need no driver
    assert f"NVIDIA H200, driver {driver}" in found["found"]
    assert found["mend"] == ("" if ok else "update the NVIDIA driver to 580 or newer")


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\nGCC version: 12.2.0\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar 11 22:54:40 UTC 2025\nGCC version: 12.2.0\n"
WORKER = """\
import sys, pathlib, torch
from verifier import driver, gpu_worker
torch.cuda.is_available = lambda: False
driver._from_nvml = lambda: None
driver.KERNEL_MODULE = pathlib.Path(sys.argv[1])
gpu_worker.main()
"""


@pytest.mark.parametrize("text", [OPEN, CLOSED])
@pytest.mark.parametrize("driver, old", [("550.54.15", True), ("580.65.06", False), (None, False)])
def test_a_driver_too_old_for_torch_is_told_though_cuda_sees_no_device(tmp_path, monkeypatch, text, driver, old):
    """cutlass #2804: with such a driver torch.cuda.is_available() is False; the message must name the driver."""
    module = tmp_path / "version"
    if driver:
        module.write_text(text.format(driver))
    done = subprocess.run([sys.executable, "-c", WORKER, module], capture_output=True, text=True, timeout=120)
    fault = json.loads(done.stdout)["fault"]
    assert (f"driver {driver} is too old; update it to 580" in fault) is old, done.stderr
    assert ("no CUDA device is visible" in fault) is not old
    assert (f"the NVIDIA driver {driver} is loaded" if driver and not old else "") in fault
    monkeypatch.setattr(drivers, "_from_nvml", lambda: None)
    monkeypatch.setattr(drivers, "KERNEL_MODULE", module)

    def no_gpu():
        raise NoGpu(f"{fault}. Measure on a machine with a Hopper GPU")

    monkeypatch.setattr(doctor, "require_gpu", no_gpu)
    found = doctor._gpu()
    assert not found.ok and found.found == fault and found.mend.startswith("update" if old else "measure elsewhere")


# --- serving -----------------------------------------------------------------------------------------------

SHAPE, DEVICE = (2048, 2048, 2048), "NVIDIA H200"


@pytest.fixture
def served(tmp_path):
    """A library whose one kernel was measured and accepted, and its passport."""
    source = compose(SUITE["gemm_rmsnorm"])
    sha = hashlib.sha256(source.encode()).hexdigest()
    row = {"device": DEVICE, "shape": SHAPE, "config": config_key(CONFIGS[0]), "total_us": 1.0}
    row["ratios"] = {"gemm": {"median": 1.0}}
    passport = Passport(
        kernel=kernel_id("composer", source), task="gemm_rmsnorm", author="composer", source_sha256=sha,
        toolchain=toolchain(), timings=[row], history=[Decision(verb="accept", reviewer="me", reason="right")],
        status="measured", measure=[{"stage": "numerics", "passed": True, "reason": "right"}],
    )  # fmt: skip
    library = Library(tmp_path / "library")
    library.add(source, passport)
    return library, passport


def test_a_kernel_is_compiled_once_not_in_each_process(tmp_path, monkeypatch, served):
    """cutlass #3398, #2763: 506 s against 58 s to start; a second load compiles nothing, another toolchain does."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(runtime, "CACHE", cache)
    load = functools.partial(runtime.load, "gemm_rmsnorm", SHAPE, library=served[0], device=DEVICE)
    first = load()
    objects = {p: p.stat().st_mtime_ns for p in cache.rglob("*.o")}
    assert len(objects) == 1
    monkeypatch.setattr(sys, "executable", "/bin/false")  # from here on nothing can be compiled
    start = time.perf_counter()
    again = load()
    assert time.perf_counter() - start < 2.0
    assert again.artefact == first.artefact and {p: p.stat().st_mtime_ns for p in cache.rglob("*.o")} == objects
    newer = tmp_path / "newer"
    install(newer, "nvidia-cutlass-dsl", "4.8.2")
    with monkeypatch.context() as m:
        m.syspath_prepend(newer)
        with pytest.raises(HarnessError, match="the compile worker ended"):
            load(any_toolchain=True)
    (path,) = objects
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # one bit of a cached object
    with pytest.raises(HarnessError, match="is not the object its manifest names"):
        load()


def test_a_kernel_is_not_compiled_with_other_versions_than_it_was_proven_with(tmp_path, monkeypatch, served):
    """vllm #47571: built with another DSL than it was tested with, it may be wrong; measuring lifts the refusal."""
    library, passport = served
    monkeypatch.setattr(runtime, "CACHE", tmp_path / "cache")
    load = functools.partial(runtime.load, "gemm_rmsnorm", SHAPE, library=library, device=DEVICE)
    with monkeypatch.context() as m:  # what does not decide what is compiled may differ
        install(tmp_path / "torch", "torch", "2.9.1")
        m.syspath_prepend(tmp_path / "torch")
        load()
    newer = tmp_path / "newer"
    install(newer, "nvidia-cutlass-dsl", "4.8.2")
    monkeypatch.syspath_prepend(newer)
    refusal = "was proven with nvidia-cutlass-dsl 4.8.1, here is 4.8.2; .*coda-agent measure gemm_rmsnorm"
    before = set(tmp_path.rglob("*.o"))
    with pytest.raises(LibraryError, match=refusal):
        load()
    assert load(any_toolchain=True).artefact.toolchain["nvidia-cutlass-dsl"] == "4.8.2"
    assert len(set(tmp_path.rglob("*.o")) - before) == 1

    source = library.source(passport)
    made = load(any_toolchain=True).artefact
    content = {"kernels": [{"source": source, "source_sha256": passport.source_sha256}], "isolation": ""}
    session = types.SimpleNamespace(
        bundle=Bundle(tmp_path, content, [("", made)], {}), device={"device": DEVICE}, ceilings={}
    )
    for right in (False, True):
        verdict = Verdict(stage="numerics", passed=right, reason="")
        keep_measurement(
            Measurement("gemm_rmsnorm", "composer", passport.source_sha256, [verdict]), session, content, library
        )
        if not right:
            with pytest.raises(LibraryError, match=refusal):
                load()
    assert load().artefact.toolchain["nvidia-cutlass-dsl"] == "4.8.2"
