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

# SASS that a declared epilogue around quack's Hopper mainloop can contain; anything else (atomics, plain
# global loads, calls to other symbols, cache control, clocks) has no honest use and is rejected.
ALLOWED = frozenset(
    "BAR BRA BSSY BSYNC CCTL CS2R DEPBAR ELECT EXIT F2FP F2I FADD FENCE FFMA FMNMX FMUL FSEL FSETP HADD2 HFMA2 HMUL2"
    " HGMMA HSETP2 I2FP I2IP IADD3 IMAD ISETP LDC LDGDEPBAR LDGSTS LDL LDS LDSM LEA LOP3 MEMBAR MOV MUFU NANOSLEEP NOP"
    " P2R PLOP3 PRMT R2UR S2R S2UR SEL SHF SHFL STAS STG STL STS STSM SYNCS UCGABAR_ARV UCGABAR_WAIT UIADD3 UIMAD UISETP"
    " ULDC ULEA ULOP3 UMOV UPLOP3 UPRMT USEL USETMAXREG USHF UTMACCTL UTMACMDFLUSH UTMALDG UTMASTG VIADD VIADDMNMX VIMNMX"
    " WARPGROUP WARPSYNC FRND I2F I2I FCHK R2P IABS IMNMX FSET SGXT RET CALL VOTE VOTEU LEPC FLO POPC BREAK BMOV UFLO UP2UR"
    " UR2UP REDUX R2B B2R ISCADD UIADD3X".split()
)
SPECIAL_REGISTERS = frozenset({"SR_TID", "SR_CTAID", "SR_LANEID", "SR_SWINHI", "SR_CgaCtaId", "SR_CgaSize", "SRZ"})
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*)", re.M)


def foreign_instructions(sass: str) -> list[str]:
    """Instructions outside the allow-list, with the special register where that is the reason."""
    found = set()
    for opcode, operands in _INSTRUCTION.findall(sass):
        name = opcode.split(".")[0]
        if name not in ALLOWED or opcode.startswith("CALL.ABS"):
            found.add(opcode)
        for register in re.findall(r"\bSR_\w+", operands):
            if register not in SPECIAL_REGISTERS:
                found.add(f"{name} {register}")
    return sorted(found)


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
    opcodes = Counter(opcode.split(".")[0] for opcode, _ in _INSTRUCTION.findall(sass))
    mufu = Counter(m.group(1) for m in re.finditer(r"\bMUFU\.([A-Z0-9]+)", sass))
    return {
        "registers": registers,
        "stack_bytes": stack,
        "static_shared_bytes": shared,
        "local_bytes": local,
        "instructions": sum(opcodes.values()),
        "counts": {name: opcodes[name] for name in COUNTED if opcodes[name]},
        "mufu": dict(mufu),
        "foreign": foreign_instructions(sass),
    }


def spills(counts: dict[str, int]) -> int:
    """Instructions that move registers to and from local memory, of a kernel's ``counts``."""
    return counts.get("STL", 0) + counts.get("LDL", 0)


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
    spilled = spills(counts)
    parts = [
        f"{used['registers']} registers",
        f"{spilled} spill instructions, {used['stack_bytes']} B stack" if spilled else "no spills",
        f"{counts.get('HGMMA', 0)} HGMMA",
        f"{sum(used['mufu'].values())} MUFU",
    ]
    if shared_bytes:
        parts.insert(2, f"{shared_bytes / 1024:.0f} KiB shared memory")
    if used["foreign"]:
        reason = f"contains {', '.join(used['foreign'][:4])}, which no declared epilogue needs"
        return Verdict(stage="resources", passed=False, reason=reason, evidence=used)
    if not counts.get("HGMMA"):
        return Verdict(
            stage="resources", passed=False, reason="no wgmma instruction: the mainloop is missing", evidence=used
        )
    return Verdict(
        stage="resources", passed=True, reason=", ".join(parts), evidence=used, seconds=time.perf_counter() - start
    )
