"""The library on disk: what goes in comes out, nothing is half written, nothing is lost."""

import ctypes
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from generated.library import Library, LibraryError, Passport, kernel_id
from generated.passport import Decision

ROOT = Path(__file__).resolve().parent.parent
SOURCE = '''"""y = A B."""
from primitives import TileStore, epilogue


@epilogue(y=TileStore())
def k(acc):
    return {"y": acc}
'''


def passport(source=SOURCE, task="gemm_rmsnorm", author="composer", **more):
    return Passport(
        kernel=kernel_id(author, source),
        task=task,
        author=author,
        source_sha256=hashlib.sha256(source.encode()).hexdigest(),
        **more,
    )


ACCEPTED = [Decision(verb="accept", reviewer="anna", reason="level with the expert")]


def timing(shape, us=100.0, gemm=0.9, config="128x128_c21_pp_s8", device="NVIDIA H200"):
    return {
        "device": device,
        "shape": list(shape),
        "config": config,
        "total_us": us,
        "ratios": {"gemm": {"median": gemm}},
    }


@pytest.fixture
def lib(tmp_path):
    return Library(tmp_path / "lib")


def files(lib):
    return sorted(str(p.relative_to(lib.root)) for p in lib.root.rglob("*") if p.is_file() and p.name != ".lock")


# --- in and out -----------------------------------------------------------------------


def test_add_and_read_back(lib):
    p = passport(attempts=2, tips=["t1"], check=[{"stage": "policy", "passed": True, "reason": "ok"}])
    path = lib.add(SOURCE, p)
    assert path.read_text() == SOURCE and path == lib.path(p)
    assert files(lib) == [f"gemm_rmsnorm/{p.kernel}.json", f"gemm_rmsnorm/{p.kernel}.py", "index.json"]
    assert (
        list(lib.passports()) == [p] == list(lib.passports("gemm_rmsnorm")) and list(lib.passports("gemm_rope")) == []
    )
    assert Library(lib.root).source(Library(lib.root).find(p.kernel)) == SOURCE
    assert p.status_text == "checked, not measured"


def test_kernel_ids_are_stable_and_file_safe():
    assert (
        kernel_id("composer", "x") == "composer-" + hashlib.sha256(b"x").hexdigest()[:8] == kernel_id("composer", "x")
    )
    assert kernel_id("claude:claude-opus-4.5", "x").startswith("claude-claude-opus-4.5-")
    for author in ("human:Jörg Müller", "../../etc", "a/b", "a b", "expert:quack"):
        assert "/" not in kernel_id(author, "x") and " " not in kernel_id(author, "x")


@pytest.mark.parametrize("author", ["composer", "claude:claude-opus-4.5", "human:Jörg Müller"])
def test_find_by_every_name(lib, author):
    p = passport(author=author)
    path = lib.add(SOURCE, p)
    for name in (
        p.kernel,
        f"{p.task}/{p.kernel}",
        str(path),
        str(path.with_suffix(".json")),
        f"{p.task}/{p.kernel}.py",
        p.task,
    ):
        assert lib.find(name) == p, name


def test_find_says_what_there_is(lib):
    with pytest.raises(LibraryError, match="it holds: nothing yet"):
        lib.find("gemm_rope")
    a, b = passport(), passport(SOURCE + "# other\n")
    lib.add(SOURCE, a), lib.add(SOURCE + "# other\n", b)
    with pytest.raises(LibraryError, match=f"several kernels.*{a.task}/"):
        lib.find("gemm_rmsnorm")
    assert lib.find(b.kernel) == b
    with pytest.raises(LibraryError, match=f"no kernel 'gemm_rope/{a.kernel}'.*it holds: gemm_rmsnorm/"):
        lib.find(f"gemm_rope/{a.kernel}")


def test_the_same_kernel_for_two_tasks_is_two_kernels(lib):
    a, b = passport(), passport(task="gemm_rope")
    lib.add(SOURCE, a), lib.add(SOURCE, b)
    assert lib.find(f"gemm_rope/{a.kernel}") == b and lib.find(f"gemm_rmsnorm/{a.kernel}") == a
    with pytest.raises(LibraryError, match="several"):
        lib.find(a.kernel)


def test_adding_again_replaces_the_passport(lib):
    lib.add(SOURCE, passport(attempts=1))
    lib.add(SOURCE, passport(attempts=5, status="measured"))
    (p,) = lib.passports()
    assert p.attempts == 5 and p.status_text == "measured"


@pytest.mark.parametrize(
    "source",
    [SOURCE.replace("\n", "\r\n"), SOURCE + "# größer, 矩阵\n", SOURCE.rstrip("\n"), SOURCE + "\x0c# page\n"],
    ids=["Windows line ends", "other scripts", "no last line end", "form feed"],
)  # fmt: skip
def test_text_comes_back_byte_for_byte(lib, source):
    p = passport(source)
    lib.add(source, p)
    assert lib.source(p) == source
    assert lib.path(p).read_bytes() == source.encode()


