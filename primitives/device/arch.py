"""Pin the compile target to sm_90a; importable on a machine without a GPU.

Must be imported before cutlass or quack: both read the target when they load.
"""

from __future__ import annotations

import os
import sys

TARGET = "sm_90a"
SM_COUNT = 132  # H100 SXM and H200: CTAs resident at once for a persistent kernel with one CTA per SM

if "cutlass" in sys.modules and os.environ.get("CUTE_DSL_ARCH") != TARGET:
    raise ImportError(
        "cutlass was imported before primitives.device pinned the target; "
        f"set CUTE_DSL_ARCH={TARGET} QUACK_ARCH=90 in the environment or import primitives.device first"
    )
os.environ["CUTE_DSL_ARCH"] = TARGET
os.environ["QUACK_ARCH"] = "90"


def max_active_clusters(cluster_size: int) -> int:
    """Clusters that fit at once, without asking a driver (quack's own query needs one)."""
    return SM_COUNT // cluster_size
