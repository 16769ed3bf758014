"""The factors of a fold: ``c`` scales the streams, ``s_attn`` and ``s_ffn`` a block's writers before their gates.

Each is a tuple of one value (the whole model) or of one value per block. Only powers of two are exact.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import MossError
from ..files import open_regular

FACTOR_FIELDS = ("c", "s_attn", "s_ffn")
# Wider than any checkpoint needs; inside it eps * c**2 and c / s stay ordinary fp32 numbers.
SMALLEST, LARGEST = 2.0**-24, 2.0**24
# The stream is aimed at this peak, which leaves four bits of fp16 range above it.
TARGET_PEAK = 4096.0
#: "0,0625" as many countries write it. No list begins with 0, which is no factor.
_DECIMAL_COMMA = r"[+-]?0+,[0-9]+"
_MAX_JSON_BYTES = 16 * 2**20


def check_factor(value: object, field: str, where: str = "") -> float:
    """``value`` as a float; MossError naming ``field`` (and ``where``, a file name) if it cannot be a factor."""
    place = f"{field} in {where}" if where else field
    # A tuple of types: torch 2.4 and 2.5 cannot compile a union, and plans are expanded inside the compiled forward.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MossError(f"{place} must be a number above 0, but it is {_shown(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0.0:
        raise MossError(f"{place} must be a finite number above 0, but it is {_shown(value)}.")
    if not SMALLEST <= number <= LARGEST:
        raise MossError(f"{place} must lie between 2^-24 and 2^24, but it is {_shown(value)}.")
    return number


@dataclass(frozen=True, slots=True)
class Factors:
    """``c``, ``s_attn``, ``s_ffn``: tuples of length 1 (uniform) or of one value per block.

    Raises MossError when a value is not a finite number within [2^-24, 2^24] or two per-block lists differ in length.
    """

    c: tuple[float, ...] = (1.0,)
    s_attn: tuple[float, ...] = (1.0,)
    s_ffn: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for field in FACTOR_FIELDS:
            values = tuple(check_factor(value, field) for value in getattr(self, field))
            if not values:
                raise MossError(f"{field} needs at least one value, but the list is empty.")
            object.__setattr__(self, field, values)
        lengths = {field: len(getattr(self, field)) for field in FACTOR_FIELDS if len(getattr(self, field)) > 1}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{field} has {count}" for field, count in lengths.items())
            raise MossError(f"The per-block lists must have the same number of values, but {listed}.")

    @property
    def uniform(self) -> bool:
        """Whether each factor is one value for all blocks (a list of equal values counts)."""
        return all(len(set(getattr(self, field))) == 1 for field in FACTOR_FIELDS)

    @property
    def identity(self) -> bool:
        """Whether the fold changes nothing."""
        return all(value == 1.0 for field in FACTOR_FIELDS for value in getattr(self, field))

    @property
    def power_of_two(self) -> bool:
        """Whether every value is a power of two, so that the fold is exact."""
        return all(math.frexp(value)[0] == 0.5 for field in FACTOR_FIELDS for value in getattr(self, field))

    def expand(self, depth: int) -> Factors:
        """The same factors with one value per block; MossError when a list has neither 1 nor ``depth`` values."""
        full: dict[str, tuple[float, ...]] = {}
        for field in FACTOR_FIELDS:
            values: tuple[float, ...] = getattr(self, field)
            if len(values) not in (1, depth):
                raise MossError(
                    f"{field} has {len(values)} values, but this model has {depth} blocks: give 1 value or {depth}."
                    + (" (A comma separates values: a decimal point is a point.)" if len(values) == 2 else "")
                )
            full[field] = values * depth if len(values) == 1 else values
        return Factors(**full)

    def to_json(self) -> dict[str, float | list[float]]:
        """A JSON-able dict: a plain number for each uniform factor, a list for a per-block one."""
        return {
            field: values[0] if len(values) == 1 else list(values)
            for field in FACTOR_FIELDS
            for values in [getattr(self, field)]
        }

    @classmethod
    def from_json(cls, value: object, where: str = "the factors") -> Factors:
        """Read what ``to_json`` wrote; other keys are ignored, a missing factor is 1. ``where`` names the source."""
        if not isinstance(value, Mapping):
            raise MossError(f"Factors in {where} must be a JSON object with c, s_attn and s_ffn.")
        fields: dict[str, tuple[float, ...]] = {}
        for field in FACTOR_FIELDS:
            given: Any = value.get(field, 1.0)
            items = given if isinstance(given, list | tuple) else [given]
            fields[field] = tuple(check_factor(item, field, where) for item in items)
        return cls(**fields)


class GivenFactors(NamedTuple):
    """The factors that a user asked for; ``c`` is None where only s_attn and s_ffn were given.

    Not checked here: `parse_factors` checks what a user wrote, and `with_c` what becomes of it.
    """

    c: tuple[float, ...] | None = None
    s_attn: tuple[float, ...] = (1.0,)
    s_ffn: tuple[float, ...] = (1.0,)

    def with_c(self, c: tuple[float, ...]) -> Factors:
        """All three, with this c where none was given; MossError as from `Factors`."""
        return Factors(c if self.c is None else self.c, self.s_attn, self.s_ffn)

    @classmethod
    def of(cls, factors: Factors) -> GivenFactors:
        """The same factors as a user's."""
        return cls(factors.c, factors.s_attn, factors.s_ffn)


