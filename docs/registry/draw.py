"""Draws icon.png and banner.png for the Comfy registry: the stream against fp16's limit, without the fix and with it.

python docs/registry/draw.py
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).resolve().parent
GROUND, LIMIT, OVER, FINE, TEXT = "#14181f", "#ff6b5e", "#ff6b5e", "#4ec9a5", "#e8ecf2"
# The shape of a run: the residual stream's peak, block by block, as a share of fp16's range in powers of two.
PEAKS = (0.42, 0.52, 0.64, 0.80, 1.08, 1.14, 1.10, 1.16, 1.12, 1.05, 0.94, 0.80)
FOLD = 0.25  # four powers of two of sixteen
SMOOTH = 4  # drawn this much larger, then reduced


def bars(draw: ImageDraw.ImageDraw, box: tuple[float, float, float, float], peaks: tuple[float, ...]) -> None:
    """One bar per block in `box` (left, top, right, bottom); the limit is where a bar of height 1 ends."""
    left, top, right, bottom = box
    limit = top + 0.2 * (bottom - top)
    step = (right - left) / len(peaks)
    for i, peak in enumerate(peaks):
        height = (bottom - limit) * peak
        x = left + i * step
        colour = OVER if peak > 1 else FINE
        draw.rounded_rectangle((x, bottom - height, x + 0.68 * step, bottom), radius=0.14 * step, fill=colour)
    draw.line((left - 0.5 * step, limit, right + 0.2 * step, limit), fill=LIMIT, width=max(1, round(0.09 * step)))


def folded(peaks: tuple[float, ...]) -> tuple[float, ...]:
    """The same run with the stream scaled by 1/16."""
    return tuple(peak - FOLD for peak in peaks)


def icon(size: int) -> Image.Image:
    """Square: the overflow on the left, the fixed run on the right."""
    side = size * SMOOTH
    image = Image.new("RGB", (side, side), GROUND)
    draw = ImageDraw.Draw(image)
    shown = PEAKS[3:6]
    bars(draw, (0.12 * side, 0.1 * side, 0.48 * side, 0.7 * side), shown)
    bars(draw, (0.56 * side, 0.1 * side, 0.92 * side, 0.7 * side), folded(shown))
    draw.text((side / 2, 0.84 * side), "fp16", TEXT, ImageFont.load_default(0.2 * side), anchor="mm")
    return image.resize((size, size), Image.Resampling.LANCZOS)


def banner(width: int, height: int) -> Image.Image:
    """Wide (21:9): what goes wrong, what the pack does, and its name."""
    w, h = width * SMOOTH, height * SMOOTH
    image = Image.new("RGB", (w, h), GROUND)
    draw = ImageDraw.Draw(image)
    small, large = ImageFont.load_default(0.065 * h), ImageFont.load_default(0.125 * h)
    draw.text((0.06 * w, 0.15 * h), "MOSS-Image in fp16", TEXT, large, anchor="lm")
    draw.text((0.06 * w, 0.27 * h), "in range on any card, and it shows", TEXT, small, anchor="lm")
    halves = (("fix off: overflow", 0.07, PEAKS), ("fix on: the stream x 1/16", 0.55, folded(PEAKS)))
    for title, x, peaks in halves:
        bars(draw, (x * w, 0.36 * h, (x + 0.38) * w, 0.83 * h), peaks)
        draw.text((x * w, 0.91 * h), title, TEXT, small, anchor="lm")
    return image.resize((width, height), Image.Resampling.LANCZOS)


def main() -> None:
    """Write both pictures, in few colours: the files stay small."""
    for name, picture in (("icon", icon(400)), ("banner", banner(1260, 540))):
        picture.quantize(64).save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
