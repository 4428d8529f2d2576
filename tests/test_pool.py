"""The worker that runs candidates: whatever a candidate does, the next one is served.

Sources here would never pass the policy; they go straight to the worker, as if
the policy had a hole.
"""

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import verifier.pool
from verifier import sandbox
from verifier.pool import Pool
from verifier.verdict import HarnessError

ROOT = Path(verifier.pool.__file__).resolve().parent.parent
GOOD = """\
from primitives import TileStore, epilogue


@epilogue(y=TileStore())
def k(acc):
    return {"y": acc}
"""
PATIENCE = 90  # seconds until a test calls the harness itself hung
CANARY = "sk-ant-canary-0123456789"

boxed = pytest.mark.skipif(
    sandbox.level()[0] != sandbox.FULL, reason=f"no full sandbox here: {sandbox.level()[1] or 'bubblewrap missing'}"
)


def hostile(text):
    return f"{text}\n{GOOD}"


def ask(pool, expression, setup="import os", **options):
    """What ``expression`` is worth inside the worker."""
    source = hostile(f"{setup}\nraise RuntimeError(ascii({expression}))")
    answer = pool.submit("declare", source, **options).result(timeout=PATIENCE)
    assert answer.error.get("type") == "RuntimeError", answer.error
    return eval(answer.error["message"], {"__builtins__": {}})


def serves(pool):
    answer = pool.submit("declare", GOOD).result(timeout=PATIENCE)
    return answer.ok and answer.result["outputs"] == {"y": {"kind": "TileStore", "width": 1}}


@pytest.fixture(scope="module")
def own():
    """A worker of this file's own: tests below kill it. Started with a secret in the environment."""
    before = os.environ.get("ANTHROPIC_API_KEY")
    os.environ["ANTHROPIC_API_KEY"] = CANARY
    try:
        with Pool(2) as pool:
            assert serves(pool)
            yield pool
    finally:
        if before is None:
            del os.environ["ANTHROPIC_API_KEY"]
        else:
            os.environ["ANTHROPIC_API_KEY"] = before


# --- candidates that hang, crash or eat memory ----------------------------------------


def test_infinite_loop_at_import_ends_at_its_limit(pool):
    start = time.monotonic()
    answer = pool.submit("declare", hostile("while True: pass"), wall_seconds=1.5).result(timeout=PATIENCE)
    assert time.monotonic() - start < 10
    assert not answer.ok and answer.error["type"] == "timeout"
    assert answer.describe() == "no answer within 1.5 s"
    assert serves(pool)


def test_infinite_loop_in_the_trace_ends_at_its_limit(pool):
    source = GOOD.replace('    return {"y": acc}', '    print("tracing", flush=True)\n    while True:\n        pass')
    answer = pool.submit(
        "compile", source, wall_seconds=10.0, act="bf16", dtypes={"y": "bf16"}, b_major="n",
        config={"tile_m": 128, "tile_n": 128, "cluster_m": 2, "cluster_n": 1, "pingpong": True, "max_swizzle_size": 8},
    ).result(timeout=PATIENCE)  # fmt: skip
    assert not answer.ok and answer.error["type"] == "timeout"
    assert "tracing" in (answer.directory / "log.txt").read_text()  # it hung in the candidate, not in an import
    assert serves(pool)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import os, signal; signal.raise_signal(signal.SIGTERM)", "SIGTERM"),
    ],
    ids=["abort", "segfault", "kills itself", "terminates itself"],
)
def test_death_by_signal_is_named(pool, text, name):
    answer = pool.submit("declare", hostile(text), wall_seconds=20.0).result(timeout=PATIENCE)
    assert not answer.ok and answer.error["type"] == "signal"
    assert answer.describe() == f"the process ended by {name}"
    assert serves(pool)


@pytest.mark.parametrize("text", ["import os; os._exit(0)", "import os; os._exit(3)"])
def test_silent_exit_is_an_error(pool, text):
    answer = pool.submit("declare", hostile(text)).result(timeout=PATIENCE)
    assert not answer.ok and answer.error["type"] == "exit"
    assert "ended without an answer" in answer.describe()
    assert serves(pool)


@pytest.mark.parametrize(
    "text",
    ["raise SystemExit(0)", "raise KeyboardInterrupt", "class E(BaseException): pass\nraise E"],
    ids=["exit", "int", "base"],
)
def test_every_exception_becomes_data(pool, text):
    answer = pool.submit("declare", hostile(text)).result(timeout=PATIENCE)
    assert not answer.ok and answer.error["line"] and answer.error["code"]
    assert serves(pool)


