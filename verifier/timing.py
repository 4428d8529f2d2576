"""Timing on one GPU: CUDA-graph replay, interleaved, verified. Used inside the GPU worker.

Each subject (a kernel, the bare GEMM, torch.compile) is captured once as a graph of
calls that rotate through operand sets larger than L2. In every round each subject's
graph is replayed once, in random order, between two events. Times are medians over
rounds; ratios are medians of the per-round ratios, so drift of clocks cancels.
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from primitives.shapes import traffic
from reference_kernels.tasks import ACT_DTYPES, Task
from reference_kernels.truth import Truth, make_inputs, truth_of

from .driver import installed_driver
from .launch import Buffers, Kernel
from .numerics import judge_output

L2_FACTOR = 3  # operand sets together exceed this many times the L2 cache
MAX_SETS = 12
MIN_GRAPH_US = 1500.0  # one replay lasts at least this long, so events resolve it
CHECKED_SETS = 2  # how many sets' timed outputs are judged
WARMUP_SECONDS = 0.5
WALL_SECONDS = 0.05
MATMUL_SIZES = (4096, 6144, 8192)
COPY_BYTES = 2 << 30


def device_facts() -> dict:
    """Name, capability, driver and library versions of this GPU machine."""
    p = torch.cuda.get_device_properties(0)
    return {
        "device": p.name,
        "capability": f"{p.major}.{p.minor}",
        "sms": p.multi_processor_count,
        "l2_bytes": p.L2_cache_size,
        "memory_bytes": p.total_memory,
        # which card of its kind, without naming it: sessions on one card compare better than across cards
        "unit": hashlib.sha256(str(p.uuid).encode()).hexdigest()[:8],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": installed_driver(),
    }


def _nvml(what: str):
    """One reading through NVML, or None where it is not available."""
    try:
        import pynvml

        pynvml.nvmlInit()
        # by name: NVML counts every GPU of the machine, CUDA only those in CUDA_VISIBLE_DEVICES
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        return {
            "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "power_w": lambda: round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0, 1),
            "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "throttle": lambda: hex(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "processes": lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        }[what]()
    except Exception:  # telemetry is a receipt, never a reason to fail
        return None


def persisting_l2(limit: int | None = None) -> int | None:
    """Bytes of L2 that may be set aside for persisting accesses; ``limit`` sets it (0: off).

    None where the CUDA bindings are missing. A kernel has no host code to raise the
    limit; it is pinned to 0 so that nothing else in the process can either.
    """
    try:
        from cuda.bindings import runtime

        which = runtime.cudaLimit.cudaLimitPersistingL2CacheSize
        if limit is not None:
            runtime.cudaDeviceSetLimit(which, limit)
            runtime.cudaCtxResetPersistingL2Cache()
        return int(runtime.cudaDeviceGetLimit(which)[1])
    except Exception:
        return None


def telemetry() -> dict:
    """Clocks, power, temperature, throttle reasons, and how many processes compute on this GPU (this one counts)."""
    return {k: _nvml(k) for k in ("sm_clock_mhz", "power_w", "temperature_c", "throttle", "processes")}


def _graph(calls: list[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """Capture ``calls``, some of them several times, after running each once outside the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in dict.fromkeys(calls):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def ceilings() -> dict:
    """Measured rates that make the floor: bf16 matmul FLOP/s (random data) and copy bytes/s."""
    best_flops = 0.0
    for n in MATMUL_SIZES:
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
        graph = _graph([partial(torch.mm, a, b, out=out)])
        for _ in range(5):
            time.sleep(0.1)  # a short burst runs above the power cap's steady clock: the optimistic bound
            us = min(replay_us(graph) for _ in range(4))
            best_flops = max(best_flops, 2 * n**3 / (us * 1e-6))
    src = torch.empty(COPY_BYTES // 4, device="cuda", dtype=torch.float32).normal_()
    dst = torch.empty_like(src)
    copies = [_graph([lambda: torch.mul(src, 1.0, out=dst)]), _graph([lambda: dst.copy_(src)])]
    copy_us = min(replay_us(graph) for graph in copies for _ in range(10))
    return {
        "matmul_flops": best_flops,
        "copy_bytes": 2 * COPY_BYTES / (copy_us * 1e-6),
        "how": f"torch.mm bf16 {MATMUL_SIZES} cubed in short bursts; copy of {COPY_BYTES >> 30} GiB; best replay",
    }


def warm(graph: torch.cuda.CUDAGraph) -> None:
    """Run real load until clocks have settled (by time, not by count)."""
    end = time.monotonic() + WARMUP_SECONDS
    while time.monotonic() < end:
        graph.replay()
        torch.cuda.synchronize()


class CallPlan:
    """Which calls one replay makes: nobody who writes a kernel can know how many, or on which inputs first.

    Drawn once per benchmark: how long a replay lasts and how many passes are added, so that what a
    replay costs beside its calls weighs alike on all subjects. Drawn per subject: the order of the
    sets. It is the same in every pass, so that between two calls on a set all others were used.
    """

    def __init__(self, entropy: random.Random):
        self.entropy = entropy
        self.least_us = MIN_GRAPH_US * entropy.uniform(1.0, 2.0)
        self.extra = entropy.randint(0, 1)

    def __call__(self, calls: list, pass_us: float) -> list:
        """``calls`` (one per set, together ``pass_us`` microseconds) in a random order, several times over."""
        passes = math.ceil(self.least_us / pass_us) + self.extra
        return self.entropy.sample(calls, len(calls)) * passes


class Bench:
    """All subjects of one task at one shape, sharing inputs."""

    def __init__(self, task: Task, command: dict, reference_of: Callable):
        self.task, self.command = task, command
        self.shape, self.act = tuple(command["shape"]), command["act"]
        self.dtype = ACT_DTYPES[self.act]
        self.reference = reference_of(task, command.get("suite"))
        t = traffic(task.kinds, task.torch_dtypes(self.dtype), self.dtype, *self.shape)
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        count = min(MAX_SETS, max(2, math.ceil(L2_FACTOR * l2 / t.bytes)))
        self.sets = [make_inputs(task, self.shape, self.dtype, command["seed"] + i, "cuda") for i in range(count)]
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
        self.buffers: dict[str, list[Buffers]] = {}
        self.keep: list = []  # captured graphs use these tensors
        self.ways: dict[str, str] = {}  # of each baseline: the way that is timed
        self.truths: dict[int, Truth] = {}
        self.plan = CallPlan(random.SystemRandom())
        persisting_l2(0)
        self.facts = {"sets": count, "bytes": t.bytes, "flops": t.flops}

    def truth(self, i: int) -> Truth:
        """Truth of operand set ``i``, computed when it is first asked for."""
        if i not in self.truths:
            self.truths[i] = truth_of(self.task, self.reference, *self.sets[i], self.dtype)
        return self.truths[i]

    def capture(self, name: str, calls: list[Callable[[], None]]) -> None:
        """Capture enough passes over the sets (one call each) that one replay is long enough to time."""
        once = _graph(calls)
        once.replay()
        planned = self.plan(calls, replay_us(once))
        self.graphs[name] = (_graph(planned), len(planned))

    def _verify(self, buffers: Buffers, i: int) -> str:
        done = buffers.finished()
        for name in buffers.outputs:
            finding = judge_output(self.task, name, done[name], self.truth(i), False)
            if not finding.passed:
                return finding.reason
        return ""

    def add_kernel(self, subject: str, kernel: Kernel) -> dict:
        """Verify on the first set with poisoned outputs, then capture."""
        buffers = [Buffers(self.task, kernel.artefact, *s, guard="outputs") for s in self.sets]
        calls = [kernel.bind(b) for b in buffers]
        calls[0]()
        torch.cuda.synchronize()
        damage = next(filter(None, (b.damage() for b in buffers)), "")
        reason = damage or self._verify(buffers[0], 0)
        if reason:
            return {"passed": False, "reason": reason, "lost": bool(damage)}
        self.capture(subject, calls)
        self.buffers[subject] = buffers
        if buffers[0].has_partials:
            # the finaliser's own cost: the same calls followed by the fold of the partials
            finished = [(lambda c=c, b=b: (c(), self.keep.append(b.finished()))) for c, b in zip(calls, buffers)]
            self.capture(f"{subject}+finish", finished)
        return {"passed": True, "reason": ""}

    def run(self, rounds: int, only: list[str] | None = None) -> dict:
        """Interleaved timing of the captured subjects; verifies the timed outputs afterwards.

        Returns per subject the microseconds of one call in every round, and a receipt
        of clocks, power and temperature before and after.
        """
        names = [n for n in self.graphs if only is None or n.removesuffix("+finish") in only]
        order = random.SystemRandom()  # nobody who knows a seed knows the order
        warm(self.graphs[names[0]][0])
        before = telemetry()
        times: dict[str, list[float]] = {n: [] for n in names}
        for _ in range(rounds):
            order.shuffle(names)
            for name in names:
                graph, calls = self.graphs[name]
                times[name].append(replay_us(graph) / calls)
        after = telemetry()
        clocks = {name: self._second_clock(name, statistics.median(times[name])) for name in names}
        wrong = {}
        checked = order.sample(range(len(self.sets)), CHECKED_SETS)
        for name in names:
            if name in self.buffers:
                for b in self.buffers[name]:
                    b.poison()
                self.graphs[name][0].replay()
                torch.cuda.synchronize()
                for i in checked:
                    reason = self.buffers[name][i].damage() or self._verify(self.buffers[name][i], i)
                    if reason:
                        wrong[name] = f"timed output: {reason}"
        return {
            "times_us": times,
            "median_us": {n: statistics.median(v) for n, v in times.items()},
            "wrong": wrong,
            "wall_over_events": clocks,
            "receipt": {"before": before, "after": after, "persisting_l2_bytes": persisting_l2()},
        }

    def _second_clock(self, name: str, event_us: float) -> float:
        """Host wall clock over CUDA events for one long batch of replays: work hidden from events shows.

        The host is synchronised once per batch, so its own cost is a few microseconds in WALL_SECONDS.
        """
        graph, calls = self.graphs[name]
        replays = max(4, math.ceil(WALL_SECONDS * 1e6 / (event_us * calls)))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3 / start.elapsed_time(end)