def test_text_survives_another_locale(lib):
    """A server with LC_ALL=C writes and reads what a laptop wrote."""
    source = SOURCE + "# größer\n"
    lib.add(source, passport(source))
    code = (
        "import sys; from generated.library import Library; lib = Library(sys.argv[1])\n"
        "p = lib.find('gemm_rmsnorm'); lib.add(lib.source(p), p); print(p.source_sha256)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, lib.root], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert lib.source(lib.find("gemm_rmsnorm")) == source


# --- damage -------------------------------------------------------------------------------


def test_edited_kernel_is_refused(lib):
    p = passport()
    path = lib.add(SOURCE, p)
    path.write_text(SOURCE.replace("acc}", "acc * 1.0}"))
    with pytest.raises(LibraryError, match="was changed after it was checked; run 'coda-agent check"):
        lib.source(p)
    path.unlink()
    with pytest.raises(LibraryError, match="cannot read .*No such file"):
        lib.source(p)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe", b'{"kernel": "k", "task": "t"}'],
    ids=["empty", "cut off", "null", "list", "no fields", "not text", "fields missing"],
)
def test_corrupt_passport_is_named(lib, content):
    path = lib.add(SOURCE, passport()).with_suffix(".json")
    path.write_bytes(content)
    with pytest.raises(LibraryError, match=f"{path.name} is not a valid passport"):
        list(lib.passports())
    with pytest.raises(LibraryError, match="restore it or delete it"):
        lib.find("gemm_rmsnorm")


def test_unknown_fields_and_formats_are_refused(lib):
    path = lib.add(SOURCE, passport()).with_suffix(".json")
    good = json.loads(path.read_text())
    for change in ({"extra": 1}, {"format": 3}, {"status": "fast"}):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(LibraryError):
            lib.find("gemm_rmsnorm")


# --- several writers -------------------------------------------------------------------------

WRITER = """
import hashlib, sys
from generated.library import Library, Passport, kernel_id
from generated.passport import Decision
root, who = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
for i in range(20):
    source = f"# {who} {i}\\n"
    Library(root).add(source, Passport(kernel=kernel_id(who, source), task=f"gemm_{i % 3}", author=who,
        source_sha256=hashlib.sha256(source.encode()).hexdigest(),
        timings=[{"device": "H200", "shape": [i + 1, 16, 8], "config": who, "total_us": 1.0,
                  "ratios": {"gemm": {"median": 1.0}}}],
        history=[Decision(verb="accept", reviewer=who, reason="fast")]))
"""


def test_two_processes_adding_at_once_keep_everything(lib):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, lib.root, who], env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for who in ("anna", "bert")
    ]  # fmt: skip
    for w in writers:
        assert w.stdout.readline() == "ready\n"
    for w in writers:
        w.stdin.write("go\n"), w.stdin.flush()
    for w in writers:
        _, stderr = w.communicate(timeout=120)
        assert w.returncode == 0, stderr[-800:]
    found = list(lib.passports())
    assert len(found) == 40 and {p.author for p in found} == {"anna", "bert"}
    for p in found:
        assert lib.source(p).startswith(f"# {p.author}")
    index = json.loads((lib.root / "index.json").read_text())
    assert sum(len(shapes) for devices in index.values() for shapes in devices.values()) == 20  # every row reached it
    assert not [f for f in files(lib) if "/." in f or f.startswith(".")]


def test_readers_never_see_half_a_file(lib):
    """Passports are replaced, not rewritten: reading while another process writes always succeeds."""
    p = passport(cost={"note": "x" * 20_000})
    lib.add(SOURCE, p)
    code = (
        "import sys; from generated.library import Library, Passport; lib = Library(sys.argv[1])\n"
        "p = next(lib.passports()); s = lib.source(p)\n"
        "for i in range(60): lib.add(s, p.model_copy(update={'attempts': i}))"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, lib.root], env={**os.environ, "PYTHONPATH": str(ROOT)})
    reads = 0
    while writer.poll() is None:
        assert lib.source(lib.find("gemm_rmsnorm")) == SOURCE
        reads += 1
    assert writer.returncode == 0 and reads > 5


# --- places that cannot be written ---------------------------------------------------------------


def test_unwritable_place_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for root in (tmp_path / "file", tmp_path / "file" / "lib", Path("/proc/coda-agent-library")):
        with pytest.raises(LibraryError, match="cannot write the library .*; choose another with --library DIR"):
            Library(root).add(SOURCE, passport())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0 or libc.mount(b"coda", os.fsencode(path), b"tmpfs", 0, b"size=64k") != 0:
        pytest.skip("mounting a small file system needs root")
    yield path
    assert libc.umount2(os.fsencode(path), 2) == 0