DEFAULT = Factors((1.0 / 16.0,))
IDENTITY = Factors()
SCHEMA = "moss_fp16.factors/1"


def read_factors(file: str | Path) -> Factors:
    """The factors in a JSON file: what ``probe`` wrote, or any object with c and perhaps s_attn and s_ffn."""
    file = Path(file)
    try:
        with open_regular(file) as stream:
            raw = stream.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise MossError(f"{file} cannot be read: {error.strerror or error}.") from None
    if len(raw) > _MAX_JSON_BYTES:
        raise MossError(f"{file.name} is larger than {_MAX_JSON_BYTES // 2**20} MiB, which no file of factors is.")
    return parse_factors_json(raw, file.name)


def parse_factors_json(text: str | bytes, where: str) -> Factors:
    """The factors in a JSON text; ``where`` names its source in the MossError raised when it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise MossError(f"{where} is not valid JSON: give what probe wrote, or an object with c.") from None
    if not isinstance(value, Mapping) or "c" not in value:
        raise MossError(f"{where} holds no factors: it is no JSON object with c.")
    if value.get("schema", SCHEMA) != SCHEMA:
        raise MossError(f"{where} is a {_shown(value['schema'])}, not a {SCHEMA}.")
    return Factors.from_json(value, where)


def parse_factor(text: str | float | Iterable[float], field: str = "factor") -> tuple[float, ...]:
    """Read ``0.0625``, ``1/16``, ``2^-4`` or a comma list of those; MossError naming ``field`` otherwise."""
    match text:
        case str():
            if re.fullmatch(_DECIMAL_COMMA, text.strip()):
                raise MossError(_decimal_comma(text.strip(), field))
            parts: list[object] = [_parse_one(part.strip(), field) for part in text.split(",")]
        case int() | float():
            parts = [text]
        case _:
            parts = list(text)
    return tuple(check_factor(part, field) for part in parts)


def parse_factors(
    c: str | float | None = None, s_attn: str | float | None = None, s_ffn: str | float | None = None
) -> GivenFactors | None:
    """What was asked for, from the text forms; None for each that was left out, and None where all were.

    Raises MossError for what `parse_factor` cannot read, and for lists of different lengths.
    """
    if c is None and s_attn is None and s_ffn is None:
        return None
    given = GivenFactors(
        None if c is None else parse_factor(c, "c"),
        (1.0,) if s_attn is None else parse_factor(s_attn, "s_attn"),
        (1.0,) if s_ffn is None else parse_factor(s_ffn, "s_ffn"),
    )
    given.with_c((1.0,))
    return given


def factor_text(value: float) -> str:
    """A factor as people write it and `parse_factor` reads it: "1/16" where it is one over a whole number, else 0.3."""
    inverse = 1.0 / value
    return f"1/{int(inverse)}" if value < 1.0 and inverse.is_integer() else f"{value:g}"


def factor_for_peak(peak: float, target: float = TARGET_PEAK) -> float:
    """The largest 2^-k (k >= 0) with ``peak * 2^-k <= target``; MossError when ``peak`` is not a finite number >= 0."""
    if not math.isfinite(peak) or peak < 0.0:
        raise MossError(f"A factor cannot be chosen for a peak of {peak}: measure it in fp32, where it is finite.")
    factor = 1.0
    while peak * factor > target:
        factor /= 2.0
    return check_factor(factor, f"the factor for a peak of {peak:g}")


def _decimal_comma(text: str, field: str) -> str:
    before, after = text.split(",")
    return (
        f"{field} = {text} was read as a list of two values, {before} and {after}, since a comma separates the values "
        f"of a per-block list, and {before} cannot be a factor. If it is one number, write {before}.{after}."
    )


def _parse_one(text: str, field: str) -> float:
    """One number: decimal, ``a/b`` or ``a^b``."""
    try:
        if "/" in text:
            above, below = text.split("/")
            return float(above) / float(below)
        if "^" in text:
            base, exponent = text.split("^")
            # -2^-4 is -(2^-4), not the (-2)^-4 that pow would make of it
            return math.copysign(math.pow(abs(float(base)), float(exponent)), float(base))
        return float(text)
    except (ValueError, ArithmeticError):
        raise MossError(f"{field} must be numbers like 0.0625 or 1/16, but it has {_shown(text)}.") from None


def _shown(value: object) -> str:
    """A short printable form of an untrusted value."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "a very large integer"
    try:
        shown = repr(value)
    except RecursionError:
        return "a list in lists, too deep to show"
    return shown if len(shown) <= 60 else shown[:57] + "..."