def test_syntax_error_names_the_line(pool):
    answer = pool.submit("declare", GOOD + "x = = 1\n").result(timeout=PATIENCE)
    assert not answer.ok and answer.error["type"] == "SyntaxError" and answer.error["line"] == GOOD.count("\n") + 1


def test_memory_limit_is_an_error_not_a_crash(pool, monkeypatch):
    monkeypatch.setattr(verifier.pool, "MEMORY_BYTES", 4 << 30)
    answer = pool.submit("declare", hostile("x = bytearray(6 << 30)")).result(timeout=PATIENCE)
    assert not answer.ok and answer.error["type"] == "MemoryError" and answer.error["line"] == 1
    answer = pool.submit("declare", hostile("import torch\nx = torch.ones(3 << 29)")).result(timeout=PATIENCE)
    assert not answer.ok and "memory" in answer.describe()
    monkeypatch.undo()
    assert serves(pool)


def test_cpu_limit_stops_what_the_wall_limit_would_not(pool):
    """rlimits are set before candidate code runs, and it cannot raise them."""
    soft, hard = ask(pool, "resource.getrlimit(resource.RLIMIT_CPU)", "import resource", wall_seconds=7.0)
    assert (soft, hard) == (12, 17)
    assert ask(pool, "resource.getrlimit(resource.RLIMIT_CORE)", "import resource") == (0, 0)


def test_file_size_limit(pool):
    text = "with open('big', 'wb') as f:\n    f.seek(1 << 30)\n    f.write(b'x')"
    answer = pool.submit("declare", hostile(text)).result(timeout=PATIENCE)
    assert not answer.ok and serves(pool)


def test_a_full_log_and_a_long_message_are_cut(pool):
    answer = pool.submit("declare", hostile("print('x' * 1_000_000)\nraise ValueError('y' * 1_000_000)")).result(
        timeout=PATIENCE
    )
    assert len(answer.error["message"]) <= 2000 and serves(pool)


def test_jobs_do_not_share_state(pool):
    setup = "import primitives, builtins\nseen = hasattr(builtins, 'leak')\nbuiltins.leak = 1\nprimitives.silu = None"
    assert ask(pool, "seen", setup) is False
    assert ask(pool, "seen", setup) is False


def test_a_slow_job_does_not_block_the_others(pool):
    if pool.parallel < 2:
        pytest.skip("one CPU: jobs run one after the other")
    slow = pool.submit("declare", hostile("import time; time.sleep(4)"))
    start = time.monotonic()
    assert serves(pool) and not slow.done() and time.monotonic() - start < 4
    assert slow.result(timeout=PATIENCE).ok


def test_changed_file_is_refused(pool):
    """The bytes that run are the bytes that were submitted."""
    first = pool.submit("declare", hostile("import time; time.sleep(0.5)")).result(timeout=PATIENCE)
    path = first.directory / "candidate.py"
    text = f"from pathlib import Path\nPath({str(path.name)!r}).exists()\nopen(__file__, 'a').write('# more')"
    answer = pool.submit(
        "compile", hostile(text), act="bf16", dtypes={"y": "bf16"}, b_major="n",
        config={"tile_m": 128, "tile_n": 128, "cluster_m": 2, "cluster_n": 1, "pingpong": True, "max_swizzle_size": 8},
    ).result(timeout=PATIENCE)  # fmt: skip
    assert not answer.ok and "changed while it was compiled" in answer.describe()


# --- candidates that attack the harness -------------------------------------------------


def test_processes_left_behind_die_with_their_job(pool):
    """exploits.md H05: a daemon in its own session must not outlive its candidate."""
    text = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    for _ in range(200):\n"
        "        open('beat', 'w').write(str(time.time())); time.sleep(0.1)\n"
        "    os._exit(0)\n"
        "while not os.path.exists('beat'): time.sleep(0.05)"
    )
    answer = pool.submit("declare", hostile(text), wall_seconds=5.0).result(timeout=PATIENCE)
    assert answer.ok or answer.error["type"] == "timeout", answer.error
    beat = answer.directory / "beat"
    time.sleep(0.5)
    last = beat.read_text()
    time.sleep(1.0)
    assert beat.read_text() == last, "a process of a finished candidate is still running"