def test_full_disk_leaves_the_old_kernel(small_disk):
    lib = Library(small_disk / "lib")
    old = passport()
    lib.add(SOURCE, old)
    before = {f: (lib.root / f).read_bytes() for f in files(lib)}
    filler = small_disk / "filler"
    with pytest.raises(OSError), filler.open("wb", buffering=0) as f:
        while True:
            f.write(b"x" * 1024)
    other = SOURCE + "# other\n"
    for source, new in ((SOURCE, passport(attempts=9)), (other, passport(other))):
        with pytest.raises(LibraryError, match="cannot write the library .*No space left"):
            lib.add(source, new)
        assert lib.find(old.kernel) == old and lib.source(old) == SOURCE
        assert {f: (lib.root / f).read_bytes() for f in before} == before
    assert not [f for f in files(lib) if "/." in f], "temporary files are left behind"
    filler.unlink()
    lib.add(other, passport(other))
    assert len(list(lib.passports())) == 2


# --- the fastest kernel ------------------------------------------------------------------------------


@pytest.fixture
def measured(lib):
    def add(text, rows, task="gemm_rmsnorm"):
        p = passport(text, task=task, timings=rows, status="measured", history=ACCEPTED)
        lib.add(text, p)
        return p.kernel

    lib.slow = add("# slow\n", [timing((2048, 2048, 2048), 50, 0.80), timing((8192, 8192, 8192), 900, 0.95, "slow")])
    lib.fast = add("# fast\n", [timing((2048, 2048, 2048), 45, 0.90, "fast"), timing((8192, 8192, 8192), 950, 0.90)])
    return lib


def test_best_is_the_fastest_at_the_nearest_shape(measured):
    best = measured.best("gemm_rmsnorm", "NVIDIA H200", (2000, 2048, 2048))
    assert best["kernel"] == measured.fast and best["config"] == "fast" and best["measured_shape"] == [2048, 2048, 2048]
    best = measured.best("gemm_rmsnorm", "NVIDIA H200", (8000, 8192, 9000))
    assert best["kernel"] == measured.slow and best["measured_shape"] == [8192, 8192, 8192]
    # distances are logarithmic: 4000 is nearer to 8192 than to 2048 when all three sizes are compared
    assert measured.best("gemm_rmsnorm", "NVIDIA H200", (4200, 4200, 4200))["measured_shape"] == [8192, 8192, 8192]
    assert measured.best("gemm_rmsnorm", "NVIDIA H200", (4000, 4000, 4000))["measured_shape"] == [2048, 2048, 2048]
    assert measured.best("gemm_rmsnorm", "NVIDIA H200", (1, 16, 8))["measured_shape"] == [2048, 2048, 2048]


def test_absolute_times_of_two_sessions_are_not_compared(lib):
    """The kernel that was faster against the bare GEMM of its own session wins, not the smaller time."""
    lib.add("# hot\n", passport("# hot\n", timings=[timing((4096, 4096, 4096), 300, 0.97)], history=ACCEPTED))
    lib.add("# cool\n", passport("# cool\n", timings=[timing((4096, 4096, 4096), 200, 0.90)], history=ACCEPTED))
    assert lib.best("gemm_rmsnorm", "NVIDIA H200", (4096, 4096, 4096))["kernel"] == kernel_id("composer", "# hot\n")


def test_best_refuses_what_was_not_measured(measured):
    with pytest.raises(LibraryError, match=r"on NVIDIA H100.*measured on: NVIDIA H200"):
        measured.best("gemm_rmsnorm", "NVIDIA H100", (2048, 2048, 2048))
    with pytest.raises(LibraryError, match="no accepted kernel for gemm_rope.*no device.*coda-agent measure"):
        measured.best("gemm_rope", "NVIDIA H200", (2048, 2048, 2048))


def test_best_without_an_index(lib):
    with pytest.raises(LibraryError, match="no readable index"):
        lib.best("gemm_rmsnorm", "NVIDIA H200", (1, 1, 1))
    lib.root.mkdir()
    for content in ("", "{", "[]", "\x00", '{"gemm_rmsnorm": []}', '{"gemm_rmsnorm": {"NVIDIA H200": {"0x1": {}}}}'):
        (lib.root / "index.json").write_text(content)
        with pytest.raises(LibraryError):
            lib.best("gemm_rmsnorm", "NVIDIA H200", (1, 1, 1))


def test_index_follows_the_passports(measured):
    (p,) = [p for p in measured.passports() if p.kernel == measured.fast]
    p.timings = [timing((2048, 2048, 2048), 60, 0.5)]
    measured.add("# fast\n", p)
    assert measured.best("gemm_rmsnorm", "NVIDIA H200", (2048, 2048, 2048))["kernel"] == measured.slow


def test_the_library_in_the_repository_is_sound():
    lib = Library()
    for p in lib.passports():
        assert lib.source(p) and p.kernel == kernel_id(p.author, lib.source(p))
        assert p.check and all(v["passed"] for v in p.check)
