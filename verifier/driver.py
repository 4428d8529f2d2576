"""The NVIDIA driver of this machine, found without CUDA: with one too old for PyTorch, CUDA sees no device at all."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

MIN_DRIVER = 580  # CUDA 13 needs R580 or newer
KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def too_old(driver: str) -> bool:
    return int(driver.split(".")[0]) < MIN_DRIVER


def installed_driver() -> str | None:
    """Version of the driver, e.g. "580.65.06"; None where there is none."""
    return _from_nvml() or _from_kernel_module(KERNEL_MODULE)


def _from_nvml() -> str | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # comes with the driver; containers are given it, too
        text = ctypes.create_string_buffer(80)
        found = nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0
    except (OSError, AttributeError):
        return None
    return text.value.decode() if found else None


def _from_kernel_module(path: Path) -> str | None:
    try:
        found = re.search(r"Kernel Module\D*?(?:for \S+)?\s+(\d+(?:\.\d+)+)", path.read_text())
    except OSError:
        return None
    return found[1] if found else None


def why_no_device(driver: str | None) -> str:
    """What to tell somebody to whom CUDA shows no device."""
    if driver is None:
        return "no CUDA device is visible to PyTorch, and no NVIDIA driver is loaded"
    if too_old(driver):
        return f"the NVIDIA driver {driver} is too old; update it to {MIN_DRIVER} or newer"
    return f"no CUDA device is visible to PyTorch, though the NVIDIA driver {driver} is loaded"
