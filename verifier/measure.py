"""Measure a bundle on the GPU of this machine: numerics, choice of configuration, timing.

The parent side. It owns the verdicts: the worker only reports what outputs were
and how long replays took.
"""

from __future__ import annotations

import json
import math
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
FINALISTS, FINALIST_WINDOW = 3, 1.05  # configurations per kernel in the final round; how far behind the best of tuning


@dataclass
class Measurement:
    """What was measured of one kernel: verdicts, and a row per timed shape."""

    task: str
    author: str
    source_sha256: str
    verdicts: list[Verdict] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)
    rejected: list[dict] = field(default_factory=list)  # configurations that failed, with reasons
    wrong: set[str] = field(default_factory=set)  # those of them whose outputs were wrong at some shape: never timed

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

    def __init__(
        self,
        worker: GpuWorker,
        bundle: Bundle,
        progress: Callable[[str], None] = lambda text: None,
        *,
        adapters: str | None = None,
    ):
        """``adapters``: dotted name of a module with further baselines, or None."""
        self.worker, self.bundle, self.progress, self.adapters = worker, bundle, progress, adapters
        self.id = secrets.token_hex(4)
        self.seed = secrets.randbits(30)
        self.device = worker.call("hello")
        self.ceilings = worker.call("ceilings")

    def resolution(self, name: str, shape: tuple[int, int, int] = AA_SHAPE) -> dict:
        """A/A test: one artefact timed as two subjects; how far from 1 a ratio can be by chance."""
        task = self.bundle.tasks[name]
        path = next(
            p for p, a in self.bundle.artefacts if a.task == name and a.act == "bf16" and a.author != EXPERT_AUTHOR
        )
        self.progress(f"A/A test on {name} {shape[0]}x{shape[1]}x{shape[2]}")
        self._open(task, shape, self.seed)
        for subject in ("A1", "A2"):
            if not self._guarded("add", subject=subject, manifest=path)["passed"]:
                return {}
        result = self._run(AA_ROUNDS)
        if "times_us" not in result:
            return {}
        found = ratio(result["times_us"]["A1"], result["times_us"]["A2"])
        return {
            "task": name,
            "shape": list(shape),
            **found,
            "rounds": AA_ROUNDS,
            "wall_over_events": result["wall_over_events"],
        }

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
        finalists = {shape: self._tune(task, shape, self._subjects(task, good, expert)) for shape in sizes}
        self.worker.close()  # finalists are measured again in a fresh process, with fresh inputs
        for shape, chosen in finalists.items():
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
                m.verdicts.append(
                    Verdict(stage="timing", passed=False, reason=f"no configuration could be timed: {reasons}")
                )
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
        """Every dtype at every ragged shape and at the smallest timed one, random and whole numbers.

        The library serves whichever configuration is fastest at shapes of any size (ROCm/aiter #4398: the tests
        hard-coded one tile, production picked another), so each is judged at every ragged shape. One that fails
        is not timed; the first one speaks for the kernel.
        """
        worst: dict[str, dict] = {}
        judged: set[str] = set()
        for act in task.dtypes:
            found = self._artefacts(m, act)
            if not found:
                m.verdicts.append(Verdict(stage="numerics", passed=False, reason=f"nothing compiled in {act}"))
                return
            basic = [(s, style) for s in (*task.ragged, (256, 256, 256)) for style in ("normal", "integers")]
            plan = basic + [(task.timed[0], "normal"), *((task.ragged[0], style) for style in STYLES[2:])]
            self.progress(f"{task.name} {m.author} numerics {act}")
            for shape, style in plan:
                everywhere = (shape, style) in basic and shape in task.ragged
                # the worker keeps the truth while only the configuration changes
                for path, artefact in found if everywhere else found[:1]:
                    if artefact.config_key in m.wrong:
                        continue
                    answer = self._guarded(
                        "numerics", manifest=path, task=task.model_dump(mode="json"), shape=shape, act=act,
                        seed=self.seed, style=style, suite=self.bundle.suite,
                    )  # fmt: skip
                    judged.add(artefact.config_key)
                    if answer["passed"]:
                        for f in answer["findings"]:
                            if f["relative_error"] >= worst.get(f["output"], {}).get("relative_error", -1.0):
                                worst[f["output"]] = {**f, "shape": list(shape), "act": act}
                        continue
                    where = f"M={shape[0]} N={shape[1]} K={shape[2]} {act} {artefact.config_key}, inputs: {style}"
                    reason = f"{answer['reason']} [{where}]"
                    if artefact is found[0][1]:
                        m.verdicts.append(Verdict(stage="numerics", passed=False, reason=reason, evidence=answer))
                        return
                    m.wrong.add(artefact.config_key)
                    _reject((m, path, artefact), shape, reason)
        reason = f"{len(plan)} cases in each of {', '.join(task.dtypes)} match the fp64 reference"
        if len(judged) > 1:
            reason += f"; {len(judged) - len(m.wrong)} of {len(judged)} configurations do at every ragged shape"
        m.verdicts.append(
            Verdict(stage="numerics", passed=True, reason=reason, evidence={"worst": worst, "seed": self.seed})
        )

    def _guarded(self, cmd: str, timeout: float = COMMAND_SECONDS, **fields) -> dict:
        """A command whose loss or error is the candidate's fault: an answer either way.

        Raises:
            HarnessError: the GPU's memory is exhausted; that is our inputs, references and copies, not the candidate.
        """
        try:
            answer = self.worker.call(cmd, timeout, **fields)
            if answer.get("lost"):  # it lives, but holds memory that the candidate wrote over
                self.worker.close()
            return answer
        except WorkerLost as e:
            return {"passed": False, "reason": e.reason, "lost": True}
        except CommandFailed as e:
            if "out of memory" in e.error and cmd != "add_baseline":  # a baseline may need more than its kernel
                raise HarnessError(
                    f"the GPU's memory does not hold every configuration at this size ({e.error[:200]}); "
                    "ask for a smaller --shape, or bundle fewer kernels"
                ) from e
            kind = "memory fault" if "illegal memory access" in e.error or "misaligned" in e.error else "error"
            return {"passed": False, "reason": f"{kind}: {e.error}", "lost": True}

    # --- timing ---

    def _run(self, rounds: int) -> dict:
        """Time the open benchmark.

        Raises:
            HarnessError: another process computes on this GPU, so neither a choice nor a time can be believed.
        """
        result = self._guarded("run", rounds=rounds)
        receipt = result.get("receipt", {})
        for reading in (receipt.get(when) or {} for when in ("before", "after")):
            others = (reading.get("processes") or 1) - 1
            if others > 0:
                raise HarnessError(f"{others} other process(es) compute on this GPU; stop them and measure again")
        return result

    def _open(self, task: Task, shape, seed: int) -> dict:
        try:
            return self.worker.call(
                "open_bench", COMMAND_SECONDS, task=task.model_dump(mode="json"), shape=shape, act="bf16", seed=seed,
                suite=self.bundle.suite,
            )  # fmt: skip
        except (WorkerLost, CommandFailed) as e:  # no candidate has run yet
            raise HarnessError(f"cannot make inputs of {task.name} at {'x'.join(map(str, shape))}: {e}") from e

    def _subjects(self, task: Task, measured: list[Measurement], expert: Measurement) -> dict:
        """Everything to tune: subject name -> (owner, manifest path, artefact)."""
        subjects = {}
        for m in measured:
            for path, a in (p for p in self._artefacts(m, "bf16") if p[1].config_key not in m.wrong):
                subjects[f"{m.author}|{a.source_sha256[:8]}|{a.config_key}"] = (m, path, a)
        for path, a in self.bundle.artefacts:
            if a.task == task.name and a.author == EXPERT_AUTHOR:
                subjects[f"{EXPERT_AUTHOR}||{a.config_key}"] = (expert, path, a)
        return subjects

    def _assemble(self, task: Task, shape, entries: dict[str, dict]) -> tuple[dict[str, dict], dict[str, str]]:
        """Open a benchmark and add every entry; one that costs the worker is left out and the others are added again.

        Args:
            entries: subject name -> the fields of its command.

        Returns:
            The answers of the subjects that are in, and why the others are not.
        """
        seed, failed = self.seed + secrets.randbelow(1 << 20), {}
        while True:
            self._open(task, shape, seed)
            added = {}
            for name, fields in entries.items():
                if name in failed:
                    continue
                answer = self._guarded(**fields, subject=name)
                if answer["passed"]:
                    added[name] = answer
                    continue
                failed[name] = answer["reason"]
                if answer.get("lost"):
                    break
            else:
                return added, failed

    def _tune(self, task: Task, shape, subjects: dict) -> dict:
        """The configurations of each kernel that go into the final round at this shape.

        Those a few percent apart in a short round are all carried on: which is first here is chance.
        """
        self.progress(f"{task.name} {shape[0]}x{shape[1]}x{shape[2]} {len(subjects)} configurations")
        added, failed = self._assemble(
            task, shape, {n: {"cmd": "add", "manifest": p} for n, (_, p, _) in subjects.items()}
        )
        for name, reason in failed.items():
            _reject(subjects[name], shape, reason)
        medians = self._run(TUNE_ROUNDS).get("median_us", {}) if added else {}
        by_owner: dict[int, dict[str, float]] = {}
        for name in (n for n in added if n in medians):
            by_owner.setdefault(id(subjects[name][0]), {})[name] = medians[_total(name, medians)]
        chosen = {}
        for totals in by_owner.values():
            limit = FINALIST_WINDOW * min(totals.values())
            chosen |= {n: subjects[n] for n in sorted(totals, key=totals.get)[:FINALISTS] if totals[n] <= limit}
        return chosen

    def _final(self, task: Task, shape, finalists: dict, expert: Measurement, baselines: tuple[str, ...]) -> None:
        """Time the finalists against the bare GEMM, the expert and the baselines; one row per kernel."""
        self.progress(f"{task.name} {shape[0]}x{shape[1]}x{shape[2]} final timing")
        asked = [b for b in dict.fromkeys(("gemm", *baselines)) if b != "expert"]  # the expert comes with the bundle
        entries = {n: {"cmd": "add", "manifest": p} for n, (_, p, _) in finalists.items()}
        entries |= {b: {"cmd": "add_baseline", "timeout": COMPILE_SECONDS, "adapters": self.adapters} for b in asked}
        added, failed = self._assemble(task, shape, entries)
        result = self._run(FINAL_ROUNDS) if "gemm" in added else {"reason": f"gemm: {failed['gemm']}"}
        problems = {n: failed[n] for n in finalists if n in failed}
        rows: dict[str, dict] = {}
        if "times_us" not in result:
            problems = {n: f"timing: {result['reason']}" for n in finalists} | problems
        else:
            problems |= result["wrong"]
            left_out = {b: failed[b] for b in asked if b in failed}
            compared = {
                b: {**_BASELINE, **_facts(added[b]), "times": result["times_us"][b]} for b in asked if b in added
            }
            experts = [n for n, (m, _, _) in finalists.items() if m is expert]
            best = _fastest([n for n in experts if n not in problems], result["median_us"])
            if best:
                a = finalists[best][2]
                compared["expert"] = {
                    "version": f"quack-kernels {a.toolchain.get('quack-kernels')}",
                    "covers": a.covers,
                    "config": a.config_key,
                    # like with like: an expert whose partials are folded is compared with ours folded too
                    "times": result["times_us"][_total(best, result["times_us"])],
                }
            elif experts:
                left_out["expert"] = problems[experts[0]]
            for b, reason in left_out.items():
                self.progress(f"{task.name}: baseline {b} left out: {reason[:200]}")
            for name, (m, _, a) in finalists.items():
                if m is not expert and name not in problems:
                    row = self._row(task, shape, name, a, compared, left_out, result)
                    problem = self._implausible(row)
                    (problems if problem else rows)[name] = problem or row
        for name, reason in problems.items():
            _reject(finalists[name], shape, reason)
        for m in {id(m): m for m, _, _ in finalists.values()}.values():
            own = {n: rows[n] for n in rows if finalists[n][0] is m}
            if own:
                best = min(own, key=lambda n: own[n]["total_us"])
                m.rows.append({**own[best], "finalists": {r["config"]: r["total_us"] for r in own.values()}})

    def _implausible(self, row: dict) -> str:
        """Why a time is not believed, or an empty string."""
        if row["share_of_floor"] > IMPOSSIBLE:
            return f"{row['kernel_us']:.1f} us is below the floor of {row['floor_us']:.1f} us: quarantined"
        low, high = CLOCKS_AGREE
        if not low <= row["wall_over_events"] <= high:
            return f"wall clock and CUDA events disagree by a factor of {row['wall_over_events']:.2f}: quarantined"
        return ""

    def _row(
        self, task: Task, shape, name: str, artefact: Artefact, compared: dict, left_out: dict, result: dict
    ) -> dict:
        """What one configuration took, beside everything it is compared with."""
        times, total = result["times_us"], _total(name, result["times_us"])
        act = ACT_DTYPES[artefact.act]
        moved = traffic(task.kinds, task.torch_dtypes(act), act, *shape)
        floor_us = moved.floor_us(self.ceilings["matmul_flops"], self.ceilings["copy_bytes"])
        kernel_us = statistics.median(times[name])
        ratios = {b: ratio(c["times"], times[total]) for b, c in compared.items()}
        samples = {"kernel": times[name], "total": times[total], **{b: c["times"] for b, c in compared.items()}}
        return {
            "task": task.name,
            "shape": list(shape),
            "act": "bf16",
            "config": artefact.config_key,
            "object_sha256": artefact.object_sha256,
            "flops": moved.flops,
            "bytes": moved.bytes,
            "kernel_us": kernel_us,
            "total_us": statistics.median(times[total]),
            "finish_us": statistics.median(t - k for t, k in zip(times[total], times[name], strict=True)),
            "iqr_us": _iqr(times[name]),
            "gemm_us": statistics.median(times["gemm"]),
            "tax_us": statistics.median(k - g for k, g in zip(times[name], times["gemm"], strict=True)),
            "floor_us": floor_us,
            "share_of_floor": floor_us / kernel_us,
            "baselines": {
                b: {"us": statistics.median(c["times"]), **{f: c[f] for f in _BASELINE}} for b, c in compared.items()
            },
            "left_out": left_out,
            "ratios": ratios,
            "wins": {n: r["low"] > MIN_EFFECT for n, r in ratios.items()},
            "wall_over_events": result["wall_over_events"][name],
            "rounds": len(times[name]),
            "samples_us": {n: [float(f"{t:.4g}") for t in ts] for n, ts in samples.items()},
            "session": self.id,
            "receipt": result["receipt"],
        }


# what a row says of a baseline beside its time; ``covers``: the outputs it computes, None for all
_BASELINE = {"version": None, "covers": None, "config": None}


def _facts(answer: dict) -> dict:
    """What the worker said of a baseline that it added."""
    return {f: answer[f] for f in _BASELINE if f in answer}


def _total(name: str, timed: dict) -> str:
    """The subject that includes folding the partial reductions of ``name``, where it has any."""
    return f"{name}+finish" if f"{name}+finish" in timed else name


def _fastest(names: list[str], medians: dict[str, float]) -> str | None:
    return min(names, key=lambda n: medians[_total(n, medians)], default=None)


def _reject(subject: tuple[Measurement, str, Artefact], shape, reason: str) -> None:
    m, _, a = subject
    m.rejected.append({"config": a.config_key, "shape": list(shape), "reason": reason})


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
