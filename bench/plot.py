"""The growth plot: the fix's cost over image tokens, blocks and batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, MARGIN, GAP = 900, 300, 52, 26
INK, GRID, LINE, BAND = "#24292f", "#d8dee4", "#0969da", "#54aeff"
TARGET = 1.04


def growth_plot(points: Sequence[dict[str, Any]], target: Path) -> None:
    """One panel per axis, the same height scale in all; bars are quartiles, the dashed line is the CPU's target."""
    axes = list(dict.fromkeys(point["axis"] for point in points))
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    low = min(0.98, min(point["low"] for point in points))
    high = max(1.06, max(point["high"] for point in points))
    panel = (WIDTH - MARGIN - GAP * len(axes)) / max(1, len(axes))
    for index, axis in enumerate(axes):
        left = MARGIN + index * (panel + GAP)
        box = (left, 34.0, left + panel, HEIGHT - 46.0)
        _panel(draw, box, [p for p in points if p["axis"] == axis], (low, high), labels=index == 0)
        draw.text((left + panel / 2, HEIGHT - 14), axis, fill=INK, font=_font(14), anchor="mm")
    title = "Step time with the fix (online, counters, guard) over without, CPU: median and quartiles"
    draw.text((MARGIN, 14), title, fill=INK, font=_font(14), anchor="lm")
    target.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(64).save(target, optimize=True)


def _panel(
    draw: ImageDraw.ImageDraw,
    box: tuple[float, float, float, float],
    points: list[dict[str, Any]],
    span: tuple[float, float],
    *,
    labels: bool,
) -> None:
    left, top, right, bottom = box

    def height(value: float) -> float:
        return bottom - (value - span[0]) / (span[1] - span[0]) * (bottom - top)

    for tick in _ticks(span):
        draw.line((left, height(tick), right, height(tick)), fill=GRID)
        if labels:
            draw.text((left - 8, height(tick)), f"{tick:.2f}", fill=INK, font=_font(12), anchor="rm")
    for start in range(round(left), round(right), 10):
        draw.line((start, height(TARGET), min(start + 5, right), height(TARGET)), fill="#cf222e")
    step = (right - left) / len(points)
    places = [(left + step * (i + 0.5), height(p["ratio"])) for i, p in enumerate(points)]
    draw.line(places, fill=LINE, width=2)
    for (x, y), point in zip(places, points, strict=True):
        draw.line((x, height(point["low"]), x, height(point["high"])), fill=BAND, width=6)
        draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=LINE)
        draw.text((x, bottom + 12), str(point["at"]), fill=INK, font=_font(12), anchor="mm")


def _ticks(span: tuple[float, float]) -> list[float]:
    """Every 0.02, or coarser where that would be a lattice."""
    step = next(s for s in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 10.0) if (span[1] - span[0]) / s <= 8 or s == 10.0)
    return [n * step for n in range(int(span[0] / step), int(span[1] / step) + 1) if n * step >= span[0]]


def _font(size: int) -> Any:
    return ImageFont.load_default(size)
