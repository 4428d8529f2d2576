"""Resources stage: what the compiled kernel uses, read from its cubin without a GPU."""

from __future__ import annotations

import importlib.util
import re
import struct
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from .verdict import HarnessError, Verdict

CUDA_MACHINE = 190  # ELF e_machine of a cubin
# what a Hopper GEMM epilogue is judged by, as SASS mnemonics
COUNTED = ("HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "MUFU", "LDL", "STL", "BAR", "SHFL", "STG", "LDG", "FFMA", "FMUL", "FADD")


def cubin_of(object_file: Path) -> bytes:
    """The sm_90a ELF embedded in a host object file.

    Raises:
        ValueError: there is none.
    """
    data = object_file.read_bytes()
    at = data.find(b"\x7fELF", 1)
    while at >= 0:
        if len(data) - at > 64 and struct.unpack_from("<H", data, at + 18)[0] == CUDA_MACHINE:
            program_table, section_table = struct.unpack_from("<QQ", data, at + 32)
            _, program_size, programs, section_size, sections = struct.unpack_from("<HHHHH", data, at + 52)
            end = max(program_table + program_size * programs, section_table + section_size * sections)
            return data[at : at + end]
        at = data.find(b"\x7fELF", at + 1)
    raise ValueError("the object file holds no cubin")


def cuobjdump() -> Path:
    """The disassembler that ships inside Triton's wheel.

    Raises:
        HarnessError: Triton is missing.
    """
    spec = importlib.util.find_spec("triton")
    path = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    if path is None or not path.exists():
        raise HarnessError("cuobjdump not found; install it with: pip install triton")
    return path


def read_resources(object_file: Path) -> dict:
    """Registers, spills, shared memory and instruction counts of the kernel in ``object_file``."""
    with tempfile.TemporaryDirectory() as tmp:
        cubin = Path(tmp) / "k.cubin"
        cubin.write_bytes(cubin_of(object_file))
        usage = _dump("-res-usage", cubin)
        sass = _dump("-sass", cubin)
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if not match:
        raise HarnessError(f"cannot read the resource usage: {usage[-300:]}")
    registers, stack, shared, local = map(int, match.groups())
    opcodes = Counter(
        m.group(1).split(".")[0] for m in re.finditer(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", sass, re.M)
    )
    mufu = Counter(m.group(1) for m in re.finditer(r"\bMUFU\.([A-Z0-9]+)", sass))
    return {
        "registers": registers,
        "stack_bytes": stack,
        "static_shared_bytes": shared,
        "local_bytes": local,
        "instructions": sum(opcodes.values()),
        "counts": {name: opcodes[name] for name in COUNTED if opcodes[name]},
        "mufu": dict(mufu),
    }


def _dump(flag: str, cubin: Path) -> str:
    done = subprocess.run([cuobjdump(), flag, cubin], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise HarnessError(f"cuobjdump {flag} failed: {done.stderr[-300:]}")
    return done.stdout + done.stderr


def check_resources(object_file: Path, shared_bytes: int | None = None) -> Verdict:
    """Verdict on the compiled kernel: the tensor-core mainloop must be there, spills are told."""
    start = time.perf_counter()
    try:
        used = read_resources(object_file)
    except ValueError as e:
        return Verdict(stage="resources", passed=False, reason=str(e), seconds=time.perf_counter() - start)
    if shared_bytes:
        used["shared_bytes"] = shared_bytes
    counts = used["counts"]
    spilled = counts.get("STL", 0) + counts.get("LDL", 0)
    parts = [
        f"{used['registers']} registers",
        f"{spilled} spill instructions, {used['stack_bytes']} B stack" if spilled else "no spills",
        f"{counts.get('HGMMA', 0)} HGMMA",
        f"{sum(used['mufu'].values())} MUFU",
    ]
    if shared_bytes:
        parts.insert(2, f"{shared_bytes / 1024:.0f} KiB shared memory")
    if not counts.get("HGMMA"):
        return Verdict(
            stage="resources", passed=False, reason="no wgmma instruction: the mainloop is missing", evidence=used
        )
    return Verdict(
        stage="resources", passed=True, reason=", ".join(parts), evidence=used, seconds=time.perf_counter() - start
    )
