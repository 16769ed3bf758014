"""A comparison as a picture: each step's relative L2 on a log10 axis, the overall one in the title."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MossError
from ..report.chart import COLOURS, GRID, INK, MUTED, PAPER, draw_text, fit_text

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.ImageDraw import ImageDraw

FLOOR = -9  # log10: fp32's own rounding is above it, so an exact 0 stands on the axis


def render_comparison(found: Mapping[str, Any], width: int = 1280, height: int = 640) -> NDArray[np.uint8]:
    """Draw a `moss_fp16.compare/1` dict. Returns uint8 RGB [height, width, 3]. Raises MossError without Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise MossError("Drawing the chart needs Pillow, which is not installed: pip install pillow.") from error
    picture = Image.new("RGB", (2 * width, 2 * height), PAPER)
    _draw(ImageDraw.Draw(picture), found, 2.0 * width, 2.0 * height)
    return np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS), dtype=np.uint8)


def _draw(pen: ImageDraw, found: Mapping[str, Any], width: float, height: float) -> None:
    unit = width / 1280
    left, right, top, bottom = 84 * unit, width - 28 * unit, 128 * unit, height - 70 * unit
    overall = found["overall"]["guided"] or found["overall"]["cond"]
    words, size = fit_text(pen, _title(found, overall), 30 * unit, right - left)
    draw_text(pen, (28 * unit, 26 * unit), words, size)
    draw_text(pen, (28 * unit, 70 * unit), _subtitle(found, overall), 17 * unit, MUTED)
    draw_text(pen, (28 * unit, top - 10 * unit), "relative L2 of the velocity, log10", 14 * unit, MUTED, "lb")

    def y(log10: float) -> float:
        return bottom - (min(max(log10, FLOOR), 0.0) - FLOOR) / -FLOOR * (bottom - top)

    for tick in range(FLOOR, 1):
        pen.line([(left, y(tick)), (right, y(tick))], fill=GRID, width=max(1, round(unit)))
        draw_text(pen, (left - 8 * unit, y(tick)), f"1e{tick}", 13 * unit, MUTED, "rm")
    steps = found["steps"]
    slot = (right - left) / max(1, len(steps))
    for index, step in enumerate(steps):
        value = (step["guided"] or step["cond"])["relative_l2"]
        level = 0.0 if value is None else math.log10(value) if value > 0 else FLOOR
        colour = COLOURS["not_finite"] if value is None else COLOURS["ok"]
        x = left + index * slot
        pen.rectangle([x + 0.15 * slot, min(y(level), bottom - unit), x + 0.85 * slot, bottom], fill=colour)
        if slot > 46 * unit:
            shown = "not finite" if value is None else f"{value:.1e}"
            draw_text(pen, (x + slot / 2, y(level) - 6 * unit), shown, 13 * unit, INK, "mb", halo=True)
            draw_text(pen, (x + slot / 2, bottom + 8 * unit), f"{step['sigma']:.3g}", 13 * unit, MUTED, "ma")
    draw_text(pen, ((left + right) / 2, bottom + 32 * unit), "sigma", 14 * unit, MUTED, "ma")


def _title(found: Mapping[str, Any], overall: Mapping[str, Any]) -> str:
    value = overall["relative_l2"]
    apart = "not finite" if value is None else "identical" if value == 0 else f"relative L2 {value:.2e}"
    return f"{_name(found['other'])} against {_name(found['reference'])}: {apart}"


def _name(info: Mapping[str, Any]) -> str:
    return str(info.get("name") or info.get("checkpoint") or "the other run")


def _subtitle(found: Mapping[str, Any], overall: Mapping[str, Any]) -> str:
    shown = {
        "mean |diff|": overall["model_output_mean_abs_diff"],
        "max |diff|": overall["model_output_max_abs_diff"],
        "rel max": overall["model_output_rel_max"],
    }
    parts = [f"{name} {'-' if value is None else format(value, '.2e')}" for name, value in shown.items()]
    scale = found["guidance_scale"]
    return " · ".join([*parts, f"guided, scale {scale:g}" if found["overall"]["guided"] else "unguided"])
