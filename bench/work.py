"""Starting workers, and the model files that are measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fold.arch import MossArch
from fold.demo import demo_arch, write_demo

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.append(str(ROOT / "tests" / "tools"))
from repo import NO_COMFYUI, find_comfyui  # noqa: E402

__all__ = ["HERE", "NO_COMFYUI", "ROOT", "WorkerError", "find_comfyui", "miniature", "model_file", "worker"]
#: Below fp16's range and, folded with c = 1/16, below the counters' threshold, as the real model's stream is.
PEAK = 2.0**14


#: glibc keeps what was freed: otherwise a call's page faults, which depend on the call before, drown small differences.
QUIET_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
}


#: glibc takes memory for weights from the system anew for every load, as the first load of a process finds it. Kept
#: memory would leave both loaders little but the copying, or leave it to the load before whether it does.
FRESH_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


class WorkerError(RuntimeError):
    """A worker ended badly; the message ends with its last words."""


def worker(name: str, **job: Any) -> dict[str, Any]:
    """Run bench/workers/<name>.py on a job and return what it answered."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= FRESH_MALLOC if name == "loading" else QUIET_MALLOC
    done = subprocess.run(
        [sys.executable, str(HERE / "workers" / f"{name}.py"), json.dumps(job)],
        cwd=HERE, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise WorkerError(f"bench/workers/{name}.py ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def miniature(dim: int, depth: int) -> MossArch:
    """The real model's proportions: head width 128, ffn 8/3 of the width."""
    return demo_arch(dim, depth, max(1, dim // 128), text_dim=dim // 2)


def model_file(folder: Path, dim: int, depth: int) -> Path:
    """A miniature checkpoint in bf16, written once per folder."""
    target = folder / f"moss_{dim}_{depth}.safetensors"
    if not target.exists():
        write_demo(target, miniature(dim, depth), peak=PEAK)
    return target
