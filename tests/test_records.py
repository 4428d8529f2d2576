"""Results as JSON lines: validated, written whole or not at all, shown only with their evidence."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

import pytest
from made_up_results import READING, library_of, made_up, passport_of, source_of
from pydantic import ValidationError
from test_measure import MadeUpTimes, bundle, named

from agent import generate
from generated.library import Library
from generated.passport import Decision
from leaderboard.records import Record, ResultsError, append, load, record, results_file, shown
from verifier.bundle import commit

# --- writing and reading --------------------------------------------------------------------------------


def test_what_was_appended_is_read_back(tmp_path):
    path, records = tmp_path / "new" / "results.jsonl", [made_up(), made_up(author="claude:x")]
    append(path, records)
    assert load(path) == records
    assert load(tmp_path / "none.jsonl") == []


def test_a_record_is_kept_once(tmp_path):
    path = tmp_path / "results.jsonl"
    append(path, [made_up(250.0), made_up(250.0)])
    append(path, [made_up(270.0), made_up(250.0, session="s2")])
    assert [(r.session, r.kernel_us) for r in load(path)] == [("s1", 250.0), ("s2", 250.0)]


def test_old_lines_stay_byte_for_byte(tmp_path):
    path = tmp_path / "results.jsonl"
    old = json.dumps(made_up().model_dump(mode="json"), indent=None, sort_keys=True)  # not as we would write it
    path.write_text(old)  # and without an end of line
    append(path, [made_up(session="s2")])
    assert path.read_text().startswith(old + "\n") and len(load(path)) == 2


def test_a_failed_append_leaves_no_part_of_itself(tmp_path):
    path = tmp_path / "results.jsonl"
    append(path, [made_up()])
    before = path.read_bytes()

    def records():
        yield made_up(session="s2")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        append(path, records())
    assert path.read_bytes() == before


def _append_one(job) -> None:
    path, session = job
    append(path, [made_up(session=session)])


def test_many_writers_lose_nothing(tmp_path):
    path = tmp_path / "results.jsonl"
    sessions = [f"s{i}" for i in range(12)]
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_append_one, [(path, s) for s in sessions]))
    assert sorted(r.session for r in load(path)) == sorted(sessions)


def test_full_disk_leaves_the_file_as_it_was(tmp_path):
    libc = ctypes.CDLL(None, use_errno=True)
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or libc.mount(b"coda", os.fsencode(disk), b"tmpfs", 0, b"size=64k") != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        path = disk / "results.jsonl"
        append(path, [made_up()])
        before = path.read_bytes()
        with pytest.raises(OSError), (disk / "filler").open("wb", buffering=0) as f:
            while True:
                f.write(b"x" * 1024)
        with pytest.raises(ResultsError, match="cannot write results to .*No space left"):
            append(path, [made_up(session=f"s{i}") for i in range(9)])
        assert path.read_bytes() == before
        assert {p.name for p in disk.iterdir()} <= {"results.jsonl", "filler", ".results.jsonl.lock"}
    finally:
        assert libc.umount2(os.fsencode(disk), 2) == 0


@pytest.mark.parametrize("line", ["{", "[]", '{"task": "gemm_rope"}', "\xff", ""])
def test_a_malformed_line_is_named(tmp_path, line):
    path = tmp_path / "results.jsonl"
    append(path, [made_up(), made_up(session="s2")])
    good = path.read_bytes()
    path.write_bytes(good + line.encode("latin-1") + b"\n")
    with pytest.raises(ResultsError, match=r"results\.jsonl, line 3 is not a valid record"):
        load(path)
    with pytest.raises(ResultsError, match="line 3"):
        append(path, [made_up(session="s3")])
    assert path.read_bytes() == good + line.encode("latin-1") + b"\n"


@pytest.mark.parametrize(
    "change",
    [{"surprise": 1}, {"total_us": 0}, {"kernel_us": -1}, {"format": 2}, {"shape": [1, 2]}, {"rounds": 0},
     {"baselines": {"gemm": {"us": 1}}}, {"kernel_us": float("nan")}],
)  # fmt: skip
def test_fields_are_validated(change):
    with pytest.raises(ValidationError):
        Record.model_validate(made_up().model_dump() | change)


def test_a_library_of_ones_own_has_its_own_results(tmp_path):
    assert results_file(tmp_path) == tmp_path / "results.jsonl"
    assert results_file(None).parent.name == "leaderboard"


def test_the_row_of_a_session_becomes_a_record():
    want = made_up(baselines={"liger": 400.0}, fold=2.0)
    added = "kernel author source_sha256 environment commit command matmul_flops copy_bytes numerics measured format"
    row = want.model_dump(exclude={*added.split(), "device"})
    row |= {"ratios": {n: b["ratio"] for n, b in row["baselines"].items()}, "gemm_us": 200.0, "wins": {}}
    row["baselines"] = {n: {k: v for k, v in b.items() if k != "ratio"} for n, b in row["baselines"].items()}
    session = {
        "device": {"device": "NVIDIA H200", "driver": "1", "torch": "2 on the GPU machine"},
        "ceilings": {"matmul_flops": 8e14, "copy_bytes": 4e12},
    }
    passport = passport_of(toolchain={"torch": "2 of the compiler", "quack-kernels": "0.6.5"})
    got = record(row, passport, session=session, commit="c" * 40, command=want.command)
    environment = {"driver": "1", "torch": "2 on the GPU machine", "quack-kernels": "0.6.5"}
    assert got == want.model_copy(update={"environment": environment, "measured": got.measured})


# --- evidence -------------------------------------------------------------------------------------------


def reason(tmp_path, shown_record: Record, change_library=lambda lib: None) -> str:
    """Why the record is hidden; an untouched one beside it must stay."""
    other = made_up(author="human:somebody")
    lib = library_of(tmp_path, [made_up(), other])
    change_library(lib)
    good, bad = shown([shown_record, other], lib)
    assert other in good
    return bad[0][1] if bad else ""


def test_a_record_with_its_evidence_is_shown(tmp_path):
    assert reason(tmp_path, made_up(fold=3.0, baselines={"liger": 400.0})) == ""


def edited(**changes):
    def change(lib):
        lib.add(source_of("gemm_rmsnorm", "composer"), passport_of(**changes))

    return change


FAILED = {"stage": "timing", "passed": False, "reason": "wrong", "evidence": {}}
REJECTED = [Decision(verb="reject", reviewer="ada", reason="copies the residual")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lib: lib.path(passport_of()).write_text("# other\n"), "changed after it was checked"),
        (lambda lib: lib.path(passport_of()).unlink(), "cannot read"),
        (lambda lib: lib.path(passport_of()).with_suffix(".json").unlink(), "not in the library"),
        (lambda lib: lib.path(passport_of()).with_suffix(".json").write_text("{"), "not in the library"),
        (edited(source_sha256="0" * 64), "not the one that was measured"),
        (edited(measure=[FAILED]), "failed a later measurement"),
        (edited(history=REJECTED), "rejected by ada: copies the residual"),
    ],
)
def test_evidence_in_the_library(tmp_path, change, says):
    assert says in reason(tmp_path, made_up(), change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r["receipt"].pop("after"), "no receipt"),
        (lambda r: r["receipt"].update(before=READING | {"power_w": None}), "no receipt"),
        (lambda r: r["samples_us"].pop("liger"), "samples are incomplete"),
        (lambda r: r["samples_us"]["gemm"].pop(), "samples are incomplete"),
        (lambda r: r["baselines"].pop("gemm"), "samples are incomplete"),
        (lambda r: r["samples_us"].update(ghost=r["samples_us"]["gemm"]), "samples are incomplete"),
        (lambda r: r.update(kernel_us=r["kernel_us"] * 0.99), "kernel_us"),
        (lambda r: r.update(total_us=r["total_us"] * 0.99), "total_us"),
        (lambda r: r.update(tax_us=r["tax_us"] - 5), "tax_us"),
        (lambda r: r.update(finish_us=0.0), "finish_us"),
        (lambda r: r.update(floor_us=r["floor_us"] * 1.01), "floor_us"),
        (lambda r: r.update(matmul_flops=7e14), "floor_us"),
        (lambda r: r.update(share_of_floor=0.99), "share_of_floor"),
        (lambda r: r["baselines"]["liger"].update(us=500.0), "time of liger"),
        (lambda r: r["baselines"]["liger"]["ratio"].update(median=1.9), r"ratio to liger \(median\)"),
        (lambda r: r["baselines"]["liger"]["ratio"].update(low=1.65), r"ratio to liger \(low\)"),
        (lambda r: r["baselines"]["gemm"]["ratio"].update(high=1.1), r"ratio to gemm \(high\)"),
    ],
)
def test_numbers_must_follow_from_the_samples(tmp_path, change, says):
    data = made_up(fold=3.0, baselines={"liger": 400.0}).model_dump()
    change(data)
    found = reason(tmp_path, Record.model_validate(data))
    assert says.replace("\\", "") in found


def test_samples_keep_four_digits_and_still_agree(tmp_path):
    r = made_up(1234.5678, baselines={"liger": 2345.6789, "gemm": 1003.499}, fold=9.87654)
    rounded = {n: [float(f"{t:.4g}") for t in ts] for n, ts in r.samples_us.items()}
    assert reason(tmp_path, r.model_copy(update={"samples_us": rounded})) == ""


def test_faster_than_possible_is_not_shown(tmp_path):
    assert "of the floor is not possible" in reason(tmp_path, made_up(100.0))


def test_a_second_line_about_the_same_is_not_shown(tmp_path):
    lib = library_of(tmp_path, [made_up()])
    good, bad = shown([made_up(250.0), made_up(240.0), made_up(250.0, session="s2")], lib)
    assert [r.kernel_us for r in good] == [250.0, 250.0] and "earlier line" in bad[0][1]


# --- measuring writes them ------------------------------------------------------------------------------


def test_measuring_writes_a_record_per_kernel_and_size(tmp_path, monkeypatch):
    ours, us = named("me", (40.0, 40.0))
    made = bundle(*ours)
    made.content.update(isolation="none", commit="c" * 40)
    worker = MadeUpTimes({"gemm": (28.0, 28.0), "eager": (90.0, 90.0), **us})
    monkeypatch.setattr(generate, "read_bundle", lambda directory: made)
    monkeypatch.setattr(generate, "GpuWorker", lambda: nullcontext(worker))
    monkeypatch.setattr(generate.Session, "resolution", lambda self, name: {})
    lib = Library(tmp_path)
    sizes = [(2048, 2048, 2048), (512, 512, 512)]
    facts, measured = generate.measure_bundle(tmp_path, lib, ("eager",), lambda text: None, None, sizes)
    found = load(results_file(lib.root))
    assert [r.shape for r in found] == sizes
    first = found[0]
    assert first.session == facts["session"] and first.commit == "c" * 40 and first.author == "me"
    assert first.command == "coda-agent measure BUNDLE --shape 2048x2048x2048 --shape 512x512x512 --baseline eager"
    assert set(first.samples_us) == {"kernel", "total", "gemm", "eager"} and first.rounds == 40
    [passport] = lib.passports()
    assert passport.timings and all("samples_us" not in row for row in passport.timings)
    assert "samples_us" in measured[0].rows[0]


def git(root, *args: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    return subprocess.run(
        ["git", *identity, *args], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_of_the_harness(tmp_path):
    assert commit(tmp_path) is None
    (tmp_path / "verifier").mkdir()
    (tmp_path / "generated" / "gemm_rope").mkdir(parents=True)
    code = tmp_path / "verifier" / "bundle.py"
    code.write_text("# code\n")
    git(tmp_path, "init", "-q")
    assert commit(tmp_path) is None  # somebody else's checkout around an installed copy
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit(tmp_path) == head
    (tmp_path / "generated" / "gemm_rope" / "kernel.py").write_text("# a kernel is data; its hash is in the record\n")
    (tmp_path / "notes.md").write_text("no code\n")
    assert commit(tmp_path) == head
    code.write_text("# other code\n")
    assert commit(tmp_path) == head + "+dirty"
