"""Runs: an append-only journal that survives crashes, and that one process at a time writes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.run import Run
from verifier.verdict import HarnessError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


def started(runs, **facts):
    return Run.start(runs, tasks=["a", "b"], author="composer", **facts)


def python(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def test_journal_holds_every_event_in_order(runs):
    run = started(runs, note="größer")
    run.log("candidate", task="a", source='"""x"""\n')
    run.log("task_end", task="a", outcome={"ending": "kept"})
    lines = run.path.read_text().splitlines()
    assert len(lines) == 3 and all(isinstance(json.loads(line), dict) for line in lines)
    events = run.events()
    assert [e["event"] for e in events] == ["start", "candidate", "task_end"]
    assert events[0]["tasks"] == ["a", "b"] and events[0]["note"] == "größer" and events[1]["source"] == '"""x"""\n'
    assert all(e["time"] for e in events) and run.path.parent.name == run.id


def test_journal_is_append_only(runs):
    run = started(runs)
    for i in range(20):
        before = run.path.read_bytes()
        run.log("step", number=i)
        assert run.path.read_bytes().startswith(before) and len(run.path.read_bytes()) > len(before)
    run.close()
    before = run.path.read_bytes()
    again = Run.resume(runs, run.id)
    assert again.path.read_bytes() == before
    again.log("resume")
    assert again.path.read_bytes().startswith(before)


def test_events_are_on_disk_when_log_returns(runs):
    """A process killed without warning has lost nothing that it logged."""
    code = (
        "import os, signal, sys; from agent.run import Run\nfrom pathlib import Path\n"
        "run = Run.start(Path(sys.argv[1]), tasks=['a'], author='composer')\n"
        "run.log('step', number=1)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    process = python(code, runs)
    assert process.wait(60) == -signal.SIGKILL
    run = Run.resume(runs, "last")
    assert [e["event"] for e in run.events()] == ["start", "step"]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_cut_off_last_line_is_dropped(runs, cut):
    run = started(runs)
    run.log("task_end", task="a", outcome={})
    run.log("task_end", task="b", outcome={})
    run.close()
    run.path.write_bytes(run.path.read_bytes()[: -cut - 1])
    again = Run.resume(runs, run.id)
    assert set(again.finished_tasks()) == {"a"}


@pytest.mark.parametrize(
    "tail", [b'{"time": "2026", "event": "ta', b"\0" * 40, b'{"time": "2026-01-01", "event": "task_end"', b"\xff\xfe"],
    ids=["half a line", "zero bytes", "almost a line", "not text"],
)  # fmt: skip
def test_nothing_is_lost_after_a_cut_off_line(runs, tail):
    """The first event after a power cut must not be glued to what the cut left."""
    run = started(runs)
    run.close()
    with run.path.open("ab") as f:
        f.write(tail)
    again = Run.resume(runs, run.id)
    again.log("task_end", task="a", outcome={"ending": "kept"})
    again.log("task_end", task="b", outcome={"ending": "kept"})
    assert set(again.finished_tasks()) == {"a", "b"}


def test_finished_tasks_are_those_with_an_end(runs):
    run = started(runs)
    run.log("candidate", task="b")
    run.log("task_end", task="a", outcome={"ending": "failed"})
    assert run.finished_tasks().keys() == {"a"} and run.finished_tasks()["a"]["outcome"] == {"ending": "failed"}


def test_two_runs_of_the_same_second_are_two(runs):
    ids = {started(runs).id for _ in range(5)}
    assert len(ids) == 5 and len(list(runs.glob("*/journal.jsonl"))) == 5


HOLDER = (
    "import sys; from agent.run import Run\nfrom pathlib import Path\n"
    "run = Run.resume(Path(sys.argv[1]), 'last'); print('open', flush=True); sys.stdin.readline()"
)


def test_two_processes_cannot_open_one_run(runs):
    run = started(runs)
    run.close()
    holder = python(HOLDER, runs)
    assert holder.stdout.readline() == "open\n", holder.stderr.read()
    with pytest.raises(HarnessError, match=f"run {run.id} is already going on in another process"):
        Run.resume(runs, run.id)
    holder.communicate("\n", timeout=60)
    Run.resume(runs, run.id).close()


def test_lock_of_a_killed_process_is_free(runs):
    run = started(runs)
    run.close()
    holder = python(HOLDER, runs)
    assert holder.stdout.readline() == "open\n"
    holder.kill()
    holder.wait(60)
    Run.resume(runs, run.id).close()


def test_resume_by_prefix_and_last(runs):
    first, second = started(runs), started(runs)
    first.close(), second.close()
    last = Run.resume(runs, "last")
    assert last.id == second.id
    last.close()
    for run in (first, second):
        opened = Run.resume(runs, run.id)
        assert opened.path == run.path
        opened.close()
    with pytest.raises(HarnessError, match=f"several run.*{first.id}.*"):
        Run.resume(runs, first.id[:4])


def test_last_is_the_run_started_last(runs):
    """Two runs of one second: names differ by a random suffix, so the name alone does not order them."""
    ids = []
    for _ in range(6):
        run = started(runs)
        run.close()
        ids.append(run.id)
    last = Run.resume(runs, "last")
    assert last.id == ids[-1]


@pytest.mark.parametrize("name", ["nothing", "", "*", "..", "/", "last"])
def test_unknown_run(runs, name):
    with pytest.raises(HarnessError, match="no run.*there are: no runs"):
        Run.resume(runs, name)
    one, two = started(runs), started(runs)
    one.close(), two.close()
    if name != "last":
        with pytest.raises(
            HarnessError, match=f"run.*match {name!r}".replace("*'", r"\*'").replace("'..'", r"'\.\.'") + f".*{one.id}"
        ):
            Run.resume(runs, name)


def test_a_directory_without_a_journal_is_no_run(runs):
    (runs / "20260101-000000-abcd").mkdir(parents=True)
    with pytest.raises(HarnessError, match="no runs"):
        Run.resume(runs, "last")


def test_unwritable_place_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match="cannot write runs to .*; choose another place with --runs DIR"):
        Run.start(tmp_path / "file" / "runs", tasks=[])


def test_journal_that_cannot_be_written_says_how_to_go_on(runs):
    run = started(runs)
    run.path.unlink()
    run.path.symlink_to("/dev/full")
    with pytest.raises(HarnessError, match=f"cannot write the journal .*No space left.*--resume {run.id}"):
        run.log("step")
