"""The peak memory of the present process, without what the process that started it had. Standard library only."""

from __future__ import annotations

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_mb() -> float:
    """The most memory this process has held, in MB; 0 where the system does not tell."""
    if _STATUS.exists():
        return _status_mb("VmHWM")  # not ru_maxrss: on Linux that starts at the parent's size
    try:
        import resource
    except ImportError:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def new_peak() -> float | None:
    """Begin a new peak of this process; MB held now. None where the system cannot (only Linux can)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_mb("VmRSS")


def _status_mb(field: str) -> float:
    line = next(line for line in _STATUS.read_text("ascii").splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024 / 1e6
