"""Measured rows as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .stats import Ratio

Unit = Literal["x", "ms", "MiB", "MB"]


@dataclass(frozen=True)
class Row:
    """One line of the table. value and spread in `unit` ("x" is a ratio); target: the most it should be, or None."""

    what: str
    device: str
    value: float
    low: float
    high: float
    repeats: int
    target: float | None = None
    unit: Unit = "x"
    note: str = ""

    @classmethod
    def of(cls, what: str, device: str, found: Ratio, target: float | None = None, note: str = "") -> Row:
        """The row of a ratio."""
        return cls(what, device, found.value, found.low, found.high, found.pairs, target, "x", note)

    @property
    def met(self) -> bool | None:
        """Whether the target is kept; None without one."""
        return None if self.target is None else self.value <= self.target

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


HEAD = ("what", "where", "measured", "spread (quartiles)", "repeats", "target", "", "note")


def markdown(rows: Iterable[Row]) -> str:
    """A GitHub table; the column without a name says whether the target is kept."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    return "\n".join([*lines, *(_line(_cells(row)) for row in rows)]) + "\n"


def _cells(row: Row) -> list[str]:
    spread = f"{number(row.low, row.unit)} to {number(row.high, row.unit)}"
    target = "" if row.target is None else f"≤ {number(row.target, row.unit)}"
    verdict = {None: "", True: "met", False: "**missed**"}[row.met]
    return [row.what, row.device, number(row.value, row.unit), spread, str(row.repeats), target, verdict, row.note]


def number(value: float, unit: Unit) -> str:
    """1.004 for a ratio; otherwise three digits and the unit."""
    if unit == "x":
        return f"{value:.3f}"
    return f"{value:.0f} {unit}" if value >= 100 or value == 0 else f"{value:.3g} {unit}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
