"""The saturation report as a picture: one bar per block on a log2 axis under the fp16 maximum.

The gap between a bar and the line is that block's headroom in bits. The same picture as the page's panel, for
API runs, galleries and bug reports. Pillow is imported only when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MossError
from ..scaling.plan import FP16_MAX
from .words import Bar, Shown, bars_of, counts, fact, nearest, notes, setup, show_bits, title

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

Colour = tuple[int, int, int]

SMALLEST_SIDE, LARGEST_SIDE = 200, 8192

PAPER: Colour = (255, 255, 255)
INK: Colour = (28, 30, 34)
MUTED: Colour = (95, 100, 110)
GRID: Colour = (222, 225, 230)
DANGER: Colour = (252, 232, 233)
COLOURS: dict[Shown, Colour] = {
    "none": (170, 174, 180),
    "ok": (22, 138, 98),
    "low": (191, 138, 0),
    "saturated": (222, 98, 12),
    "not_finite": (200, 28, 46),
}
LEGEND: dict[Shown, str] = {
    "ok": "in range",
    "low": "in range, under 3 bits of margin",
    "saturated": "reached fp16's limit",
    "not_finite": "NaN or infinity",
}
#: The verdict's sign, by outcome.
SIGNS: dict[str, Shown] = {"ok": "ok", "rescued": "ok", "saturated": "saturated", "broken": "not_finite"}


def render_chart(report: Mapping[str, Any], width: int = 1280, height: int = 720) -> NDArray[np.uint8]:
    """Draw a `moss_fp16.report/1` dict. Returns uint8 RGB [height, width, 3].

    Raises MossError when `report` is not one, when the size is not sensible, or when Pillow is missing.
    """
    return np.asarray(_draw(report, width, height), dtype=np.uint8)


@dataclass(frozen=True)
class Frame:
    """The plot's place in pixels and its axis: powers of two from `low` to `high`."""

    left: float
    right: float
    top: float
    bottom: float
    low: float
    high: float
    unit: float  # one text pixel: everything scales with the picture's width

    def y(self, log2: float) -> float:
        share = min(1.0, max(0.0, (log2 - self.low) / (self.high - self.low)))
        return self.bottom - share * (self.bottom - self.top)


def _draw(report: Mapping[str, Any], width: int, height: int) -> Image:
    if not (SMALLEST_SIDE <= width <= LARGEST_SIDE and SMALLEST_SIDE <= height <= LARGEST_SIDE):
        sides = f"{SMALLEST_SIDE} to {LARGEST_SIDE}"
        raise MossError(f"A chart is {sides} pixels a side, but {width} x {height} was asked for.")
    bars = bars_of(report)
    try:
        from PIL import Image as images
        from PIL import ImageDraw as drawing
    except ImportError as error:
        raise MossError("Drawing the chart needs Pillow, which is not installed: pip install pillow.") from error
    # Drawn at twice the size and reduced: Pillow smooths letters, but not lines and hatches.
    size, (width, height) = (width, height), (2 * width, 2 * height)
    picture = images.new("RGB", (width, height), PAPER)
    pen = drawing.Draw(picture)
    frame = _frame(bars, width, height, len(notes(report)))
    _header(pen, frame, report, bars)
    _grid(pen, frame)
    places = _bars(pen, frame, bars)
    _limit(pen, frame)
    _footer(pen, frame, bars, places)
    _measure(pen, frame, bars, places)
    _legend(pen, frame, report, bars, height)
    return picture.resize(size, images.Resampling.LANCZOS)


def _frame(bars: Sequence[Bar], width: int, height: int, note_lines: int) -> Frame:
    unit = max(1.1, min(width / 1280, height / 640))
    logs = [math.log2(bar.peak) for bar in bars if 0 < bar.peak < math.inf]
    low = min(0.0, max(-24.0, math.floor(min(logs, default=0.0)) - 1.0)) if min(logs, default=0.0) < 0 else 0.0
    high = min(128.0, max(16.0, math.ceil(max(logs, default=0.0))))
    bottom = height - (98 + 22 * note_lines) * unit
    return Frame(84 * unit, width - 28 * unit, 128 * unit, max(bottom, 128 * unit + 80), low, high, unit)


def draw_text(
    pen: ImageDraw, at: tuple[float, float], words: str, size: float, colour: Colour = INK, anchor: str = "la",
    halo: bool = False,
) -> None:  # fmt: skip
    from PIL import ImageFont

    stroke = max(1, round(size / 8)) if halo else 0
    font = ImageFont.load_default(size=size)
    # The built-in font has Latin letters only, and Pillow's basic fallback refuses what it cannot encode.
    safe = "".join(c if c.isascii() or c in "·±" else "?" for c in words)
    pen.text(at, safe, fill=colour, font=font, anchor=anchor, stroke_width=stroke, stroke_fill=PAPER)


