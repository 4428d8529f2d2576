"""The sanitizer stage with a stand-in for NVIDIA's tool: a real process on the PATH that finds what it is told to find.

Nothing here runs a kernel; what is shown is which command is run, what its answers are taken for, and that a tool
which does not find its planted fault never calls a kernel clean.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from agent.cli import main
from tests.test_measure import TASK, artefact
from verifier import sanitize as stage
from verifier.bundle import CONFIGS
from verifier.manifest import config_key
from verifier.measure import Bundle
from verifier.verdict import HarnessError

# FAKE_<tool>_<control|launch>: "found", "clean", "crash" or "hang"
STAND_IN = """\
#!{python}
import json, os, sys, time
arguments = sys.argv[1:]
with open({log!r}, "a") as f:
    f.write(json.dumps([arguments, os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")]) + "\\n")
tool, code = arguments[arguments.index("--tool") + 1], int(arguments[arguments.index("--error-exitcode") + 1])
what = arguments[arguments.index("verifier.sanitize") + 1]
if what == "launch":
    request = json.load(open(arguments[-1]))
    assert set(request) == {{"task", "manifest", "shape"}}
answer = os.environ.get(f"FAKE_{{tool}}_{{what}}", "found" if what == "control" else "clean")
print("========= COMPUTE-SANITIZER")
if answer == "hang": time.sleep(60)
if answer == "crash": print("RuntimeError: no CUDA GPUs are available", file=sys.stderr); sys.exit(1)
if answer == "found":
    print("========= Invalid __global__ write of size 4 bytes")
    print("chatter of the target")
    print("========= ERROR SUMMARY: 1 error")
    sys.exit(code)
print("========= ERROR SUMMARY: 0 errors")
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The stand-in on the PATH; returns what it was called with so far."""
    script, log = tmp_path / "compute-sanitizer", tmp_path / "log"
    script.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    stage.control.cache_clear()
    yield lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    stage.control.cache_clear()


def results(**fields) -> dict[str, str]:
    found = stage.sanitize(TASK, "/nowhere/manifest.json", (200, 272, 136), **fields)
    return {f["tool"]: f["result"] for f in found}


def test_clean_only_after_the_planted_fault_was_found(tool):
    assert results() == {t: "clean" for t in stage.TOOLS}
    ran = [(a[a.index("--tool") + 1], a[a.index("verifier.sanitize") + 1]) for a, _ in tool()]
    assert ran == [(t, what) for t in stage.TOOLS for what in ("control", "launch")]
    assert all(caching == "1" for _, caching in tool())  # an overrun must leave its allocation


def test_the_control_of_a_tool_runs_once(tool):
    results(tools=("memcheck",)), results(tools=("memcheck",))
    assert sum("control" in a for a, _ in tool()) == 1 and sum("launch" in a for a, _ in tool()) == 2


def test_a_fault_is_reported_with_the_tools_own_words(tool, monkeypatch):
    monkeypatch.setenv("FAKE_memcheck_launch", "found")
    found = stage.sanitize(TASK, "/nowhere", (200, 272, 136), ("memcheck", "initcheck"))
    assert [f["result"] for f in found] == ["fault", "clean"]
    assert "Invalid __global__ write" in found[0]["report"] and "chatter" not in found[0]["report"]


@pytest.mark.parametrize(
    "what, answer, reason",
    [
        ("control", "clean", "the planted fault was not found here"),
        ("control", "crash", "the planted fault could not be run: ended with 1.*no CUDA GPUs"),
        ("launch", "crash", "ended with 1.*no CUDA GPUs"),
        ("control", "hang", "the planted fault could not be run: not done within 1 s"),
        ("launch", "hang", "not done within 1 s"),
    ],
)
def test_what_proves_nothing_is_inconclusive_and_says_why(tool, monkeypatch, what, answer, reason):
    monkeypatch.setenv(f"FAKE_racecheck_{what}", answer)
    if answer == "hang":
        monkeypatch.setattr(stage, "SECONDS", 1)
    [found] = stage.sanitize(TASK, "/nowhere", (200, 272, 136), ("racecheck",))
    assert found["result"] == "inconclusive"
    assert re.search(reason, found["report"], re.S)
    if what == "control":
        assert not any("launch" in a for a, _ in tool())


def test_without_the_tool_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HarnessError, match="install the CUDA toolkit's compute-sanitizer"):
        stage.sanitizer()


# --- the verb ------------------------------------------------------------------------------


@pytest.fixture
def bundled(tmp_path, monkeypatch):
    """A bundle of three kernels, two of them the same object."""
    arts = [artefact(author, c) for author in ("one", "two") for c in CONFIGS[:2]]
    arts += [arts[0].model_copy(update={"author": "twin", "source_sha256": "twin"})]
    arts += [artefact("one", CONFIGS[0], "fp16")]
    kernels = [{"task": TASK.name, "author": n, "source_sha256": n, "source": ""} for n in ("one", "two", "twin")]
    made = Bundle(tmp_path, {"kernels": kernels}, [(f"/{a.object_sha256}", a) for a in arts], {TASK.name: TASK})
    monkeypatch.setattr("verifier.measure.read_bundle", lambda directory: made)
    return str(tmp_path)


def verb(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["coda-agent", "sanitize", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    done = capsys.readouterr()
    return ended.value.code or 0, done.out, done.err


def test_clean_is_exit_0_and_equal_objects_run_once(tool, bundled, monkeypatch, capsys):
    code, text, _ = verb(monkeypatch, capsys, bundled, "--json")
    answer = json.loads(text)
    assert code == 0 and answer["passed"]
    assert [(k["author"], k["config"], k["shape"]) for k in answer["kernels"]] == [
        (who, config_key(CONFIGS[0]), list(TASK.ragged[0])) for who in ("one", "two", "twin")
    ]
    assert all([t["result"] for t in k["tools"]] == ["clean"] * 4 for k in answer["kernels"])
    assert sum("launch" in a for a, _ in tool()) == 2 * 4 and sum("control" in a for a, _ in tool()) == 4


def test_a_fault_is_exit_1_and_in_the_table(tool, bundled, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_synccheck_launch", "found")
    monkeypatch.setenv("FAKE_racecheck_control", "clean")  # an inconclusive tool beside it changes nothing
    code, text, errors = verb(monkeypatch, capsys, bundled, "--task", TASK.name)
    assert code == 1 and "fault" in text and "Invalid __global__ write" in text
    assert "racecheck proves nothing here" in " ".join(errors.split())


def test_inconclusive_is_exit_2_and_said(tool, bundled, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_initcheck_control", "clean")
    code, text, errors = verb(monkeypatch, capsys, bundled, "--tool", "initcheck", "--tool", "memcheck", "--json")
    answer = json.loads(text)
    assert code == 2 and not answer["passed"]
    assert [t["result"] for t in answer["kernels"][0]["tools"]] == ["inconclusive", "clean"]
    assert "inconclusive: initcheck proves nothing here, the planted fault was not found" in " ".join(errors.split())


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--tool", "lint"], "no tool 'lint'; there is: memcheck"),
        (["--task", "nothing"], "has no task 'nothing'"),
        (["--shape", "200x272"], "write MxNxK"),
        (["--shape", "200x271x136"], "N must be a multiple of 8"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_exit_2(tool, bundled, monkeypatch, capsys, arguments, reason):
    code, _, errors = verb(monkeypatch, capsys, bundled, *arguments)
    assert code == 2 and reason in " ".join(errors.split())
    assert tool() == []


def test_a_size_of_ones_own(tool, bundled, monkeypatch, capsys):
    code, text, _ = verb(monkeypatch, capsys, bundled, "--shape", "64x128x64", "--tool", "memcheck", "--json")
    assert code == 0 and json.loads(text)["kernels"][0]["shape"] == [64, 128, 64]
