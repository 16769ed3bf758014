"""Rows of loading: the pack's loader against ComfyUI's, weights converted per call, and the pack's import."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import write_noise
from .stats import quartiles, ratio
from .table import Row
from .work import model_file, worker

HEAVY = ("matplotlib", "scipy", "pandas", "cv2", "transformers", "diffusers")
LOOK = "with a look at every weight for NaN, while it is in the cache"


def loader_rows(comfyui: Path, folder: Path, nbytes: int, rounds: int, imports: list[dict[str, Any]]) -> Iterator[Row]:
    """Time in turns in one process, and peak memory in a process per load, on a file of blocks of the real shapes."""
    file = folder / "load.safetensors"
    size = f"{write_noise(file, nbytes) / 1e9:.2f} GB of real blocks"
    for dtype in ("bf16", "fp16"):
        job = {"comfyui": str(comfyui), "file": str(file), "dtype": dtype}
        answer = worker("loading", **job, rounds=rounds)
        imports.append(answer["import"])
        seconds, where = answer["seconds"], f"CPU, {size}, bf16 file, {dtype} weights"
        ours = ratio(seconds["ours"], seconds["stock"])
        yield Row.of("Loader against the stock loader, time", where, ours, 1.02, LOOK)
        if dtype == "fp16":
            built = ratio(seconds["builtin"], seconds["stock"])
            yield Row.of("Loader with the built-in class against the stock loader, time", where, built, 1.02, LOOK)
            peak = [worker("loading", **job, only=only)["added"] for only in ("ours", "stock")]
            value = peak[0] / peak[1]
            note = f"{peak[0]:.0f} MB and {peak[1]:.0f} MB above the process before"
            what = "Loader against the stock loader, peak memory"
            yield Row(what, where, value, value, value, 1, 1.02, "x", note)
    file.unlink()


def cast_rows(comfyui: Path, folder: Path, dim: int, depth: int, rounds: int) -> Iterator[Row]:
    """What storing bf16 and computing in fp16 costs, and what the Loader's storing fp16 saves."""
    answer = worker("casts", comfyui=str(comfyui), file=str(model_file(folder, dim, depth)), dtype="fp16",
                    tokens=(16, 16), text=64, batch=1, rounds=rounds)  # fmt: skip
    where = f"CPU, fp16, D {dim}, {depth} blocks, 256 + 64 tokens"
    for what, key, target in (
        ("weights converted per call, Loader", "loader", 0.0),
        ("weights converted per call, Fix on a stock-loaded bf16 MODEL", "stock", None),
    ):
        value = answer["converted"][key]
        yield Row(what, where, value, value, value, 1, target, "MB", "counted, not timed")
    seconds = answer["seconds"]
    note = "the Loader avoids this; a CPU's slow fp16 products make it look small"
    yield Row.of("Fix on a stock-loaded bf16 MODEL computing in fp16, against the Loader", where,
                 ratio(seconds["stock"], seconds["loader"]), None, note)  # fmt: skip


def import_row(found: list[dict[str, Any]]) -> Row:
    """The pack's import, each time in a fresh process, after everything that ComfyUI's own start imports."""
    taken = [1e3 * one["seconds"] for one in found]
    modules = sorted({name for one in found for name in one["modules"]})
    heavy = [name for name in modules if name in HEAVY]
    note = f"imports {', '.join(modules)}" if modules else "no module of others that ComfyUI had not imported"
    if heavy:
        note = f"**heavy: {', '.join(heavy)}**; {note}"
    low, high = quartiles(taken)
    return Row("importing the pack in ComfyUI's start", "CPU", statistics.median(taken), low, high, len(taken), 150.0,
               "ms", note)  # fmt: skip
