"""How many threads this process may use: affinity and the cgroup's quota, whichever is less."""

import math
import os
from pathlib import Path
from typing import Final

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def available(quota_file: Path = _QUOTA) -> int:
    """Return the number of processors that this process may keep busy, at least 1."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = quota_file.read_text().split()
        if quota != "max":
            count = min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # No cgroup of version 2: affinity alone counts.
    return max(1, count)
