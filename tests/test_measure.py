"""The measuring session against a worker that makes up times: what goes into a row, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference_kernels.tasks import load_suite
from verifier import measure
from verifier.bundle import CONFIGS, EXPERT_AUTHOR
from verifier.gpu import CommandFailed, WorkerLost
from verifier.manifest import Artefact, config_key
from verifier.measure import Bundle, Session
from verifier.verdict import HarnessError

TASK = load_suite()["gemm_residual_rmsnorm"]
SHAPE = (2048, 2048, 2048)
PROGRAM = {"name": TASK.name, "pairs": None, "operands": {}, "outputs": {}, "index": {}}


def artefact(author: str, config: dict, act: str = "bf16", covers: list[str] | None = None) -> Artefact:
    key = f"{author}|{config_key(config)}|{act}"
    return Artefact(
        kernel=TASK.name, task=TASK.name, author=author, act=act, b="kn", 
        source_sha256="" if "quack" in author else author,
        object=f"{key}.o", object_sha256=key, symbol="f", fields=[], d=None, c=None, covers=covers, config=config,
        program=PROGRAM, toolchain={"quack-kernels": "0.6.5"}, isolation="none",
    )  # fmt: skip


def bundle(*artefacts: Artefact) -> Bundle:
    kernels = {a.author: a for a in artefacts if a.author != EXPERT_AUTHOR}
    content = {"kernels": [{"task": TASK.name, "author": n, "source_sha256": n, "source": ""} for n in kernels]}
    paths = [(f"/{a.object_sha256}", a) for a in artefacts]
    return Bundle(Path("/"), content, paths, {TASK.name: TASK})


class MadeUpTimes:
    """Speaks the worker's protocol. ``us``: manifest or baseline -> microseconds in (tuning, the final round)."""

    def __init__(self, us: dict[str, tuple[float, float]], **behaviour):
        self.us, self.behaviour = us, behaviour
        self.subjects: dict[str, str] = {}
        self.commands: list[dict] = []
        self.final = False

    def close(self):
        self.final = True

    def call(self, cmd: str, timeout: float = 120.0, **fields) -> dict:
        self.commands.append({"cmd": cmd, **fields})
        return getattr(self, cmd)(fields)

    def hello(self, fields):
        return {"device": "made up"}

    def ceilings(self, fields):
        return {"matmul_flops": 8e14, "copy_bytes": 4e12}

    def numerics(self, fields):
        return {"passed": True, "reason": "", "findings": []}

    def open_bench(self, fields):
        self.subjects = {}
        return {}

    def add(self, fields):
        subject = fields["manifest"].removeprefix("/")
        if subject in self.behaviour.get("kills", ()):
            self.subjects = {}
            raise WorkerLost("the worker process ended (SIGSEGV)")
        self.subjects[fields["subject"]] = subject
        return {"passed": True, "reason": ""}

    def add_baseline(self, fields):
        name = fields["subject"]
        if name in self.behaviour.get("absent", ()):
            return {"passed": False, "reason": f"{name} is not installed"}
        if name in self.behaviour.get("raises", ()):
            raise CommandFailed("RuntimeError: no", "...")
        self.subjects[name] = name
        return {"passed": True, "reason": "", **self.behaviour.get("facts", {}).get(name, {})}

    def run(self, fields):
        times = {}
        for name, what in self.subjects.items():
            us = self.us[what][self.final]
            times[name] = [us * (1 + 0.001 * (i % 5)) for i in range(fields["rounds"])]
            if "|" in what:
                times[f"{name}+finish"] = [t + 2.0 for t in times[name]]
        wrong = {
            n: "timed output: h: wrong" for n, what in self.subjects.items() if what in self.behaviour.get("wrong", ())
        }
        return {
            "times_us": times,
            "median_us": {n: sorted(t)[len(t) // 2] for n, t in times.items()},
            "wrong": wrong,
            "wall_over_events": {n: 1.0 for n in times},
            "receipt": {"before": {"processes": self.behaviour.get("processes")}, "after": None},
        }


def measured(us, artefacts, baselines=(), adapters=None, **behaviour):
    worker = MadeUpTimes({"gemm": (28.0, 28.0), **us}, **behaviour)
    session = Session(worker, bundle(*artefacts), adapters=adapters)
    return {m.author: m for m in session.measure_task(TASK.name, baselines, [SHAPE])}, worker


def named(author: str, *times: tuple[float, float]) -> tuple[list[Artefact], dict]:
    """A kernel in as many configurations as there are times, and an fp16 object for the numerics."""
    found = [artefact(author, c) for c in CONFIGS[: len(times)]]
    us = {a.object_sha256: t for a, t in zip(found, times)}
    return [*found, artefact(author, CONFIGS[0], "fp16")], us


def test_a_row_holds_what_it_was_computed_from():
    ours, us = named("me", (40.0, 40.0))
    experts = [artefact(EXPERT_AUTHOR, CONFIGS[0], covers=["h", "y"])]
    us |= {experts[0].object_sha256: (50.0, 50.0), "liger": (80.0, 80.0), "eager": (100.0, 100.0)}
    found, worker = measured(
        us, [*ours, *experts], ("eager", "liger", "flashinfer"), adapters="some.module",
        facts={"liger": {"version": "liger-kernel 0.6", "covers": ["y"]}}, absent=["flashinfer"],
    )  # fmt: skip
    [row] = found["me"].rows
    assert found["me"].passed and row["shape"] == list(SHAPE) and row["config"] == config_key(CONFIGS[0])
    assert row["flops"] == 2 * 2048**3
    tiles, row_bytes = 2 * 2048 * 2048, 2048 * 2
    assert row["bytes"] == 5 * tiles + row_bytes + 2048 * 4  # A, B, residual, h, y; weight; sumsq
    assert set(row["samples_us"]) == {"kernel", "total", "gemm", "eager", "liger", "expert"}
    assert {len(v) for v in row["samples_us"].values()} == {measure.FINAL_ROUNDS} == {row["rounds"]}
    assert row["samples_us"]["kernel"][1] == 40.04 and row["samples_us"]["total"][4] == 42.16
    assert row["samples_us"]["expert"][0] == 52.0  # its fold counts as ours does
    assert row["total_us"] == pytest.approx(42.08) and row["finish_us"] == pytest.approx(2.0)
    assert row["baselines"] == {
        "gemm": {"us": pytest.approx(28.056), "version": None, "covers": None, "config": None},
        "eager": {"us": pytest.approx(100.2), "version": None, "covers": None, "config": None},
        "liger": {"us": pytest.approx(80.16), "version": "liger-kernel 0.6", "covers": ["y"], "config": None},
        "expert": {
            "us": pytest.approx(52.1), "version": "quack-kernels 0.6.5", "covers": ["h", "y"], "config": row["config"],
        },
    }  # fmt: skip
    assert row["left_out"] == {"flashinfer": "flashinfer is not installed"}
    assert set(row["ratios"]) == set(row["wins"]) == set(row["baselines"])
    assert all(set(r) == {"median", "low", "high"} for r in row["ratios"].values())
    assert row["ratios"]["liger"]["median"] == pytest.approx(80 / 42, rel=0.01) and row["wins"]["liger"]
    assert not row["wins"]["gemm"]
    asked = [c for c in worker.commands if c["cmd"] == "add_baseline"]
    assert [c["subject"] for c in asked] == ["gemm", "eager", "liger", "flashinfer"]
    assert {c["adapters"] for c in asked} == {"some.module"}


def test_the_final_round_decides_between_configurations_that_tuning_cannot_tell_apart():
    ours, us = named("me", (40.0, 41.0), (41.0, 39.0), (41.5, 43.0), (41.6, 30.0), (50.0, 20.0))
    found, _ = measured(us, ours)
    [row] = found["me"].rows
    assert row["config"] == config_key(CONFIGS[1])
    keys = [config_key(c) for c in CONFIGS]
    # the fourth is within the window but is not one of the best three, the fifth is outside the window
    assert row["finalists"] == {
        keys[0]: pytest.approx(43.08, 1e-3),
        keys[1]: row["total_us"],
        keys[2]: pytest.approx(45.08, 1e-3),
    }


def test_a_configuration_outside_the_window_is_no_finalist():
    ours, us = named("me", (40.0, 41.0), (45.0, 20.0))
    found, _ = measured(us, ours)
    assert list(found["me"].rows[0]["finalists"]) == [config_key(CONFIGS[0])]


def test_every_author_brings_as_many_finalists_whoever_is_faster():
    slow, us = named("slow", (60.0, 60.0), (61.0, 59.0), (62.0, 62.0))
    fast, more = named("fast", (40.0, 41.0), (41.0, 39.0), (41.5, 43.0))
    expert = [artefact(EXPERT_AUTHOR, c) for c in CONFIGS[:4]]
    us |= more | {a.object_sha256: (50.0 + i, 50.0 - i) for i, a in enumerate(expert)}
    found, _ = measured(us, [*slow, *fast, *expert])
    assert {author: len(m.rows[0]["finalists"]) for author, m in found.items()} == {"slow": 3, "fast": 3}
    assert found["slow"].rows[0]["total_us"] == pytest.approx(61, rel=0.01)
    assert found["fast"].rows[0]["baselines"]["expert"]["us"] == pytest.approx(50, rel=0.01)  # 48 us and its fold


def test_a_finalist_with_wrong_timed_outputs_is_rejected_and_the_next_one_counts():
    ours, us = named("me", (40.0, 39.0), (41.0, 41.0))
    found, _ = measured(us, ours, wrong=[ours[0].object_sha256])
    [row] = found["me"].rows
    assert row["config"] == config_key(CONFIGS[1]) and list(row["finalists"]) == [row["config"]]
    assert [r["config"] for r in found["me"].rejected] == [config_key(CONFIGS[0])]
    assert found["me"].rejected[0]["reason"] == "timed output: h: wrong"


def test_an_impossible_time_is_quarantined_and_the_next_one_counts():
    ours, us = named("me", (40.0, 5.0), (41.0, 41.0))
    found, _ = measured(us, ours)
    assert found["me"].rows[0]["config"] == config_key(CONFIGS[1])
    assert "below the floor" in found["me"].rejected[0]["reason"]


def test_a_wrong_expert_is_left_out_with_the_reason():
    ours, us = named("me", (40.0, 40.0))
    expert = artefact(EXPERT_AUTHOR, CONFIGS[0])
    found, _ = measured(us | {expert.object_sha256: (30.0, 30.0)}, [*ours, expert], wrong=[expert.object_sha256])
    row = found["me"].rows[0]
    assert "expert" not in row["baselines"] and row["left_out"] == {"expert": "timed output: h: wrong"}


def test_a_candidate_that_kills_the_worker_costs_nobody_else_his_place():
    dead, us = named("dead", (40.0, 40.0))
    alive, more = named("alive", (42.0, 42.0), (43.0, 43.0))
    found, _ = measured(us | more, [*alive, *dead], kills=[dead[0].object_sha256])
    assert not found["dead"].passed and "SIGSEGV" in found["dead"].verdicts[-1].reason
    assert found["alive"].passed and len(found["alive"].rows[0]["finalists"]) == 2


def test_a_baseline_that_raises_is_left_out_and_the_others_are_timed():
    ours, us = named("me", (40.0, 40.0))
    found, _ = measured(us | {"eager": (90.0, 90.0)}, ours, ("torch.compile", "eager"), raises=["torch.compile"])
    row = found["me"].rows[0]
    assert set(row["baselines"]) == {"gemm", "eager"} and "RuntimeError: no" in row["left_out"]["torch.compile"]


def test_without_the_bare_gemm_there_is_no_row_but_a_reason():
    ours, us = named("me", (40.0, 40.0))
    found, _ = measured(us, ours, raises=["gemm"])
    assert not found["me"].passed and "gemm: error: RuntimeError: no" in found["me"].verdicts[-1].reason


def test_inputs_that_do_not_fit_are_no_fault_of_a_candidate(monkeypatch):
    def too_large(self, fields):
        raise CommandFailed("OutOfMemoryError: CUDA out of memory", "...")

    monkeypatch.setattr(MadeUpTimes, "open_bench", too_large)
    ours, us = named("me", (40.0, 40.0))
    with pytest.raises(HarnessError, match="2048x2048x2048: .*out of memory"):
        measured(us, ours)


def test_a_worker_whose_memory_was_written_over_is_replaced_before_the_next_command(monkeypatch):
    """The answer that says so is the candidate's end; nobody else is measured in that process."""
    spoilt, us = named("spoilt", (40.0, 40.0))
    fine, more = named("fine", (42.0, 42.0))
    order = []

    class Written(MadeUpTimes):
        def numerics(self, fields):
            bad = "spoilt" in fields["manifest"]
            order.append("spoilt" if bad else "fine")
            return {"passed": not bad, "reason": "h: written outside the tensor", "findings": [], "lost": bad}

        def close(self):
            order.append("closed")
            super().close()

    worker = Written({"gemm": (28.0, 28.0), **us, **more})
    found = {m.author: m for m in Session(worker, bundle(*spoilt, *fine)).measure_task(TASK.name, (), [SHAPE])}
    assert not found["spoilt"].passed and found["fine"].passed
    assert order[:3] == ["spoilt", "closed", "fine"]


# --- every configuration that the library may serve -----------------------------------------------------


class WrongAt(MadeUpTimes):
    """A worker on which the objects named in ``wrong_at`` are wrong at a shape: object -> (shape, style)."""

    wrong_at: dict = {}

    def numerics(self, fields):
        at = self.wrong_at.get(fields["manifest"].removeprefix("/"))
        wrong = at == (tuple(fields["shape"]), fields["style"])
        return {"passed": not wrong, "reason": "h: wrong" if wrong else "", "findings": []}


def judged_by(worker, *artefacts):
    return {m.author: m for m in Session(worker, bundle(*artefacts)).measure_task(TASK.name, (), [SHAPE])}


def test_every_configuration_is_judged_at_every_ragged_shape():
    """ROCm/aiter #4398: the tests hard-coded one tile width and production picked another."""
    ours, us = named("me", (40.0, 40.0), (41.0, 41.0), (42.0, 42.0))
    worker = WrongAt({"gemm": (28.0, 28.0), **us})
    found = judged_by(worker, *ours)["me"]
    asked = [c for c in worker.commands if c["cmd"] == "numerics" and c["act"] == "bf16"]
    for a in ours[:3]:
        own = {(tuple(c["shape"]), c["style"]) for c in asked if c["manifest"] == f"/{a.object_sha256}"}
        assert {(s, style) for s in TASK.ragged for style in ("normal", "integers")} <= own
    inputs = [(tuple(c["shape"]), c["style"]) for c in asked]
    changes = sum(x != y for x, y in zip(inputs, inputs[1:]))
    assert changes == len(set(inputs)) - 1  # the worker keeps one truth: no inputs are made twice
    assert found.passed and "; 3 of 3 configurations do at every ragged shape" in found.verdicts[0].reason


@pytest.mark.parametrize("where", [(TASK.ragged[0], "integers"), (TASK.ragged[-1], "normal")])
def test_a_configuration_that_is_wrong_at_a_ragged_shape_is_not_timed(where):
    """ROCm/aiter #4398: it is fast at the timed size and right there, and would be served at every other."""
    ours, us = named("me", (40.0, 40.0), (20.0, 20.0), (42.0, 42.0))
    worker = WrongAt({"gemm": (28.0, 28.0), **us})
    worker.wrong_at = {ours[1].object_sha256: where}
    found = judged_by(worker, *ours)["me"]
    [row] = found.rows
    assert found.passed and row["config"] == config_key(CONFIGS[0])
    [rejected] = found.rejected
    assert rejected["config"] == config_key(CONFIGS[1]) and tuple(rejected["shape"]) == where[0]
    assert rejected["reason"].startswith("h: wrong [M=") and f"inputs: {where[1]}]" in rejected["reason"]
    asked = [c for c in worker.commands if c.get("manifest") == f"/{ours[1].object_sha256}"]
    assert {c["cmd"] for c in asked} == {"numerics"}
    assert (tuple(asked[-1]["shape"]), asked[-1]["style"]) == where  # nor judged any further
    assert "2 of 3 configurations" in found.verdicts[0].reason


def test_a_kernel_whose_first_configuration_is_wrong_fails():
    ours, us = named("me", (40.0, 40.0), (20.0, 20.0))
    worker = WrongAt({"gemm": (28.0, 28.0), **us})
    worker.wrong_at = {ours[0].object_sha256: (TASK.ragged[1], "normal")}
    found = judged_by(worker, *ours)["me"]
    assert not found.passed and not found.rows and found.verdicts[-1].stage == "numerics"
    assert config_key(CONFIGS[0]) in found.verdicts[-1].reason


@pytest.mark.parametrize("processes, others", [(2, 1), (5, 4)])
def test_nothing_is_measured_beside_another_process(processes, others):
    """A choice of configuration made while somebody else computes on the GPU is as wrong as a time."""
    ours, us = named("me", (40.0, 40.0))
    with pytest.raises(HarnessError, match=f"{others} other process.* compute on this GPU; stop them"):
        measured(us, ours, processes=processes)


@pytest.mark.parametrize("processes", [None, 0, 1])
def test_alone_or_not_known_is_measured(processes):
    ours, us = named("me", (40.0, 40.0))
    found, _ = measured(us, ours, processes=processes)
    assert found["me"].passed and found["me"].rows
