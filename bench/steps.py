"""Rows of the model call inside ComfyUI: native path, counters, guard, managed path; and how they grow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .stats import Ratio, ratio
from .table import Row
from .work import model_file, worker

QUIET: dict[str, Any] = {"counters": False, "guard": "off", "self_check": False}
OFF, AGAIN, DEFAULT = "off", "off again", "online, counters, guard"
#: name -> (options, target on a CPU, target on a GPU, label)
VARIANTS: dict[str, tuple[dict[str, Any] | None, float | None, float | None, str]] = {
    AGAIN: (None, None, None, "fix off against fix off (the noise of this run)"),
    "online": ({"fix": "online", "engine": "native", **QUIET}, 1.005, 1.005, "online uniform, native path"),
    "counters": (
        {"fix": "online", "engine": "native", **QUIET, "counters": True},
        1.03, 1.02, "online + counters",
    ),
    DEFAULT: ({"fix": "online", "engine": "native"}, 1.04, 1.03, "online + counters + guard (nothing to rescue)"),
    "managed": (
        {"fix": "none", "engine": "managed", **QUIET},
        1.02, 1.02, "managed path, mode none, against the model's own forward",
    ),
    "fp32_residual": ({"fix": "fp32_residual", "engine": "managed", **QUIET}, 1.10, 1.06, "fp32_residual"),
    "clamp": (
        {"fix": "online", "engine": "managed", **QUIET, "clamp": True, "counters": True},
        1.05, 1.03, "clamp with counts (managed path)",
    ),
}  # fmt: skip


NOTES = {
    ("fp32_residual", "fp32"): "the stream is fp32 anyway: what is left is the managed path",
    ("fp32_residual", "fp16"): "a CPU's fp16 products are slow, so that the wider stream weighs less than on a GPU",
}


@dataclass(frozen=True)
class Shape:
    """One measured call. tokens: image tokens as (rows, columns)."""

    dim: int
    depth: int
    tokens: tuple[int, int]
    text: int
    batch: int = 1
    dtype: str = "fp32"

    @property
    def label(self) -> str:
        image = self.tokens[0] * self.tokens[1]
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        return f"D {self.dim}, {self.depth} blocks, {image} + {self.text} tokens{batch}, {self.dtype}"


@dataclass(frozen=True)
class Job:
    """One shape, the variants to compare with "off" on it, and how often."""

    shape: Shape
    names: tuple[str, ...]
    rounds: int

    def to_json(self, folder: Path) -> dict[str, Any]:
        """What the worker needs to know."""
        shape = self.shape
        return {
            "file": str(model_file(folder, shape.dim, shape.depth)),
            "dtype": shape.dtype,
            "tokens": shape.tokens,
            "text": shape.text,
            "batch": shape.batch,
            "rounds": self.rounds,
            # "off" is the first and the last of every round, so that a drift of the machine evens out
            "variants": {OFF: None} | {name: VARIANTS[name][0] for name in self.names} | {AGAIN: None},
        }


def measure(
    comfyui: Path, folder: Path, jobs: list[Job], *, cpu: bool = True
) -> tuple[list[dict[str, Ratio]], dict[str, Any]]:
    """Per job each variant over "off", all in one process; and what importing the pack cost in it."""
    answer = worker("steps", comfyui=str(comfyui), cpu=cpu, measurements=[job.to_json(folder) for job in jobs])
    return [ratios(job.names, seconds) for job, seconds in zip(jobs, answer["seconds"], strict=True)], answer["import"]


def ratios(names: tuple[str, ...], seconds: dict[str, list[float]]) -> dict[str, Ratio]:
    """Each variant over the mean of its round's two "off"; and these over each other."""
    base = [(first + last) / 2 for first, last in zip(seconds[OFF], seconds[AGAIN], strict=True)]
    return {AGAIN: ratio(seconds[AGAIN], seconds[OFF])} | {name: ratio(seconds[name], base) for name in names}


def rows(found: dict[str, Ratio], shape: Shape, *, gpu: bool = False) -> list[Row]:
    """Table rows with their targets."""
    out = []
    for name, value in found.items():
        _, on_cpu, on_gpu, label = VARIANTS[name]
        note = "" if gpu else NOTES.get((name, shape.dtype), "")
        out.append(Row.of(label, f"{'GPU' if gpu else 'CPU'}, {shape.dtype}", value, on_gpu if gpu else on_cpu, note))
    return out


def growth_shapes(full: bool) -> dict[str, list[tuple[int, Shape]]]:
    """What is varied -> (its value, the shape)."""
    sides = ((16, 16), (32, 32), (64, 64)) if full else ((16, 16), (32, 32))
    depths = (4, 14, 42) if full else (4, 12)
    batches = (1, 2, 4) if full else (1, 2)
    return {
        "image tokens": [(h * w, Shape(512, 2, (h, w), 64)) for h, w in sides],
        "blocks": [(depth, Shape(256, depth, (16, 16), 64)) for depth in depths],
        "batch": [(batch, Shape(512, 2, (16, 16), 64, batch)) for batch in batches],
    }


def growth(comfyui: Path, folder: Path, full: bool) -> list[dict[str, Any]]:
    """The default settings' cost over "off" along each axis."""
    plan = [(axis, at, shape) for axis, shapes in growth_shapes(full).items() for at, shape in shapes]
    # a small call is over quickly and noisier, so it is repeated more often
    jobs = [Job(shape, (DEFAULT,), (21 if full else 9) if at < 1024 else (11 if full else 7)) for _, at, shape in plan]
    found, _ = measure(comfyui, folder, jobs)
    return [
        {"axis": axis, "at": at, "shape": shape.label, "ratio": one[DEFAULT].value, "low": one[DEFAULT].low,
         "high": one[DEFAULT].high, "pairs": one[DEFAULT].pairs}
        for (axis, at, shape), one in zip(plan, found, strict=True)
    ]  # fmt: skip
