"""Print how long the GPU-free half takes on this machine, and how much memory it uses.

    python benchmarks/check_speed.py [--quick]

Cold: ``coda-agent generate`` in a new process for one task and for the whole suite.
Warm: one candidate checked by a worker that is already running. Memory is the
proportional set size summed over the process tree, sampled five times a second.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"all": 480.0, "single": 60.0, "warm": 8.0, "memory_gb": 6.0}


def tree_pss(pid: int) -> int:
    """Bytes of proportional set size of ``pid`` and its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
                parents.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(int(entry))
            except OSError:
                continue
    total, todo = 0, [pid]
    while todo:
        current = todo.pop()
        todo += parents.get(current, [])
        try:
            for line in Path(f"/proc/{current}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


def timed(*arguments: str) -> tuple[float, int, dict]:
    """Seconds, peak bytes and JSON output of one ``coda-agent`` command with a private library."""
    with tempfile.TemporaryDirectory() as tmp:
        command = [sys.executable, "-m", "agent.cli", *arguments, "--library", f"{tmp}/lib", "--runs", f"{tmp}/runs", "--json"]
        start = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        peak = 0

        def sample() -> None:
            nonlocal peak
            while process.poll() is None:
                peak = max(peak, tree_pss(process.pid))
                time.sleep(0.2)

        watcher = threading.Thread(target=sample)
        watcher.start()
        output = process.communicate()[0]
        watcher.join()
        return time.monotonic() - start, peak, json.loads(output)


def warm_check() -> float:
    """Seconds of the second check of one candidate by the same worker."""
    from agent.composer import compose
    from reference_kernels.tasks import load_suite
    from verifier.check import check
    from verifier.pool import Pool

    task = load_suite()["gemm_residual_rmsnorm"]
    with Pool() as pool:
        for _ in range(2):
            report = check(compose(task), task, pool)
            assert report.passed, report.failure
    return report.seconds


def main() -> int:
    sys.path.insert(0, str(ROOT))
    single, single_peak, one = timed("generate", "gemm_rmsnorm_swiglu", "--no-measure")
    rows = {"single task, cold": (single, LIMITS["single"]), "one candidate, warm": (warm_check(), LIMITS["warm"])}
    peak = single_peak
    if "--quick" not in sys.argv:
        whole, whole_peak, result = timed("generate", "--all", "--no-measure")
        kept = sum(t["ending"] == "kept" for t in result["tasks"].values())
        rows[f"generate --all, cold ({kept} of {len(result['tasks'])} kept)"] = (whole, LIMITS["all"])
        peak = max(peak, whole_peak)
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    for name, (seconds, limit) in rows.items():
        print(f"{name:45s} {seconds:7.1f} s   (limit {limit:.0f} s)")
    print(f"{'peak memory':45s} {peak / 2**30:7.2f} GiB (limit {LIMITS['memory_gb']:.0f} GiB)")
    within = all(s <= limit for s, limit in rows.values()) and peak <= LIMITS["memory_gb"] * 2**30
    return 0 if within and one["tasks"]["gemm_rmsnorm_swiglu"]["ending"] == "kept" else 1


if __name__ == "__main__":
    sys.exit(main())
