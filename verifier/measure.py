"""Measure a bundle on the GPU of this machine: numerics, choice of configuration, timing.

The parent side. It owns the verdicts: the worker only reports what outputs were
and how long replays took.
"""

from __future__ import annotations

import json
import math
import random
import secrets
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from primitives.shapes import traffic
from reference_kernels.tasks import ACT_DTYPES, Task
from reference_kernels.truth import STYLES

from .bundle import EXPERT_AUTHOR, FORMAT
from .gpu import CommandFailed, GpuWorker, WorkerLost
from .manifest import Artefact
from .provenance import forgery
from .verdict import HarnessError, Verdict

TUNE_ROUNDS, FINAL_ROUNDS, AA_ROUNDS = 8, 40, 60
AA_SHAPE = (4096, 4096, 4096)
MIN_EFFECT = 1.02  # a win is declared only when the lower bound of the ratio exceeds this
CLOCKS_AGREE = (0.9, 1.1)  # wall clock of a batch over CUDA events, per call
IMPOSSIBLE = 1.05  # share of the floor above which a time is quarantined instead of believed
COMMAND_SECONDS, COMPILE_SECONDS = 90.0, 300.0


@dataclass
class Measurement:
    """What was measured of one kernel: verdicts, and a row per timed shape."""

    task: str
    author: str
    source_sha256: str
    verdicts: list[Verdict] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)
    rejected: list[dict] = field(default_factory=list)  # configurations that failed, with reasons

    @property
    def passed(self) -> bool:
        return bool(self.verdicts) and all(v.passed for v in self.verdicts)

    def as_dict(self) -> dict:
        return {
            "task": self.task,
            "author": self.author,
            "source_sha256": self.source_sha256,
            "passed": self.passed,
            "verdicts": [v.model_dump() for v in self.verdicts],
            "rows": self.rows,
            "rejected": self.rejected,
        }


@dataclass
class Bundle:
    """A bundle read back: manifests grouped by kernel."""

    directory: Path
    content: dict
    artefacts: list[tuple[str, Artefact]]  # manifest path, artefact
    tasks: dict[str, Task]

    @property
    def suite(self) -> str | None:
        return self.content.get("suite")


def read_bundle(directory: Path) -> Bundle:
    """Read ``bundle.json`` and every manifest.

    Raises:
        HarnessError: not a bundle, or an incomplete one.
    """
    try:
        content = json.loads((directory / "bundle.json").read_text())
        if content.get("format") != FORMAT:
            raise HarnessError(f"{directory}: bundle format {content.get('format')}, this version reads {FORMAT}")
        paths = [directory / name for name in content["manifests"]]
        artefacts = [(str(p.resolve()), Artefact.model_validate_json(p.read_text())) for p in paths]
        tasks = {n: Task.model_validate(t) for n, t in content["tasks"].items()}
        forged = forgery(content, [a for _, a in artefacts], tasks)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise HarnessError(f"{directory} is not a readable bundle ({e}); make one with 'coda-agent bundle'") from e
    if forged:
        raise HarnessError(f"{directory} is not as 'coda-agent bundle' writes it: {forged}")
    return Bundle(directory, content, artefacts, tasks)