def fit_text(pen: ImageDraw, words: str, size: float, room: float) -> tuple[str, float]:
    """The words with the largest size up to `size` that fits into `room` pixels, cut where even 60 % of it does not."""
    from PIL import ImageFont

    length = pen.textlength(words, font=ImageFont.load_default(size=size))
    if length <= room:
        return words, size
    smaller = max(0.6 * size, size * room / length)
    while len(words) > 8 and pen.textlength(words, font=ImageFont.load_default(size=smaller)) > room:
        words = words[:-5].rstrip() + ".."
    return words, smaller


def _header(pen: ImageDraw, frame: Frame, report: Mapping[str, Any], bars: Sequence[Bar]) -> None:
    unit, room = frame.unit, frame.right - 28 * frame.unit
    words, size = fit_text(pen, title(report), 30 * unit, room)
    _mark(pen, SIGNS.get(str(report.get("outcome")), "none"), 34 * unit, 34 * unit, 9 * unit)
    draw_text(pen, (54 * unit, 16 * unit), words, size)
    words, size = fit_text(pen, fact(report, bars), 17 * unit, room)
    draw_text(pen, (28 * unit, 56 * unit), words, size)
    words, size = fit_text(pen, "  ·  ".join(filter(None, (setup(report), counts(report)))), 15 * unit, room)
    draw_text(pen, (28 * unit, 80 * unit), words, size, MUTED)


def _grid(pen: ImageDraw, frame: Frame) -> None:
    unit = frame.unit
    step = 2 if frame.high - frame.low <= 18 else 4 if frame.high - frame.low <= 40 else 16
    spacing = step * (frame.bottom - frame.top) / (frame.high - frame.low)
    while spacing < 16 * unit:
        step, spacing = step * 2, spacing * 2
    tick = math.ceil(frame.low / step) * step
    while tick <= frame.high:
        y = frame.y(tick)
        pen.line([(frame.left, y), (frame.right, y)], fill=GRID, width=max(1, round(unit)))
        draw_text(pen, (frame.left - 24 * unit, y), "2", 15 * unit, MUTED, "rm")
        draw_text(pen, (frame.left - 23 * unit, y - 5 * unit), str(int(tick)), 11 * unit, MUTED, "lm")
        tick += step
    words = "largest |x| in the stream after the block, log2"
    draw_text(pen, (28 * unit, frame.top - 12 * unit), words, 14 * unit, MUTED, "lb")


def _limit(pen: ImageDraw, frame: Frame) -> None:
    unit, y = frame.unit, frame.y(math.log2(FP16_MAX))
    dash = 9 * unit
    x, weight = frame.left, max(1, round(2 * unit))
    while x < frame.right:
        pen.line([(x, y), (min(x + 0.62 * dash, frame.right), y)], fill=COLOURS["not_finite"], width=weight)
        x += dash
    at = (frame.right - 4 * unit, y - 4 * unit)
    draw_text(pen, at, "fp16 maximum 65504", 15 * unit, COLOURS["not_finite"], "rb", halo=True)


def _bars(pen: ImageDraw, frame: Frame, bars: Sequence[Bar]) -> list[tuple[float, float]]:
    """Draw them; returns each bar's left and right edge."""
    pen.rectangle(
        [frame.left, frame.top - 8 * frame.unit, frame.right, frame.y(math.log2(FP16_MAX))], fill=DANGER
    )  # fmt: skip
    leading = sum(1 for bar in bars if bar.name.startswith("text"))
    gap = 0.8 if 0 < leading < len(bars) else 0.0
    band = (frame.right - frame.left) / max(1.0, len(bars) + gap)
    places = []
    for index, bar in enumerate(bars):
        left = frame.left + band * (index + (gap if index >= leading else 0.0))
        space = min(4 * frame.unit, 0.2 * band)
        edges = (left + space / 2, max(left + band - space / 2, left + space / 2 + 1))
        places.append(edges)
        _draw_bar(pen, frame, bar, edges)
    return places


def _draw_bar(pen: ImageDraw, frame: Frame, bar: Bar, edges: tuple[float, float]) -> None:
    left, right = edges
    top = frame.bottom
    if bar.peak == math.inf:
        top = frame.top - 8 * frame.unit
    elif bar.peak > 0:
        top = frame.y(math.log2(bar.peak))
    colour = COLOURS[bar.level]
    pen.rectangle([left, min(top, frame.bottom - 1), right, frame.bottom], fill=colour)
    if bar.level in ("saturated", "not_finite"):
        _hatch(pen, left, top, right, frame.bottom, 7 * frame.unit)
    if bar.level not in ("ok", "none"):
        _mark(pen, bar.level, (left + right) / 2, top - 7 * frame.unit, min(5.5 * frame.unit, (right - left) * 0.6))


