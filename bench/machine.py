"""The machine a table was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """CPU, cores, memory, system, versions and load, and the GPU where there is one."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def sentence(found: dict[str, Any]) -> str:
    """The same in one line."""
    gpu = found["gpu"] or "no GPU"
    memory = f", {found['memory_gib']} GiB" if found["memory_gib"] else ""
    return (
        f"{found['cpu']}, {found['cores']} cores ({found['cpu_capability']}){memory}; {gpu}; {found['system']}; "
        f"Python {found['python']}, torch {found['torch']}; load at the start {found['load']}"
    )


def cpu_name() -> str:
    """The CPU's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, ValueError, OSError):
        return None