class Session:
    """One measuring session: one device, one set of ceilings, fresh entropy."""

    def __init__(self, worker: GpuWorker, bundle: Bundle, progress: Callable[[str], None] = lambda text: None):
        self.worker, self.bundle, self.progress = worker, bundle, progress
        self.id = secrets.token_hex(4)
        self.seed = secrets.randbits(30)
        self.device = worker.call("hello")
        self.ceilings = worker.call("ceilings")

    def resolution(self, name: str, shape: tuple[int, int, int] = AA_SHAPE) -> dict:
        """A/A test: one artefact timed as two subjects; how far from 1 a ratio can be by chance."""
        task = self.bundle.tasks[name]
        path = next(p for p, a in self.bundle.artefacts if a.task == name and a.act == "bf16" and a.author != EXPERT_AUTHOR)
        self.progress(f"A/A test on {name} {shape[0]}x{shape[1]}x{shape[2]}")
        self._open(task, shape, self.seed)
        for subject in ("A1", "A2"):
            if not self._guarded("add", subject=subject, manifest=path)["passed"]:
                return {}
        result = self._guarded("run", rounds=AA_ROUNDS)
        if "times_us" not in result:
            return {}
        found = ratio(result["times_us"]["A1"], result["times_us"]["A2"])
        return {"task": name, "shape": list(shape), **found, "rounds": AA_ROUNDS, "wall_over_events": result["wall_over_events"]}

    def measure_task(self, name: str, baselines: tuple[str, ...], shapes: list | None = None) -> list[Measurement]:
        """Measure every kernel of the bundle for one task, together with the expert and the baselines."""
        task = self.bundle.tasks[name]
        kernels = [k for k in self.bundle.content["kernels"] if k["task"] == name]
        measured = [Measurement(name, k["author"], k["source_sha256"]) for k in kernels]
        for m in measured:
            self._numerics(task, m)
        twins: dict[tuple, list[Measurement]] = {}  # the same machine code is timed once
        for m in measured:
            if m.passed:
                twins.setdefault(self._machine_code(m), []).append(m)
        good = [group[0] for group in twins.values()]
        expert = Measurement(name, EXPERT_AUTHOR, "")
        sizes = [tuple(s) for s in shapes or task.timed] if good else []
        winners = {shape: self._tune(task, shape, self._subjects(task, good, expert)) for shape in sizes}
        self.worker.close()  # winners are measured again in a fresh process, with fresh inputs
        for shape, chosen in winners.items():
            if any(m is not expert for m, _, _ in chosen.values()):
                self._final(task, shape, chosen, expert, baselines)
        for first, *others in twins.values():
            for m in others:
                m.rows = [{**row, "same_object_as": first.author} for row in first.rows]
                m.rejected = list(first.rejected)
        for m in (m for group in twins.values() for m in group):
            if m.rows:
                best = max(m.rows, key=lambda r: r["share_of_floor"])
                reason = f"{len(m.rows)} sizes timed, up to {best['share_of_floor']:.0%} of the floor"
                m.verdicts.append(Verdict(stage="timing", passed=True, reason=reason, evidence={"session": self.id}))
            else:
                reasons = "; ".join(r["reason"] for r in m.rejected[:3])
                m.verdicts.append(Verdict(stage="timing", passed=False, reason=f"no configuration could be timed: {reasons}"))
        return measured

    def _machine_code(self, m: Measurement) -> tuple:
        """Hashes of the first configuration's object in every dtype."""
        first: dict[str, str] = {}
        for _, a in self._artefacts(m):
            first.setdefault(a.act, a.object_sha256)
        return tuple(sorted(first.items()))

    # --- numerics ---

    def _artefacts(self, m: Measurement, act: str | None = None) -> list[tuple[str, Artefact]]:
        return [
            (path, a)
            for path, a in self.bundle.artefacts
            if (a.task, a.author, a.source_sha256) == (m.task, m.author, m.source_sha256) and act in (None, a.act)
        ]

    def _numerics(self, task: Task, m: Measurement) -> None:
        """Every dtype at every ragged shape and at the smallest timed one, random and whole numbers."""
        worst: dict[str, dict] = {}
        for act in task.dtypes:
            found = self._artefacts(m, act)
            if not found:
                m.verdicts.append(Verdict(stage="numerics", passed=False, reason=f"nothing compiled in {act}"))
                return
            path, artefact = found[0]
            plan = [(s, style) for s in (*task.ragged, (256, 256, 256)) for style in ("normal", "integers")]
            plan += [(task.timed[0], "normal"), *((task.ragged[0], style) for style in STYLES[2:])]
            self.progress(f"{task.name} {m.author} numerics {act}")
            for shape, style in plan:
                answer = self._guarded(
                    "numerics", manifest=path, task=task.model_dump(mode="json"), shape=shape, act=act,
                    seed=self.seed, style=style, suite=self.bundle.suite,
                )  # fmt: skip
                if not answer["passed"]:
                    where = f"M={shape[0]} N={shape[1]} K={shape[2]} {act} {artefact.config_key}, inputs: {style}"
                    m.verdicts.append(
                        Verdict(stage="numerics", passed=False, reason=f"{answer['reason']} [{where}]", evidence=answer)
                    )
                    return
                for f in answer["findings"]:
                    if f["relative_error"] >= worst.get(f["output"], {}).get("relative_error", -1.0):
                        worst[f["output"]] = {**f, "shape": list(shape), "act": act}
        reason = f"{len(plan)} cases in each of {', '.join(task.dtypes)} match the fp64 reference"
        m.verdicts.append(Verdict(stage="numerics", passed=True, reason=reason, evidence={"worst": worst, "seed": self.seed}))

    def _guarded(self, cmd: str, timeout: float = COMMAND_SECONDS, **fields) -> dict:
        """A command whose loss or error is the candidate's fault: an answer either way."""
        try:
            return self.worker.call(cmd, timeout, **fields)
        except WorkerLost as e:
            return {"passed": False, "reason": e.reason, "lost": True}
        except CommandFailed as e:
            kind = "memory fault" if "illegal memory access" in e.error or "misaligned" in e.error else "error"
            return {"passed": False, "reason": f"{kind}: {e.error}", "lost": True}

    # --- timing ---

    def _open(self, task: Task, shape, seed: int) -> dict:
        return self.worker.call(
            "open_bench", COMMAND_SECONDS, task=task.model_dump(mode="json"), shape=shape, act="bf16", seed=seed,
            suite=self.bundle.suite,
        )  # fmt: skip

    def _subjects(self, task: Task, measured: list[Measurement], expert: Measurement) -> dict:
        """Everything to tune: subject name -> (owner, manifest path, artefact)."""
        subjects = {}
        for m in measured:
            for path, a in self._artefacts(m, "bf16"):
                subjects[f"{m.author}|{a.source_sha256[:8]}|{a.config_key}"] = (m, path, a)
        for path, a in self.bundle.artefacts:
            if a.task == task.name and a.author == EXPERT_AUTHOR:
                subjects[f"{EXPERT_AUTHOR}||{a.config_key}"] = (expert, path, a)
        return subjects

    def _final(self, task: Task, shape, winners: dict, expert: Measurement, baselines: tuple[str, ...]) -> None:
        """Time the winners against the bare GEMM, the expert and the baselines."""
        self.progress(f"{task.name} {shape[0]}x{shape[1]}x{shape[2]} final timing")
        self._open(task, shape, self.seed + random.randrange(1 << 20))
        kept = {}
        for name, (m, path, a) in winners.items():
            answer = self._guarded("add", subject=name, manifest=path)
            if answer["passed"]:
                kept[name] = (m, a)
            else:
                m.rejected.append({"config": a.config_key, "shape": list(shape), "reason": answer["reason"]})
        for b in ("gemm", *baselines):
            answer = self._guarded("add_baseline", COMPILE_SECONDS, subject=b)
            if not answer["passed"]:
                self.progress(f"{task.name}: baseline {b} left out: {answer['reason'][:200]}")
        result = self._guarded("run", rounds=FINAL_ROUNDS)
        if "times_us" not in result:
            for m, a in kept.values():
                m.rejected.append({"config": a.config_key, "shape": list(shape), "reason": f"timing: {result['reason']}"})
            return
        for name, (m, a) in kept.items():
            if m is expert:
                continue
            row = self._row(task, shape, name, a, kept, expert, result)
            problem = result["wrong"].get(name) or self._implausible(row)
            if problem:
                m.rejected.append({"config": a.config_key, "shape": list(shape), "reason": problem})
            else:
                m.rows.append(row)

    def _tune(self, task: Task, shape, subjects: dict) -> dict:
        """The fastest correct configuration of each kernel at this shape."""
        self.progress(f"{task.name} {shape[0]}x{shape[1]}x{shape[2]} {len(subjects)} configurations")
        seed = self.seed + random.randrange(1 << 20)
        self._open(task, shape, seed)
        added = []
        for name, (m, path, a) in subjects.items():
            answer = self._guarded("add", subject=name, manifest=path)
            if answer["passed"]:
                added.append(name)
                continue
            m.rejected.append({"config": a.config_key, "shape": list(shape), "reason": answer["reason"]})
            if answer.get("lost"):  # a fresh worker knows nothing: add the survivors again
                self._open(task, shape, seed)
                added = [n for n in added if self._guarded("add", subject=n, manifest=subjects[n][1])["passed"]]
        if not added:
            return {}
        result = self._guarded("run", rounds=TUNE_ROUNDS)
        medians = result.get("median_us", {})
        total = {n: medians.get(f"{n}+finish", medians[n]) for n in added if n in medians}
        winners: dict[int, str] = {}
        for name in total:
            owner = id(subjects[name][0])
            if owner not in winners or total[name] < total[winners[owner]]:
                winners[owner] = name
        return {n: subjects[n] for n in winners.values()}

    def _implausible(self, row: dict) -> str:
        """Why a time is not believed, or an empty string."""
        if row["share_of_floor"] > IMPOSSIBLE:
            return f"{row['kernel_us']:.1f} us is below the floor of {row['floor_us']:.1f} us: quarantined"
        low, high = CLOCKS_AGREE
        if not low <= row["wall_over_events"] <= high:
            return f"wall clock and CUDA events disagree by a factor of {row['wall_over_events']:.2f}: quarantined"
        return ""

    def _row(self, task, shape, name, artefact, kept, expert, result) -> dict:
        times, medians = result["times_us"], result["median_us"]
        total = f"{name}+finish" if f"{name}+finish" in times else name
        act = ACT_DTYPES[artefact.act]
        moved = traffic(task.kinds, task.torch_dtypes(act), act, *shape)
        floor_us = moved.floor_us(self.ceilings["matmul_flops"], self.ceilings["copy_bytes"])
        expert_name = next((n for n, (m, _) in kept.items() if m is expert), None)
        # like with like: an expert whose partials are folded is compared with ours folded too
        ratios = {b: ratio(times[b], times[total]) for b in times if b == "gemm" or b.startswith("torch.compile")}
        if expert_name:
            expert_total = f"{expert_name}+finish" if f"{expert_name}+finish" in times else expert_name
            ratios["expert"] = ratio(times[expert_total], times[total])
            ratios["expert"]["config"] = kept[expert_name][1].config_key
            ratios["expert"]["covers"] = kept[expert_name][1].covers
        return {
            "task": task.name,
            "shape": list(shape),
            "act": "bf16",
            "config": artefact.config_key,
            "object_sha256": artefact.object_sha256,
            "kernel_us": medians[name],
            "total_us": medians[total],
            "finish_us": statistics.median(t - k for t, k in zip(times[total], times[name], strict=True)),
            "iqr_us": _iqr(times[name]),
            "gemm_us": medians["gemm"],
            "tax_us": statistics.median(k - g for k, g in zip(times[name], times["gemm"], strict=True)),
            "floor_us": floor_us,
            "share_of_floor": floor_us / medians[name],
            "baseline_us": {n: medians[n] for n in times if n.startswith("torch.compile")},
            "expert_us": medians.get(expert_name) if expert_name else None,
            "ratios": ratios,
            "wins": {n: r["low"] > MIN_EFFECT for n, r in ratios.items()},
            "wall_over_events": result["wall_over_events"][name],
            "rounds": len(times[name]),
            "session": self.id,
            "receipt": result["receipt"],
        }


def ratio(baseline: list[float], subject: list[float]) -> dict:
    """How many times faster ``subject`` is: median of paired ratios with a 95 % interval.

    The interval is between two order statistics of the per-round log ratios, at equal
    distance from the ends, whose binomial coverage of the median is at least 95 %.
    """
    logs = sorted(math.log(b / s) for b, s in zip(baseline, subject, strict=True))
    n = len(logs)
    low, below = 0, 1  # ``below``: outcomes of n coin flips with at most ``low`` heads
    while low + 1 < n // 2 and 2 * (below + math.comb(n, low + 1)) <= 0.05 * 2**n:
        low += 1
        below += math.comb(n, low)
    high = n - 1 - low
    return {
        "median": math.exp(statistics.median(logs)),
        "low": math.exp(logs[low]),
        "high": math.exp(logs[high]),
    }


def _iqr(values: list[float]) -> float:
    q = statistics.quantiles(values, n=4)
    return q[2] - q[0]
