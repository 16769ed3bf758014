"""The report as a picture: the right words, a picture of the right size, and no report that breaks it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reports import reports

pytest.importorskip("PIL", reason="Pillow is not installed")

from fold.errors import MossError
from fold.report.chart import COLOURS, render_chart
from fold.report.report import SCHEMA
from fold.report.words import bars_of, counts, fact, show_bits, show_peak
from fold.scaling.factors import factor_text


def block(name: str, peak: float | None, **rest: Any) -> dict[str, Any]:
    zeros = {"over": 0, "saturated": 0, "clamped": 0, "non_finite": 0}
    return {"name": name, "max_abs": peak, "level": "ok"} | zeros | rest


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
        "outcome": "ok",
        "verdict": {"key": "verdict_ok", "values": {}, "text": "OK: the image is not affected by fp16"},
        "remedy": None,
        "messages": [],
    } | rest


def has_colour(picture: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((np.abs(picture.astype(int) - np.array(colour)).max(axis=-1) < 4).sum() > 20)


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (512, 512), (200, 200), (333, 901)])
def test_picture_has_the_size_asked_for(width: int, height: int) -> None:
    picture = render_chart(report(), width, height)
    assert picture.shape == (height, width, 3)
    assert picture.dtype == np.uint8
    assert has_colour(picture, COLOURS["ok"])


def test_levels_are_told_by_colour() -> None:
    levels = ("ok", "low", "saturated", "not_finite")
    for left_out in levels:
        blocks = [block(f"layer.{i}", 100.0, level=one) for i, one in enumerate(levels) if one != left_out]
        picture = render_chart(report(*blocks, outcome="unknown"))
        shown = {level for level in levels if has_colour(picture, COLOURS[level])}
        assert shown == {*levels} - {left_out} | {"not_finite"}  # the limit's line has that colour too


@pytest.mark.parametrize("name", sorted(reports()))
def test_every_kind_of_report_is_drawn(name: str) -> None:
    assert render_chart(reports()[name].to_json()).shape == (720, 1280, 3)


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
    render_chart(report(rescues=[junk], messages=[junk], factors={"c": junk, "s_attn": [junk]}), 240, 200)


@pytest.mark.parametrize("given", [{}, {"blocks": None}, {"blocks": "abc"}, [], None, 5])
def test_what_is_no_report_is_refused_in_a_sentence(given: Any) -> None:
    with pytest.raises(MossError, match=r"needs a saturation report.*\.$"):
        render_chart(given)


@pytest.mark.parametrize(("width", "height"), [(0, 100), (100, 720), (99999, 720), (-1, -1)])
def test_sizes_that_make_no_sense(width: int, height: int) -> None:
    with pytest.raises(MossError, match="pixels a side"):
        render_chart(report(), width, height)


def test_a_report_without_levels_shows_none() -> None:
    given = report(blocks=[{"name": "layer.0", "max_abs": 5.0}, {"max_abs": 5.0, "level": "no_such"}])
    assert [bar.level for bar in bars_of(given)] == ["none", "none"]
    assert fact(given, bars_of(given)) == "largest value 5 in layer.0, margin 13.7 bits"
    assert counts(given) == "no value saturated, none NaN/inf"


def test_peaks_bits_and_factors_are_shown_as_people_write_them() -> None:
    assert [show_peak(v) for v in (31234.0, 812.4, 12.34, 0.0123, 1e-5)] == ["3.1e4", "812", "12", "0.012", "1.0e-5"]
    assert [show_bits(v) for v in (4.07, 1.0, 0.96, 0.079, 0.0007)] == ["4.1", "1.0", "0.96", "0.08", "0.0007"]
    assert [factor_text(v) for v in (0.0625, 1.0, 2.0, 0.3)] == ["1/16", "1", "2", "0.3"]
