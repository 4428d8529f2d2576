"""The client of the GPU worker, with and without a GPU.

The stand-in worker below is a real process that speaks the real protocol; the client
starts it because it starts ``sys.executable``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from verifier.gpu import CommandFailed, GpuWorker, NoGpu, WorkerLost, require_gpu
from verifier.measure import ratio
from verifier.verdict import HarnessError

# Commands: "echo" answers its fields, "hang" waits with a child, "signal"/"exit" die, "fail" raises,
# "env" answers the environment, "deaf" closes its input, "loud" floods stderr first.
STAND_IN = """\
#!{python}
import json, os, subprocess, sys, time
def send(**message):
    os.write(1, json.dumps(message).encode() + b"\\n")
starts = {folder!r} + "/starts"
with open(starts, "a") as f:
    f.write("x")
mode = os.environ.get("TORCH_STAND_IN", "")
if mode == "dies": os.abort()
if mode == "fault": send(ok=False, fault="no CUDA device is visible to PyTorch"); sys.exit(0)
if mode == "silent": time.sleep(600)
send(ok=True, ready=True)
for line in sys.stdin:
    command = json.loads(line)
    cmd = command.pop("cmd")
    if cmd == "hang":
        child = subprocess.Popen(["sleep", "600"])
        with open({folder!r} + "/pids", "w") as f:
            f.write(f"{{os.getpid()}} {{child.pid}}")
        time.sleep(600)
    if cmd == "signal": os.kill(os.getpid(), command["number"])
    if cmd == "exit": os._exit(command["status"])
    if cmd == "fail": send(ok=False, error="RuntimeError: CUDA error: an illegal memory access", trace="...")
    elif cmd == "env": send(ok=True, result=dict(os.environ))
    elif cmd == "deaf": os.close(0); send(ok=True, result={{}}); time.sleep(600)
    elif cmd == "half": os.write(1, b'{{"ok": true, "res'); time.sleep(0.3); os.write(1, b'ult": {{"late": 1}}}}\\n')
    elif cmd == "big": send(ok=True, result={{"data": "x" * 3_000_000}})
    elif cmd == "loud": os.write(2, b"warning\\n" * 20_000); send(ok=True, result={{}})
    else: send(ok=True, result={{**command, "pid": os.getpid()}})
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(STAND_IN.format(python=sys.executable, folder=str(tmp_path)))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return tmp_path


def starts(folder):
    return len((folder / "starts").read_text())


def gone(pid):
    """True once a process is dead (or a zombie that only its parent still lists)."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


# --- no GPU ---------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_what_to_do():
    with pytest.raises(NoGpu) as caught, GpuWorker():
        pass
    text = str(caught.value)
    assert "no CUDA device is visible to PyTorch" in text
    assert "coda-agent bundle TASK --out DIR" in text and "coda-agent measure DIR" in text
    assert isinstance(caught.value, HarnessError)


def test_fault_of_the_worker_is_no_gpu(stand_in, monkeypatch):
    monkeypatch.setenv("TORCH_STAND_IN", "fault")
    with pytest.raises(NoGpu, match="no CUDA device.*coda-agent bundle"):
        require_gpu()


def test_worker_that_dies_at_the_start_is_no_gpu(stand_in, monkeypatch):
    monkeypatch.setenv("TORCH_STAND_IN", "dies")
    with pytest.raises(NoGpu, match="does not start: the worker process ended .SIGABRT.; run 'coda-agent doctor'"):
        require_gpu()


def test_worker_that_says_nothing_at_the_start_is_no_gpu(stand_in, monkeypatch):
    monkeypatch.setenv("TORCH_STAND_IN", "silent")
    monkeypatch.setattr(GpuWorker, "START_SECONDS", 1.0)
    with pytest.raises(NoGpu, match="does not start: no answer within 1 s"):
        require_gpu()


# --- answers ------------------------------------------------------------------------------------


def test_answers_arrive_whole(stand_in):
    with GpuWorker() as worker:
        assert worker.call("echo", a=[1, 2], b={"c": None})["b"] == {"c": None}
        assert worker.call("half") == {"late": 1}
        assert len(worker.call("big")["data"]) == 3_000_000
        assert worker.call("loud") == {}
        with pytest.raises(CommandFailed, match="illegal memory access") as caught:
            worker.call("fail")
        assert caught.value.trace == "..."
        pid = worker.call("echo")["pid"]  # an error is not the end of the worker
    assert starts(stand_in) == 1 and gone(pid)


def test_no_secret_reaches_the_worker(stand_in, monkeypatch):
    secrets = {
        "ANTHROPIC_API_KEY": "s1", "OPENAI_API_KEY": "s2", "ANTHROPIC_AUTH_TOKEN": "s3", "HF_TOKEN": "s4",
        "GITHUB_TOKEN": "s5",
        "CLIENT_SECRET": "s6", "AWS_SECRET_ACCESS_KEY": "s7", "DATABASE_PASSWORD": "s8",
    }  # fmt: skip
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with GpuWorker() as worker:
        seen = worker.call("env")
    assert seen["CUDA_VISIBLE_DEVICES"] == "0" and "PATH" in seen
    assert sorted(set(secrets) & set(seen)) == []


# --- losses -----------------------------------------------------------------------------------------


def test_hang_is_lost_and_everything_it_started_is_killed(stand_in):
    with GpuWorker() as worker:
        first = worker.call("echo")["pid"]
        start = time.monotonic()
        with pytest.raises(WorkerLost, match="no answer within 1.5 s; the kernel hangs") as caught:
            worker.call("hang", timeout=1.5)
        assert time.monotonic() - start < 5 and caught.value.reason == str(caught.value)
        pids = [int(p) for p in (stand_in / "pids").read_text().split()]
        assert pids[0] == first and all(gone(p) for p in pids)
        second = worker.call("echo")["pid"]  # the next candidate gets a fresh worker
        assert second != first and starts(stand_in) == 2


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGBUS])
def test_death_by_signal_is_named(stand_in, number):
    with GpuWorker() as worker:
        with pytest.raises(WorkerLost, match=f"the worker process ended .{number.name}."):
            worker.call("signal", number=int(number))
        assert worker.call("echo", n=1)["n"] == 1 and starts(stand_in) == 2


@pytest.mark.parametrize("status", [0, 1, 134])
def test_exit_is_named(stand_in, status):
    with GpuWorker() as worker:
        with pytest.raises(WorkerLost, match=f"the worker process ended .exit status {status}."):
            worker.call("exit", status=status)
        assert worker.call("echo", n=1)["n"] == 1


def test_half_an_answer_of_a_dead_worker_is_not_read_by_the_next(stand_in):
    with GpuWorker() as worker:
        worker._process.stdin.write(b'{"cmd": "half"}\n'), worker._process.stdin.flush()
        time.sleep(0.1)
        os.killpg(worker._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            worker._answer(5.0)
        assert worker.call("echo", n=7)["n"] == 7


def test_worker_that_no_longer_listens_is_lost(stand_in):
    """A broken pipe while a command is sent is the worker's loss, never an OSError of ours."""
    with GpuWorker() as worker:
        worker.call("deaf")
        time.sleep(0.2)
        with pytest.raises(WorkerLost, match="died|ended"):
            worker.call("echo")
        assert worker.call("echo", n=1)["n"] == 1