def _hatch(pen: ImageDraw, left: float, top: float, right: float, bottom: float, step: float) -> None:
    """Light diagonal lines over a bar, so that it differs by more than its colour."""
    y = top
    while y < bottom + (right - left):
        start, end = max(0.0, y - bottom), min(right - left, y - top)
        pen.line([(left + start, y - start), (left + end, y - end)], fill=PAPER, width=2)
        y += max(4.0, step)


def _mark(pen: ImageDraw, level: Shown, x: float, y: float, r: float) -> None:
    """The level's sign, centred: a disc, a diamond, a triangle or a cross."""
    colour = COLOURS[level]
    match level:
        case "low":
            pen.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill=colour)
        case "saturated":
            pen.polygon([(x, y - r), (x + r, y + 0.8 * r), (x - r, y + 0.8 * r)], fill=colour)
        case "not_finite":
            weight = max(1, round(r / 2))
            pen.line([(x - r, y - r), (x + r, y + r)], fill=colour, width=weight)
            pen.line([(x - r, y + r), (x + r, y - r)], fill=colour, width=weight)
        case "ok":
            pen.ellipse([x - r, y - r, x + r, y + r], fill=colour)
        case _:
            pen.ellipse([x - r, y - r, x + r, y + r], outline=colour)


def _footer(pen: ImageDraw, frame: Frame, bars: Sequence[Bar], places: Sequence[tuple[float, float]]) -> None:
    """The blocks' names: the text blocks' together, the joint blocks' by number, as many as there is room for."""
    unit = frame.unit
    pen.line([(frame.left, frame.bottom), (frame.right, frame.bottom)], fill=MUTED, width=max(1, round(unit)))
    texts = sum(1 for bar in bars if bar.name.startswith("text"))
    if texts:
        draw_text(pen, (places[0][0], frame.bottom + 7 * unit), "text", 14 * unit, MUTED)
    rest = places[texts:]
    if rest:
        each = (rest[-1][1] - rest[0][0]) / len(rest)
        every = next((n for n in (1, 2, 5, 10, 20, 50, 100) if n * each >= 30 * unit), len(rest))
        for index in range(0, len(rest), every):
            middle = (rest[index][0] + rest[index][1]) / 2
            if texts and middle - places[0][0] < 42 * unit:
                continue
            draw_text(pen, (middle, frame.bottom + 7 * unit), str(index), 14 * unit, MUTED, "ma")
    middle = (frame.left + frame.right) / 2
    words = "block (text refiner, then joint layers)" if texts else "block"
    draw_text(pen, (middle, frame.bottom + 27 * unit), words, 14 * unit, MUTED, "ma")


def _measure(pen: ImageDraw, frame: Frame, bars: Sequence[Bar], places: Sequence[tuple[float, float]]) -> None:
    """From the highest bar up to the line, with the block's name and its bits."""
    worst = nearest(bars)
    if worst is None or not 0 < worst.peak < math.inf:
        return
    index = bars.index(worst)
    unit, x = frame.unit, sum(places[index]) / 2
    line = frame.y(math.log2(FP16_MAX))
    words, top = f"{worst.name}: {show_bits(worst.bits)} bits", frame.y(math.log2(worst.peak))
    if abs(top - line) > 5 * unit:
        weight = max(1, round(2 * unit))
        pen.line([(x, top), (x, line)], fill=INK, width=weight)
        for y in (top, line):
            pen.line([(x - 5 * unit, y), (x + 5 * unit, y)], fill=INK, width=weight)
    left_half = x < (frame.left + frame.right) / 2
    at = (x + 10 * unit if left_half else x - 10 * unit, max((top + line) / 2, line + 15 * unit))
    draw_text(pen, at, words, 19 * unit, INK, "lm" if left_half else "rm", halo=True)


def _legend(pen: ImageDraw, frame: Frame, report: Mapping[str, Any], bars: Sequence[Bar], height: int) -> None:
    unit, x = frame.unit, frame.left
    y = frame.bottom + 64 * unit
    present = {bar.level for bar in bars}
    for level, words in LEGEND.items():
        if level not in present:
            continue
        _mark(pen, level, x + 6 * unit, y, 5.5 * unit)
        draw_text(pen, (x + 18 * unit, y), words, 14 * unit, MUTED, "lm")
        x += (len(words) * 7.4 + 48) * unit
    for index, note in enumerate(notes(report)):
        words, size = fit_text(pen, note, 16 * unit, frame.right - frame.left)
        draw_text(pen, (frame.left, min(y + (16 + 22 * index) * unit, height - 20 * unit)), words, size, INK)
