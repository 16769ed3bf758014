"""The peak memory of the present process, without what the process that started it had. Standard library only."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_mb() -> float:
    """The most memory this process has held, in MB; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if status.exists():
        # not ru_maxrss: on Linux that starts at the parent's size
        line = next(line for line in status.read_text("ascii").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    try:
        import resource
    except ImportError:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