@boxed
def test_jobs_cannot_reach_each_other(pool):
    first = pool.submit("declare", GOOD).result(timeout=PATIENCE)
    (first.directory / "kernel.o").write_bytes(b"compiled")
    setup = (
        "import os\nout = []\n"
        f"d = {str(first.directory)!r}\n"
        "for attempt in (lambda: os.listdir(d), lambda: open(d + '/candidate.py').read(),\n"
        "                lambda: open(d + '/kernel.o', 'w').write('mine'), lambda: os.unlink(d + '/kernel.o'),\n"
        "                lambda: open(d + '/new', 'w').write('x'), lambda: os.rename(d, d + 'x'),\n"
        "                lambda: open(os.path.dirname(d) + '/new', 'w').write('x')):\n"
        "    try: out.append(str(attempt()))\n"
        "    except OSError: pass"
    )
    assert ask(pool, "out", setup) == []
    assert (first.directory / "kernel.o").read_bytes() == b"compiled"


SCRIBBLE = """\
import os
for fd in range(3, 64):
    try: os.write(fd, {line!r})
    except OSError: pass
os._exit(0)"""


@pytest.mark.parametrize(
    "line", [b"check: pass\n", b'{"ok": true, "result": {"forged": true}, "id": 0}\n', b"[]\n", b'{"id": 99}\n'],
    ids=["garbage", "answer of another job", "no object", "unknown job"],
)  # fmt: skip
def test_scribbling_over_every_descriptor_harms_only_oneself(line):
    """exploits.md D10: the result channel is not the candidate's to write to."""
    with Pool(2) as pool:
        honest = pool.submit("declare", hostile("import time; time.sleep(2)"))  # job 0
        forger = pool.submit("declare", hostile(SCRIBBLE.format(line=line)), wall_seconds=5.0)
        for future in (forger, honest):
            try:
                answer = future.result(timeout=20)
            except HarnessError:
                continue  # an honest way out, too
            except TimeoutError:
                pytest.fail("the harness waits forever for an answer")
            if future is honest:
                assert answer.ok and answer.result.get("name") == "k", "another job's answer was forged"
        assert serves(pool)


def test_stopped_worker_is_noticed():
    """A candidate that stops the worker (SIGSTOP to its parent) must not hang the harness."""
    with Pool(1) as pool:
        assert serves(pool)
        future = pool.submit(
            "declare", hostile("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)"), wall_seconds=3.0
        )
        try:
            future.result(timeout=20)
        except HarnessError:
            pass
        except TimeoutError:
            pytest.fail("the harness waits forever for a stopped worker")


# --- the box -------------------------------------------------------------------------------


def test_secrets_of_the_parent_are_not_in_the_environment(own):
    assert os.environ["ANTHROPIC_API_KEY"] == CANARY
    harmless = set(sandbox.environment()) | {"PWD", "TMPDIR", "LC_CTYPE", "TORCHINDUCTOR_CACHE_DIR"}
    assert set(ask(own, "sorted(os.environ)")) <= harmless
    seen = ask(own, "CANARY in repr(dict(os.environ))", f"import os\nCANARY = {CANARY!r}")
    assert seen is False


@boxed
def test_environment_of_other_processes_is_not_readable(own):
    setup = (
        f"import glob\nCANARY = {CANARY.encode()!r}\nfound = []\n"
        "for f in glob.glob('/proc/[0-9]*/environ'):\n"
        "    try:\n        if CANARY in open(f, 'rb').read(): found.append(f)\n"
        "    except OSError: pass"
    )
    assert ask(own, "found", setup) == []


