"""`python tests/tools/pictures.py`: the pictures in docs/ and beside the templates, from the browser tests' artifacts.

Run tests/web first. Needs Pillow. Each picture is reduced to a palette, so that the repository stays small.
"""

from __future__ import annotations

import sys

from PIL import Image, ImageDraw, ImageFont
from repo import ROOT

ARTIFACTS = ROOT / "tests" / "web" / "artifacts"
DOCS, EXAMPLES = ROOT / "docs", ROOT / "example_workflows"
COLOURS = 144
SIDE = 640
GROUND, INK = "#17181b", "#f0f0f0"

#: picture in docs/ -> artifact, and the box of it that is shown (left, top, right, bottom) or None for all
PICTURES: dict[str, tuple[str, tuple[int, int, int, int] | None]] = {
    "screenshots/overflow.png": ("S3-after", None),
    "screenshots/in-range.png": ("R2-after", None),
    "screenshots/overflow-light.png": ("S3-after-light", None),
    "screenshots/in-range-light.png": ("R2-after-light", None),
    "panel/subgraph.png": ("S1-after-classic-MossFP16Report", None),
    "panel/subgraph-next.png": ("S1-after-classic-next-workflow", (500, 150, 1050, 800)),
    "panel/toast.png": ("S2-after", (690, 60, 1540, 900)),
    "panel/first-lines.png": ("S3-after", None),
    "panel/interrupted.png": ("S4-after-classic", None),
    "panel/failed.png": ("S5-after", None),
    "panel/chinese.png": ("S6-after-broken", None),
    "panel/outcome.png": ("R2-after-rescued", None),
    "panel/colour-blind.png": ("classic-dark-deuteranopia", None),
}


def read(name: str) -> Image.Image:
    """An artifact as RGB. Raises SystemExit where the tests have not made it."""
    path = ARTIFACTS / f"{name}.png"
    if not path.is_file():
        raise SystemExit(f"{path} is missing: run tests/web first.")
    return Image.open(path).convert("RGB")


def small(picture: Image.Image) -> Image.Image:
    """With a palette: a third of the bytes, and no difference to be seen on a panel."""
    return picture.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)


def fitted(picture: Image.Image, width: int, height: int) -> Image.Image:
    """The picture at the largest size that fits."""
    share = min(width / picture.width, height / picture.height)
    return picture.resize((round(picture.width * share), round(picture.height * share)), Image.Resampling.LANCZOS)


def card(rows: list[tuple[str, Image.Image]]) -> Image.Image:
    """A square of captioned pictures, one under the other."""
    square = Image.new("RGB", (SIDE, SIDE), GROUND)
    draw, font = ImageDraw.Draw(square), ImageFont.load_default(size=26)
    height = SIDE // len(rows)
    for index, (caption, picture) in enumerate(rows):
        top = index * height
        # on the right: the page puts a label of its own on the left
        draw.text((SIDE - 20, top + 8), caption, fill=INK, font=font, anchor="ra")
        shown = fitted(picture, SIDE - 24, height - 52)
        square.paste(shown, ((SIDE - shown.width) // 2, top + 46))
    return square


def main() -> int:
    """Write all of them; 0 when done."""
    for target, (name, box) in PICTURES.items():
        path = DOCS / target
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = read(name)
        small(picture.crop(box) if box else picture).save(path, optimize=True)
    cards = {
        "MOSS-Image fp16 - text to image": [
            ("fix = none", read("S3-after-wide")),
            ("fix = auto", read("R2-after-wide")),
        ],
        "MOSS-Image fp16 - without text encoder": [
            ("saved conditioning", read("template-without-text-encoder").crop((470, 175, 1245, 505))),
            ("fix = auto", read("R2-after-wide")),
        ],
    }
    for name, rows in cards.items():
        card(rows).save(EXAMPLES / f"{name}.jpg", quality=82, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