def test_worker_killed_between_two_calls_is_started_again(stand_in):
    with GpuWorker() as worker:
        os.killpg(worker._process.pid, signal.SIGKILL)
        time.sleep(0.2)
        try:
            answer = worker.call("echo", n=1)
        except WorkerLost:
            answer = worker.call("echo", n=1)
        assert answer["n"] == 1


def test_ctrl_c_does_not_reach_the_worker(stand_in):
    with GpuWorker() as worker:
        pid = worker.call("echo")["pid"]
        assert os.getpgid(pid) == pid != os.getpgid(0)


def test_close_twice_is_fine(stand_in):
    worker = GpuWorker()
    worker.close()
    pid = worker.call("echo")["pid"]
    worker.close(), worker.close()
    assert gone(pid)


def test_protocol_is_one_json_line_each_way(stand_in):
    with GpuWorker() as worker:
        text = 'quotes " and \n newlines \u2028 and ÿ'
        assert worker.call("echo", text=text)["text"] == text
        json.dumps(worker.call("env"))


# --- ratios --------------------------------------------------------------------------------------------


def test_ratio_by_hand():
    baseline, subject = [10.0, 12.0, 11.0, 30.0, 10.5], [5.0, 6.0, 5.5, 5.0, 7.0]
    # paired: 2, 2, 2, 6, 1.5
    found = ratio(baseline, subject)
    assert found["median"] == pytest.approx(2.0)
    assert found["low"] == pytest.approx(1.5) and found["high"] == pytest.approx(6.0)
    assert ratio([8.0, 8.0], [2.0, 8.0])["median"] == pytest.approx(2.0)  # geometric mean of 4 and 1
    assert ratio([3.0], [2.0]) == pytest.approx({"median": 1.5, "low": 1.5, "high": 1.5})


def test_ratio_is_paired_not_a_ratio_of_medians():
    """A drift of clocks that hits both alike cancels."""
    drift = [1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 1.3]
    found = ratio([20 * d for d in drift], [10 * d for d in drift])
    assert found == pytest.approx({"median": 2.0, "low": 2.0, "high": 2.0})


def test_a_a_is_one_and_without_width():
    times = [10.0, 11.0, 9.0, 10.5, 50.0]
    assert ratio(times, times) == pytest.approx({"median": 1.0, "low": 1.0, "high": 1.0})


@pytest.mark.parametrize("rounds", [5, 8, 20, 39, 40, 41, 60, 100])
def test_swapping_the_two_inverts_the_interval(rounds):
    """The interval must not favour one side: ratio(a, b) and ratio(b, a) are the same statement."""
    generator = torch.Generator().manual_seed(rounds)
    a = (10 + torch.rand(rounds, generator=generator)).tolist()
    b = (10 + torch.rand(rounds, generator=generator)).tolist()
    one, other = ratio(a, b), ratio(b, a)
    assert one["median"] == pytest.approx(1 / other["median"])
    assert one["low"] == pytest.approx(1 / other["high"]) and one["high"] == pytest.approx(1 / other["low"])
    assert one["low"] <= one["median"] <= one["high"]


def test_the_interval_holds_the_true_ratio_in_95_percent_of_cases():
    generator = torch.Generator().manual_seed(0)
    below = above = 0
    for _ in range(2000):
        noise = torch.randn(2, 40, generator=generator).mul(0.02).exp()
        found = ratio((10 * noise[0]).tolist(), (10 * noise[1]).tolist())
        below += found["high"] < 1.0
        above += found["low"] > 1.0
    assert (below + above) / 2000 <= 0.055
    assert above / 2000 <= 0.03 and below / 2000 <= 0.03, (
        f"a win is claimed in {above / 2000:.1%}, a loss in {below / 2000:.1%}"
    )
