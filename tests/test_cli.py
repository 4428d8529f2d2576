"""The command line as a person and a script use it: exit codes, JSON, messages, Ctrl-C, resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = Path(__file__).resolve().parent / "fixtures"
SUITE = FIXTURES / "suite.yaml"
COMMAND = [sys.executable, "-c", "from agent.cli import main; main()"]  # what the console script does
PASS, FAIL, ERROR, INTERRUPTED = 0, 1, 2, 130

SCALE = """\
from primitives import ColVecLoad, TileStore, epilogue


@epilogue(r=ColVecLoad(), y=TileStore())
def first_scale(acc, r):
    return {"y": acc * r}
"""


class Done:
    def __init__(self, code, stdout, stderr):
        self.code, self.out, self.err = code, stdout, stderr

    @property
    def json(self):
        return json.loads(self.out)  # the whole of stdout is one document

    def __repr__(self):
        return f"exit {self.code}\n--- stdout\n{self.out[-1500:]}\n--- stderr\n{self.err[-1500:]}"


def heed_ctrl_c() -> None:
    """A shell starts its background jobs deaf to SIGINT, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def environment():
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CODA_")}
    return {**clean, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}


def cli(*arguments, cwd=ROOT, stdin=None, timeout=200):
    """Run the command in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def inside(monkeypatch, capsys):
    """Run the command in this process: the same entry point without the start of an interpreter."""
    from agent.cli import main

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["coda-agent", *map(str, arguments)])
        capsys.readouterr()
        code = PASS
        try:
            main()
        except SystemExit as e:
            code = e.code or PASS
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


def fails(done, *texts):
    """A fault of the call: exit code 2 and one message that says what to do, no traceback."""
    assert done.code == ERROR, done
    assert "Traceback" not in done.err and any(line.startswith("error:") for line in done.err.splitlines()), done
    for text in texts:
        assert text in done.err.replace("\n", " "), done
    return done


# --- looking ----------------------------------------------------------------------------


def test_help_of_every_verb(inside):
    top = inside("--help")
    assert top.code == PASS
    for verb in ("tasks", "docs", "show", "doctor", "check", "bundle", "measure", "generate"):
        assert verb in top.out
        done = inside(verb, "--help")
        assert done.code == PASS and "--json" in done.out, done


def test_module_can_be_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "agent.cli", "--help"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == PASS, done.stderr[-1500:]
    assert "generate" in done.stdout


def test_tasks(inside):
    done = cli("tasks", "--json")
    assert done.code == PASS and len(done.json) >= 16 and done.json["gemm_rope"]["paper"] == 1
    assert done.err == ""
    done = inside("tasks")
    assert done.code == PASS and "gemm_residual_rmsnorm_bwd" in done.out
    done = inside("tasks", "gemm_rmsnorm", "--json")
    assert done.json["ops"] == [{"name": "y", "op": "scale_rows", "args": ["acc", "rstd"]}]
    done = inside("tasks", "gemm_rmsnorm")
    assert "y = (A B) * rstd[m]" in done.out and "y = scale_rows(acc, rstd)" in done.out  # brackets are no markup
    done = inside("tasks", "--tasks", SUITE, "--json")
    assert list(done.json) == ["first_scale", "second_bias"]


def test_unknown_task(inside):
    fails(cli("tasks", "gemm_ropes"), "no task 'gemm_ropes'", "it has: gemm_rope")
    done = inside("tasks", "gemm_ropes", "--json")
    assert done.code == ERROR and "no task 'gemm_ropes'" in done.json["error"]
    fails(inside("generate", "gemm_ropes"), "no task 'gemm_ropes'")
    fails(inside("check", FIXTURES / "reference.py", "--task", "gemm_ropes"), "no task 'gemm_ropes'")


def test_wrong_suite_file(inside, tmp_path):
    path = tmp_path / "suite.yaml"
    fails(cli("tasks", "--tasks", path), "cannot read suite", "No such file", "--tasks FILE")
    path.write_text("tasks: [")
    fails(inside("tasks", "--tasks", path), f"{path}:", "not valid YAML")
    path.write_text(SUITE.read_text().replace("ColVecLoad, fill", "ColVecLod, fill"))
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "ColVecLod" in text)
    fails(inside("tasks", "--tasks", path), f"{path}:{line}: field 'tasks.first_scale.operands.r.kind'")
    done = inside("generate", "--all", "--tasks", path, "--json")
    assert done.code == ERROR and f"{path}:{line}" in done.json["error"]


def test_docs(inside):
    done = inside("docs", "--json")
    assert done.code == PASS and {"silu", "ColVecReduce", "epilogue"} <= {
        n for names in done.json.values() for n in names
    }
    done = inside("docs", "silu")
    assert done.code == PASS and "silu" in done.out
    done = inside("docs", "ColVecReduce", "--json")
    assert done.json["name"] == "ColVecReduce" and "product=True" in done.json["page"]
    fails(inside("docs", "silo"), "no page for 'silo'", "silu")


def test_doctor():
    done = cli("doctor", "--json")
    assert done.code == PASS, done
    found = {f["what"]: f for f in done.json["findings"]}
    assert done.json["ok"] and {"Python", "torch", "sandbox", "GPU", "cuobjdump", "library"} <= set(found)
    assert all(f["mend"] for f in done.json["findings"] if not f["ok"])
    if not torch.cuda.is_available():
        assert not found["GPU"]["ok"] and not found["GPU"]["needed"] and "coda-agent bundle" in found["GPU"]["mend"]


def test_usage_errors_exit_with_two(inside):
    for arguments in (["nonsense"], ["check"], ["generate", "--attempts", "0", "gemm_rmsnorm"], ["tasks", "--unknown"]):
        done = inside(*arguments)
        assert done.code == ERROR and "Traceback" not in done.err, done
    fails(inside("generate"), "name at least one task, or use --all")
    fails(inside("generate", "gemm_rmsnorm", "--author", "nobody"), "no author 'nobody'", "composer")
    fails(inside("bundle"), "name at least one task, or use --all")


def test_brackets_in_names_are_text_not_markup(inside, tmp_path):
    """Paths such as app/[id]/kernel.py are common; rich would swallow them, or fail on [/id]."""
    fails(inside("check", tmp_path / "[draft]" / "k.py"), "[draft]/k.py")
    fails(inside("tasks", "[/red]"), "no task '[/red]'")
    fails(inside("docs", "[bold]"), "no page for '[bold]'")


# --- checking ---------------------------------------------------------------------------------


def test_check_of_a_good_kernel_of_a_users_suite(tmp_path):
    """--tasks with a reference in a file beside the suite; the directory of the caller does not matter."""
    file = tmp_path / "k.py"
    file.write_text(SCALE)
    done = cli("check", file, "--tasks", SUITE, "--json", "--seed", 5, cwd=tmp_path)
    assert done.code == PASS, done
    report = done.json
    assert report["passed"] and report["task"] == "first_scale"
    assert [v["stage"] for v in report["verdicts"]] == ["policy", "interpret", "interpret", "compile", "resources"]
    assert report["verdicts"][1]["evidence"]["seed"] == 5


def test_check_of_a_wrong_kernel(tmp_path):
    file = tmp_path / "k.py"
    file.write_text(SCALE.replace("acc * r", "acc / r"))
    done = cli("check", file, "--tasks", SUITE)
    assert done.code == FAIL
    assert "pass policy" in done.out and "FAIL interpret: y: " in done.out and "first_scale: failed" in done.out
    assert "y[0, " in done.out  # brackets of a reason are printed, too


def test_check_of_a_forbidden_kernel_from_standard_input():
    done = cli("check", "-", "--task", "gemm_rmsnorm", "--json", stdin="import os\n")
    assert done.code == FAIL and not done.json["passed"]
    assert [v["stage"] for v in done.json["verdicts"]] == ["policy"] and "line 1" in done.json["verdicts"][0]["reason"]


def test_check_of_a_file_that_cannot_be_read(inside, tmp_path):
    fails(cli("check", tmp_path / "none.py", "--task", "gemm_rmsnorm"), "cannot read", "No such file")
    done = inside("check", tmp_path / "none.py", "--json")
    assert done.code == ERROR and "No such file" in done.json["error"]
    fails(inside("check", tmp_path), "cannot read")
    (tmp_path / "k.py").write_bytes(b"\xff\xfe\x00")
    fails(inside("check", tmp_path / "k.py"), "cannot read")
    (tmp_path / "k.py").write_text("x = 1\n")
    fails(inside("check", tmp_path / "k.py"), "does not say which task", "--task NAME")


def test_reference_that_does_not_exist(inside, tmp_path):
    """A fault of the suite, not of the kernel: exit code 2."""
    shutil.copy(SUITE, tmp_path)
    (tmp_path / "k.py").write_text(SCALE)
    fails(
        inside("check", tmp_path / "k.py", "--tasks", tmp_path / "suite.yaml"),
        "reference.py:first_scale",
        "is not an existing file.py:function",
    )


def test_ctrl_c_during_a_check_is_not_a_verdict(tmp_path):
    (tmp_path / "k.py").write_text(SCALE)
    process = subprocess.Popen(
        [*COMMAND, "check", str(tmp_path / "k.py"), "--tasks", str(SUITE)], env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    assert "policy" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, stderr[-1500:]
    assert "Traceback" not in stderr


# --- generating -----------------------------------------------------------------------------------


def journal(folder):
    (path,) = (folder / "runs").glob("*/journal.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


class Story:
    """One run: generate --all, Ctrl-C in the second task, generate --resume."""


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Told once for all tests below; with relative paths, as a person types them."""
    told = Story()
    told.folder = folder = tmp_path_factory.mktemp("generated")
    shutil.copy(SUITE, folder), shutil.copy(FIXTURES / "reference.py", folder)
    process = subprocess.Popen(
        [*COMMAND, "generate", "--all", "--no-measure", "--library", "lib", "--runs", "runs", "--tasks", "suite.yaml"],
        env=environment(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and process.poll() is None:
        files = list(folder.glob("runs/*/journal.jsonl"))
        if files and '"task_end"' in files[0].read_text():
            break
        time.sleep(0.05)
    time.sleep(0.3)  # the second task is under way
    process.send_signal(signal.SIGINT)
    told.interrupted = Done(None, *process.communicate(timeout=60))
    told.interrupted.code = process.returncode
    told.first_half = journal(folder)
    told.resumed = cli("generate", "--resume", "last", "--runs", "runs", "--json", cwd=folder)
    told.whole = journal(folder)
    told.run = next((folder / "runs").iterdir()).name
    return told


def test_ctrl_c_ends_with_its_own_code_and_says_how_to_go_on(story):
    assert story.interrupted.code == INTERRUPTED, story.interrupted
    assert "Traceback" not in story.interrupted.err and f"generate --resume {story.run}" in story.interrupted.err
    assert [e["task"] for e in story.first_half if e["event"] == "task_end"] == ["first_scale"]
    assert story.first_half[0]["event"] == "start" and story.first_half[-1]["event"] == "interrupted"
    assert "kept first_scale" in story.interrupted.out


def test_resume_finishes_what_is_left_and_only_that(story):
    assert story.resumed.code == PASS, story.resumed
    assert story.resumed.json["run"] == story.run and not story.resumed.json["measured"]
    assert {n: o["ending"] for n, o in story.resumed.json["tasks"].items()} == {
        "first_scale": "kept",
        "second_bias": "kept",
    }
    assert story.whole[: len(story.first_half)] == story.first_half  # append-only
    assert [e["task"] for e in story.whole if e["event"] == "task_end"] == ["first_scale", "second_bias"]
    assert [e["event"] for e in story.whole].count("start") == 1 and story.whole[-1]["event"] == "end"
    assert len(list((story.folder / "lib").glob("*/*.py"))) == 2


def test_resume_of_a_finished_run_repeats_nothing(story):
    """From another directory, too: the run knows where its suite and its library are."""
    done = cli("generate", "--resume", story.run[:-2], "--runs", story.folder / "runs", "--json", cwd="/")
    assert done.code == PASS, done
    assert done.json["tasks"] == story.resumed.json["tasks"] and done.json["run"] == story.run
    new = journal(story.folder)[len(story.whole) :]
    assert new and not [e for e in new if e["event"] in ("candidate", "check", "task_end")]
    assert not Path("/lib/first_scale").exists()


def test_show_what_was_generated(story, inside):
    folder = story.folder
    outcome = story.resumed.json["tasks"]["first_scale"]
    assert (folder / "lib" / "first_scale" / f"{outcome['kernel']}.py").read_text().count("acc * r") == 1
    shown = inside("show", "first_scale", "--library", folder / "lib", "--json")
    assert shown.code == PASS and shown.json["kernel"] == outcome["kernel"] and "acc * r" in shown.json["source"]
    assert shown.json["run"] == story.run and [v["stage"] for v in shown.json["check"]][-1] == "resources"
    text = inside("show", outcome["kernel"], "--library", folder / "lib")
    assert "checked, not measured" in text.out and "pass compile" in text.out and "def first_scale(acc, r)" in text.out
    fails(
        inside("show", "nothing", "--library", folder / "lib"),
        "no kernel 'nothing'",
        f"first_scale/{outcome['kernel']}",
    )
    path = folder / "lib" / "first_scale" / f"{outcome['kernel']}.py"
    before = path.read_text()
    path.write_text(before + "\n")
    try:
        fails(inside("show", "first_scale", "--library", folder / "lib"), "was changed after it was checked")
    finally:
        path.write_text(before)


def test_bundle_refuses_tasks_without_a_kernel(tmp_path, inside):
    fails(
        inside("bundle", "second_bias", "--library", tmp_path / "lib", "--tasks", SUITE, "--out", tmp_path / "b"),
        "no kernel in", "second_bias", "coda-agent generate",
    )  # fmt: skip


def test_task_beyond_the_composer_names_the_op(tmp_path):
    done = cli(
        "generate",
        "beyond",
        "--tasks",
        FIXTURES / "beyond.yaml",
        "--library",
        tmp_path / "lib",
        "--runs",
        tmp_path / "runs",
        "--json",
    )
    assert done.code == FAIL, done
    outcome = done.json["tasks"]["beyond"]
    assert (
        outcome["ending"] != "kept"
        and "op 'y = conv(acc)'" in outcome["reason"]
        and "no rule for 'conv'" in outcome["reason"]
    )
    assert not list(tmp_path.glob("lib/*/*.py")) and journal(tmp_path)[-1]["event"] == "end"


@pytest.mark.parametrize("where", ["library", "runs"])
def test_place_that_cannot_be_written(tmp_path, where):
    (tmp_path / "file").write_text("")
    where_to = {"library": tmp_path / "lib", "runs": tmp_path / "runs", where: tmp_path / "file" / "x"}
    done = cli(
        "generate", "first_scale", "--tasks", SUITE, "--library", where_to["library"], "--runs", where_to["runs"]
    )
    assert done.code == ERROR, done
    assert f"--{where} DIR" in done.err and "cannot write" in done.err, done


def test_resume_without_a_run(inside, tmp_path):
    fails(inside("generate", "--resume", "last", "--runs", tmp_path), "no run(s) match 'last'", "there are: no runs")
    run = tmp_path / "20260101-000000-abcd"
    run.mkdir()
    (run / "journal.jsonl").write_text('{"time": "2026-01-01T00:00:00", "event": "start", "tas')
    fails(inside("generate", "--resume", "last", "--runs", tmp_path), run.name)  # the power went while it started


# --- measuring without a GPU ----------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_measure_without_a_gpu(story):
    done = fails(
        cli("measure", "first_scale", "--library", story.folder / "lib", "--tasks", SUITE, "--json"),
        "no CUDA device", "coda-agent bundle", "coda-agent measure DIR",
    )  # fmt: skip
    assert "coda-agent bundle" in done.json["error"]


def test_measure_of_a_directory_that_is_no_bundle(inside, tmp_path):
    fails(inside("measure", tmp_path), "holds no bundle.json", "coda-agent bundle TASK --out")
    (tmp_path / "bundle.json").write_text("{")
    fails(inside("measure", tmp_path), "bundle")
