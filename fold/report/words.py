"""What chart and command line say of a report: its verdict, the number behind it, what ran, counts and notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import MossError
from ..scaling.factors import factor_text
from ..scaling.plan import FP16_MAX
from .messages import CONSEQUENCES, Message, named
from .report import Level

#: A block's level as the report gives it; none where it gives none.
Shown = Level | Literal["none"]

LEVELS: tuple[Shown, ...] = ("none", *get_args(Level))
WIDE_DTYPES = ("fp32", "float32", "bf16", "bfloat16")
MAX_BLOCKS = 1024


@dataclass(frozen=True)
class Bar:
    """One block as drawn: its peak (inf where something was not finite, nan where the report has none)."""

    name: str
    peak: float
    level: Shown

    @property
    def bits(self) -> float:
        """log2(65504 / peak)."""
        return math.log2(FP16_MAX / self.peak) if 0 < self.peak < math.inf else math.nan


def bars_of(report: Mapping[str, Any]) -> list[Bar]:
    """The report's blocks. A missing peak is NaN, an odd one infinite. Raises MossError where there is no list."""
    blocks = report.get("blocks") if isinstance(report, Mapping) else None
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise MossError("The chart needs a saturation report, but this has no list `blocks`: pass the report's JSON.")
    return [_bar(block, index) for index, block in enumerate(blocks[:MAX_BLOCKS])]


def _bar(block: Any, index: int) -> Bar:
    source: Mapping[str, Any] = block if isinstance(block, Mapping) else {}
    peak = _number(source["max_abs"], math.inf) if "max_abs" in source else math.nan
    if (math.isnan(peak) and "max_abs" in source) or _count(source, "non_finite"):
        peak = math.inf
    level = source.get("level")
    known = level if isinstance(level, str) and level in LEVELS else "none"
    return Bar(str(source.get("name", f"#{index}"))[:64], abs(peak), known)


def _number(value: Any, missing: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else missing


def _count(source: Mapping[str, Any], field: str) -> int:
    value = _number(source.get(field), 0.0)
    return int(value) if math.isfinite(value) and value > 0 else 0


def title(report: Mapping[str, Any]) -> str:
    """The report's verdict: "OK: the image is not affected by fp16"."""
    return _text_of(report.get("verdict")) or "Not measured: the report has no verdict"


def fact(report: Mapping[str, Any], bars: Sequence[Bar]) -> str:
    """The number behind it: "largest value 3904 in layer.22, margin 4.1 bits", or where NaN or infinity is."""
    for level, words in (("not_finite", "NaN or infinity in {}"), ("saturated", "{} reached fp16's limit of 65504")):
        if found := [bar.name for bar in bars if bar.level == level]:
            return words.format(list_of(found))
    worst = nearest(bars)
    if worst is None:
        return "no largest values were measured"
    if worst.peak == math.inf:
        return f"NaN or infinity in {worst.name}"
    if worst.peak == 0:
        return "every block's largest value is 0"
    stream = str(report.get("stream_dtype", ""))
    said = f"largest value {show_peak(worst.peak)} in {worst.name}"
    if stream in WIDE_DTYPES:
        return f"{said}, beyond fp16, but the stream is {stream}" if worst.bits <= 0 else f"{said}, stream is {stream}"
    return f"{said}, margin {show_bits(worst.bits)} bits{' (small)' if worst.level == 'low' else ''}"


def list_of(names: Sequence[str]) -> str:
    """ "layer.0, layer.1, layer.2 and 4 more"."""
    value = named(names)
    return value.text if isinstance(value, Message) else ", ".join(value)


def nearest(bars: Sequence[Bar]) -> Bar | None:
    """The bar nearest to overflow, or None when none has a peak."""
    return max((bar for bar in bars if not math.isnan(bar.peak)), key=lambda bar: bar.peak, default=None)


def setup(report: Mapping[str, Any]) -> str:
    """What ran: fix, engine, dtype, factors."""
    fix, engine = f"fix {_word(report, 'mode')}", f"engine {_word(report, 'engine')}"
    parts = [fix, engine, _word(report, "compute_dtype"), _factor_words(report.get("factors"))]
    return "  ·  ".join(part for part in parts if part)


def counts(report: Mapping[str, Any]) -> str:
    """The counts that are not zero: "NaN/inf 1712, saturated 3"; that nothing was bad is said in words."""
    raw = report.get("blocks")
    blocks = [b for b in raw if isinstance(b, Mapping)] if isinstance(raw, Sequence) else []
    rescues = report.get("rescues")
    wide = str(report.get("stream_dtype", "")) in WIDE_DTYPES
    saturated = sum(_count(b, "saturated") for b in blocks)
    named_counts = {
        "NaN/inf": sum(_count(b, "non_finite") for b in blocks),
        "saturated": 0 if wide else saturated,
        "beyond fp16": saturated if wide else 0,
        "clamped": sum(_count(b, "clamped") for b in blocks),
        "rescued": len(rescues) if isinstance(rescues, Sequence) else 0,
    }
    clean = not (named_counts["NaN/inf"] or named_counts["saturated"])
    parts = ["no value saturated, none NaN/inf"] if clean and blocks else []
    return ", ".join([*parts, *(f"{name} {count}" for name, count in named_counts.items() if count)])


def notes(report: Mapping[str, Any]) -> list[str]:
    """What to do about it, the last rescue's reason and the first messages, a line each."""
    lines = [_text_of(report.get("remedy"))]
    rescues = report.get("rescues")
    if isinstance(rescues, Sequence) and rescues and isinstance(rescues[-1], Mapping):
        last = rescues[-1]
        reason = f" ({last['reason']})" if last.get("reason") else ""
        lines.append(f"Step {last.get('step', '?')} was computed again with {last.get('rung', '?')}{reason}")
    messages = report.get("messages")
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        told = [m for m in messages if isinstance(m, Mapping) and m.get("key") not in CONSEQUENCES]
        lines += [_text_of(m) for m in told[:3]]
    return [line for line in lines if line]


def _text_of(said: Any) -> str:
    text = said.get("text") if isinstance(said, Mapping) else None
    return " ".join(text.split())[:240] if isinstance(text, str) else ""


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
            low, high = factor_text(min(values)), factor_text(max(values))
            words.append(f"{field} {low}" if low == high else f"{field} {low} to {high}")
    return ", ".join(words)


def show_peak(value: float) -> str:
    """31234 -> "3.1e4", 812.4 -> "812", 0.0123 -> "0.012"."""
    if value >= 1e4 or value < 1e-3:
        number, exponent = f"{value:.1e}".split("e")
        return f"{number}e{int(exponent)}"
    return str(round(value)) if value >= 100 else f"{value:.2g}"


def show_bits(value: float) -> str:
    """One decimal, two below one bit."""
    return f"{value:.1f}" if abs(value) >= 0.995 else f"{value:.2f}" if abs(value) >= 0.01 else f"{value:.1g}"
