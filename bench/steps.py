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


def measure(
    comfyui: Path, folder: Path, shape: Shape, names: list[str], rounds: int, *, cpu: bool = True
) -> tuple[dict[str, Ratio], dict[str, Any]]:
    """Each variant over "off", and what importing the pack cost in that process."""
    answer = worker(
        "steps",
        comfyui=str(comfyui),
        file=str(model_file(folder, shape.dim, shape.depth)),
        dtype=shape.dtype,
        tokens=shape.tokens,
        text=shape.text,
        batch=shape.batch,
        rounds=rounds,
        cpu=cpu,
        variants={OFF: None} | {name: VARIANTS[name][0] for name in names} | {AGAIN: None},
    )
    seconds = answer["seconds"]
    # "off" is the first and the last of every round: a machine that gets slower or faster in between evens out
    base = [(first + last) / 2 for first, last in zip(seconds[OFF], seconds[AGAIN], strict=True)]
    found = {AGAIN: ratio(seconds[AGAIN], seconds[OFF])}
    return found | {name: ratio(seconds[name], base) for name in names}, answer["import"]


def rows(found: dict[str, Ratio], shape: Shape, *, gpu: bool = False) -> list[Row]:
    """Table rows with their targets."""
    out = []
    for name, value in found.items():
        _, on_cpu, on_gpu, label = VARIANTS[name]
        out.append(Row.of(label, f"{'GPU' if gpu else 'CPU'}, {shape.dtype}", value, on_gpu if gpu else on_cpu))
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
    points = []
    for axis, shapes in growth_shapes(full).items():
        for value, shape in shapes:
            # a small call is over quickly and noisier, so it is repeated more often
            rounds = (25 if full else 8) if value < 1024 else (15 if full else 6)
            found, _ = measure(comfyui, folder, shape, [DEFAULT], rounds)
            one = found[DEFAULT]
            points.append({"axis": axis, "at": value, "shape": shape.label, "ratio": one.value, "low": one.low,
                           "high": one.high, "pairs": one.pairs})  # fmt: skip
    return points
