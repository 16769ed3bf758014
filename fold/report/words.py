"""What the chart says: a report's blocks with their levels, and the picture's title, subtitle and notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import MossError
from ..scaling.plan import FP16_MAX

Level = Literal["none", "ok", "wide", "close", "tight", "over"]

# Headroom in bits below which a block counts as close, and as tight. The page's panel uses the same.
CLOSE_BITS, TIGHT_BITS = 3.0, 1.0
WIDE_DTYPES = ("fp32", "float32", "bf16", "bfloat16")
MAX_BLOCKS = 1024


@dataclass(frozen=True)
class Bar:
    """One block as drawn: its peak (inf where something was not finite, nan where the report has none)."""

    name: str
    peak: float
    level: Level

    @property
    def bits(self) -> float:
        """log2(65504 / peak)."""
        return math.log2(FP16_MAX / self.peak) if 0 < self.peak < math.inf else math.nan


def bars_of(report: Mapping[str, Any]) -> list[Bar]:
    """The report's blocks, with what is missing or odd in them made plain. Raises MossError without a list of them."""
    blocks = report.get("blocks") if isinstance(report, Mapping) else None
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise MossError("The chart needs a saturation report, but this has no list `blocks`: pass the report's JSON.")
    limited = str(report.get("stream_dtype", "")) not in WIDE_DTYPES
    return [_bar(block, index, limited) for index, block in enumerate(blocks[:MAX_BLOCKS])]


def _bar(block: Any, index: int, limited: bool) -> Bar:
    source: Mapping[str, Any] = block if isinstance(block, Mapping) else {}
    peak = _number(source["max_abs"], math.inf) if "max_abs" in source else math.nan
    if (math.isnan(peak) and "max_abs" in source) or _count(source, "non_finite"):
        peak = math.inf
    return Bar(str(source.get("name", f"#{index}"))[:64], abs(peak), _level(abs(peak), source, limited))


def _level(peak: float, source: Mapping[str, Any], limited: bool) -> Level:
    if math.isnan(peak):
        return "none"
    if peak == math.inf:
        return "over"
    bits = math.log2(FP16_MAX / peak) if peak > 0 else math.inf
    if not limited:
        return "wide" if bits <= 0 else "ok"
    if bits <= 0 or _count(source, "saturated"):
        return "over"
    if bits >= CLOSE_BITS:
        return "ok"
    return "close" if bits >= TIGHT_BITS else "tight"


def _number(value: Any, missing: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else missing


def _count(source: Mapping[str, Any], field: str) -> int:
    value = _number(source.get(field), 0.0)
    return int(value) if math.isfinite(value) and value > 0 else 0


def title(report: Mapping[str, Any], bars: Sequence[Bar]) -> str:
    """For example "online: layer.22 peaks 3904, 4.1 bits of headroom": the mode, and the block nearest to overflow."""
    mode = _word(report, "mode")
    worst = nearest(bars)
    if worst is None:
        return f"{mode}: no peaks were measured"
    if worst.peak == math.inf:
        more = sum(bar.peak == math.inf for bar in bars) - 1
        return f"{mode}: {worst.name}{f' and {more} more' if more else ''} overflowed, values are not finite"
    if worst.peak == 0:
        return f"{mode}: every block's peak is 0"
    stream = str(report.get("stream_dtype", ""))
    text = f"{mode}: {worst.name} peaks {show_peak(worst.peak)}"
    if stream in WIDE_DTYPES:
        side = "above" if worst.bits <= 0 else "under"
        return f"{text}, stream is {stream}, {show_bits(abs(worst.bits))} bits {side} the fp16 maximum"
    if worst.bits <= 0:
        return f"{text}, no headroom: at the fp16 maximum"
    return f"{text}, {show_bits(worst.bits)} bits of headroom"


def nearest(bars: Sequence[Bar]) -> Bar | None:
    """The bar nearest to overflow, or None when none has a peak."""
    return max((bar for bar in bars if not math.isnan(bar.peak)), key=lambda bar: bar.peak, default=None)


def subtitle(report: Mapping[str, Any]) -> str:
    """Engine, dtype, factors and the four counts."""
    raw = report.get("blocks")
    blocks = [b for b in raw if isinstance(b, Mapping)] if isinstance(raw, Sequence) else []
    totals = [
        f"{name} {sum(_count(b, field) for b in blocks)}"
        for name, field in (("saturated", "saturated"), ("clamped", "clamped"), ("non-finite", "non_finite"))
    ]
    rescues = report.get("rescues")
    totals.append(f"rescued {len(rescues) if isinstance(rescues, Sequence) else 0}")
    parts = [_word(report, "engine"), _word(report, "compute_dtype"), _factor_words(report.get("factors")), *totals]
    return "  ·  ".join(part for part in parts if part)


def notes(report: Mapping[str, Any]) -> list[str]:
    """The last rescue and the warnings, a line each."""
    lines = []
    rescues = report.get("rescues")
    if isinstance(rescues, Sequence) and rescues and isinstance(rescues[-1], Mapping):
        last = rescues[-1]
        reason = f" ({last['reason']})" if last.get("reason") else ""
        lines.append(f"Rescued at step {last.get('step', '?')} with {last.get('rung', '?')}{reason}")
    warnings = report.get("warnings")
    if isinstance(warnings, Sequence) and not isinstance(warnings, str):
        lines += [str(w) for w in warnings[:3]]
    return [" ".join(line.split())[:240] for line in lines]


def _word(report: Mapping[str, Any], field: str) -> str:
    value = report.get(field, "?")
    return value[:32] if isinstance(value, str) and value else "?"


def _factor_words(factors: Any) -> str:
    if not isinstance(factors, Mapping):
        return ""
    words = []
    for field in ("c", "s_attn", "s_ffn"):
        value = factors.get(field)
        listed = value if isinstance(value, list | tuple) else [value]
        values = [number for v in listed if 0 < (number := _number(v, 0.0)) < math.inf]
        if values and (field == "c" or any(v != 1 for v in values)):
            low, high = show_factor(min(values)), show_factor(max(values))
            words.append(f"{field} {low}" if low == high else f"{field} {low} to {high}")
    return ", ".join(words)


def show_factor(value: float) -> str:
    """0.0625 -> "1/16"; other numbers with four digits."""
    mantissa, exponent = math.frexp(value)
    return f"1/{2 ** (1 - exponent)}" if mantissa == 0.5 and exponent < 1 else f"{value:.4g}"


def show_peak(value: float) -> str:
    """31234 -> "3.1e4", 812.4 -> "812", 0.0123 -> "0.012"."""
    if value >= 1e4 or value < 1e-3:
        number, exponent = f"{value:.1e}".split("e")
        return f"{number}e{int(exponent)}"
    return str(round(value)) if value >= 100 else f"{value:.2g}"


def show_bits(value: float) -> str:
    """One decimal, two below one bit."""
    return f"{value:.1f}" if abs(value) >= 0.995 else f"{value:.2f}" if abs(value) >= 0.01 else f"{value:.1g}"