@boxed
def test_no_network(pool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass  # it can be reached from here
        setup = (
            "import socket\nout = []\n"
            f"for address in [('127.0.0.1', {port}), ('1.1.1.1', 53)]:\n"
            "    try: socket.create_connection(address, timeout=3); out.append(address)\n"
            "    except OSError: pass"
        )
        assert ask(pool, "out", setup) == []


@boxed
def test_references_tolerances_and_the_home_are_not_readable(pool):
    with (
        tempfile.NamedTemporaryFile(dir=Path.home(), prefix="coda-canary-") as home,
        tempfile.NamedTemporaryFile() as tmp,
    ):
        home.write(b"secret"), home.flush()
        paths = [
            ROOT / "tasks.yaml", ROOT / "reference_kernels" / "references.py", ROOT / "reference_kernels" / "tasks.py",
            ROOT / "generated" / "library.py", ROOT / "agent" / "cli.py", ROOT / "leaderboard" / "records.py",
            ROOT / "tests" / "test_pool.py", ROOT / "verifier" / "numerics.py", ROOT / "pyproject.toml",
            ROOT / ".git" / "HEAD", Path(home.name), Path(tmp.name), "/etc/passwd", "/etc/shadow",
        ]  # fmt: skip
        assert sum(Path(p).exists() for p in paths) >= 12
        setup = (
            "out = []\n"
            f"for p in {[str(p) for p in paths]!r}:\n"
            "    try: open(p).read(); out.append(p)\n"
            "    except OSError: pass"
        )
        assert ask(pool, "out", setup) == []
    answer = pool.submit("declare", hostile("import reference_kernels.references")).result(timeout=PATIENCE)
    assert not answer.ok and answer.error["type"] == "ModuleNotFoundError"


@boxed
def test_nothing_outside_scratch_can_be_changed(pool, tmp_path):
    name = f"coda-escape-{os.getpid()}"
    folders = [
        ROOT, ROOT / "primitives", ROOT / "verifier", ROOT / "generated", Path(sys.prefix), Path(sys.base_prefix),
        Path(os.__file__).parent, "/usr", "/usr/lib", "/etc", "/", "/tmp", "/dev/shm", "/var/tmp",
        Path.home(), tmp_path,
    ]  # fmt: skip
    setup = (
        "import os\nout = []\n"
        f"for d in {[str(f) for f in folders]!r}:\n"
        f"    try:\n        open(os.path.join(d, {name!r}), 'w').write('x'); out.append(d)\n"
        "    except OSError: pass"
    )
    ask(pool, "out", setup)
    left = [str(f) for f in folders if (Path(f) / name).exists()]
    for f in left:
        (Path(f) / name).unlink()
    assert left == []
    before = (ROOT / "primitives" / "maths.py").read_bytes()
    victims = [ROOT / "primitives" / "maths.py", ROOT / "verifier" / "worker.py", Path(os.__file__)]
    setup = (
        "out = []\n"
        f"for p in {[str(v) for v in victims]!r}:\n"
        "    try: open(p, 'r+').close(); out.append(p)\n"
        "    except OSError: pass"
    )
    assert ask(pool, "out", setup) == []
    assert (ROOT / "primitives" / "maths.py").read_bytes() == before


@boxed
def test_no_capabilities_and_no_other_processes(pool):
    effective = ask(pool, "[l.split()[1] for l in open('/proc/self/status') if l.startswith('CapEff')]", "")
    assert int(effective[0], 16) == 0
    commands = ask(pool, "[open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()]")
    assert all("bwrap" in c or "verifier.worker" in c for c in commands)


# --- a worker that dies -----------------------------------------------------------------------


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_killed_worker_is_a_harness_error_and_the_next_job_is_served(own, which):
    assert serves(own)
    outer = own._process.pid
    running = own.submit("declare", hostile("import time; time.sleep(60)"), wall_seconds=70.0)
    time.sleep(0.3)
    victim = outer if which == "outer" else _worker_below(outer)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(HarnessError, match="coda-agent doctor"):
        running.result(timeout=PATIENCE)
    assert serves(own)
    assert own._process.pid != outer


def _worker_below(outer):
    """Pid of the forking server: the first Python below bubblewrap that is not bubblewrap itself."""
    todo = [outer]
    while todo:
        pid = todo.pop(0)
        if b"bwrap" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
        todo += [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    raise AssertionError("no worker found")


def test_submitting_the_moment_the_worker_dies_never_hangs_or_leaks_a_pipe_error(own):
    """The new job goes to the new worker; the loss of the old one is not its business."""
    assert serves(own)
    own._process.kill()
    outcome = []
    for _ in range(3):
        try:
            outcome.append(own.submit("declare", GOOD).result(timeout=PATIENCE).ok)
        except HarnessError:
            outcome.append("lost")
    assert outcome[-1] is True and set(outcome) <= {True, "lost"}


def test_close_while_a_job_runs_tells_its_waiter():
    pool = Pool(1)
    pool._start()
    future = pool.submit("declare", hostile("import time; time.sleep(60)"), wall_seconds=70.0)
    waited = threading.Event()
    future.add_done_callback(lambda f: waited.set())
    time.sleep(1.0)
    scratch = pool.scratch
    pool.close()
    assert not scratch.exists()
    assert waited.wait(10), "whoever waits for the job is never told"
    try:
        assert not future.result(timeout=0).ok
    except HarnessError:
        pass


def test_jobs_are_real_files(pool):
    """NVIDIA/cutlass #2636: the DSL re-reads sources from disk."""
    answer = pool.submit("declare", GOOD).result(timeout=PATIENCE)
    assert (answer.directory / "candidate.py").read_text() == GOOD
