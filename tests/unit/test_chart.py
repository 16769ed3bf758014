"""The report as a picture: the right words, a picture of the right size, and no report that breaks it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="Pillow is not installed")

from fold.errors import MossError
from fold.report.chart import COLOURS, render_chart, save_png
from fold.report.counters import BlockStats
from fold.report.report import SCHEMA, Report
from fold.report.words import bars_of, nearest, notes, show_bits, show_factor, show_peak, subtitle, title


def block(name: str, peak: float | None, **rest: Any) -> dict[str, Any]:
    return {"name": name, "max_abs": peak, "over": 0, "saturated": 0, "clamped": 0, "non_finite": 0} | rest


def report(*blocks: dict[str, Any], **rest: Any) -> dict[str, Any]:
    default = (block("text.0", 56.0), block("layer.0", 640.0), block("layer.1", 3904.0))
    return {
        "schema": SCHEMA,
        "mode": "online",
        "engine": "native",
        "compute_dtype": "fp16",
        "stream_dtype": "fp16",
        "factors": {"c": 0.0625, "s_attn": 1.0, "s_ffn": [0.5, 0.25]},
        "blocks": list(blocks or default),
        "rescues": [],
        "warnings": [],
    } | rest


def has_colour(picture: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((np.abs(picture.astype(int) - np.array(colour)).max(axis=-1) < 4).sum() > 20)


def said(given: dict[str, Any]) -> str:
    return title(given, bars_of(given))


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (512, 512), (200, 200), (333, 901)])
def test_picture_has_the_size_asked_for(width: int, height: int) -> None:
    picture = render_chart(report(), width, height)
    assert picture.shape == (height, width, 3)
    assert picture.dtype == np.uint8
    assert has_colour(picture, COLOURS["ok"])


def test_title_names_mode_block_peak_and_headroom() -> None:
    assert said(report()) == "online: layer.1 peaks 3904, 4.1 bits of headroom"
    assert said(report(block("layer.0", None))) == "online: layer.0 overflowed, values are not finite"
    assert said(report(block("layer.0", 65504.0))) == "online: layer.0 peaks 6.6e4, no headroom: at the fp16 maximum"
    assert said(report(blocks=[])) == "online: no peaks were measured"
    wide = report(block("layer.0", 131008.0), mode="fp32_residual", stream_dtype="fp32")
    assert said(wide) == "fp32_residual: layer.0 peaks 1.3e5, stream is fp32, 1.0 bits above the fp16 maximum"


def test_subtitle_and_notes() -> None:
    given = report(
        block("layer.0", 9.0, clamped=3, saturated=2),
        rescues=[{"step": 4, "sigma": 0.5, "rung": "c 1/32", "reason": "saturated"}],
        warnings=["one\nline"],
    )
    setup, counts = "native, fp16, c 1/16, s_ffn 1/4 to 1/2", "saturated 2, clamped 3, non-finite 0, rescued 1"
    assert subtitle(given).replace("  ·  ", ", ") == f"{setup}, {counts}"
    assert notes(given) == ["Rescued at step 4 with c 1/32 (saturated)", "one line"]


def test_levels_are_told_by_colour() -> None:
    peaks = {"ok": 100.0, "close": 20000.0, "tight": 50000.0, "over": 65504.0}
    given = report(*(block(f"layer.{i}", peak) for i, peak in enumerate(peaks.values())))
    assert [bar.level for bar in bars_of(given)] == list(peaks)
    picture = render_chart(given)
    assert all(has_colour(picture, COLOURS[level]) for level in peaks)  # type: ignore[index]


def test_a_report_of_ours_is_drawn() -> None:
    stats = [BlockStats("text.0", 12.0, 0, 0, 0, 0), BlockStats("layer.0", math.inf, 1, 0, 0, 5)]
    ours = Report("7", "none", "builtin", "fp16", "fp16", {"c": 1.0}, stats).to_json()
    assert nearest(bars_of(ours)).name == "layer.0"  # type: ignore[union-attr]
    assert render_chart(ours).shape == (720, 1280, 3)


@pytest.mark.parametrize("blocks", [0, 1, 200, 5000])
def test_any_number_of_blocks(blocks: int) -> None:
    many = [block(f"layer.{i}", float(i)) for i in range(blocks)]
    assert render_chart(report(blocks=many), 640, 360).shape == (360, 640, 3)


JUNK = [None, float("nan"), float("inf"), -3.0, 1e300, 1e-300, "", "<b>", "x" * 5000, True, [], [None], {}, "Ω漢"]


@pytest.mark.parametrize("junk", JUNK, ids=lambda value: repr(value)[:12])
def test_odd_values_in_any_field_are_drawn(junk: Any) -> None:
    for field in report():
        if field != "blocks":
            render_chart(report(**{field: junk}), 240, 200)
    for field in block("layer.0", 1.0):
        render_chart(report(block("layer.0", 5.0) | {field: junk}), 240, 200)
    render_chart(report(blocks=[junk, {"name": junk, "max_abs": junk}]), 240, 200)
    render_chart(report(rescues=[junk], warnings=[junk], factors={"c": junk, "s_attn": [junk]}), 240, 200)


@pytest.mark.parametrize("given", [{}, {"blocks": None}, {"blocks": "abc"}, [], None, 5])
def test_what_is_no_report_is_refused_in_a_sentence(given: Any) -> None:
    with pytest.raises(MossError, match=r"needs a saturation report.*\.$"):
        render_chart(given)


@pytest.mark.parametrize(("width", "height"), [(0, 100), (100, 720), (99999, 720), (-1, -1)])
def test_sizes_that_make_no_sense(width: int, height: int) -> None:
    with pytest.raises(MossError, match="pixels a side"):
        render_chart(report(), width, height)


def test_png(tmp_path: Path) -> None:
    save_png(report(), tmp_path / "chart.png", 320, 240)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_in_words() -> None:
    assert [show_peak(v) for v in (31234.0, 812.4, 12.34, 0.0123, 1e-5)] == ["3.1e4", "812", "12", "0.012", "1.0e-5"]
    assert [show_bits(v) for v in (4.07, 1.0, 0.96, 0.079, 0.0007)] == ["4.1", "1.0", "0.96", "0.08", "0.0007"]
    assert [show_factor(v) for v in (0.0625, 1.0, 2.0, 0.3)] == ["1/16", "1", "2", "0.3"]
