"""Interleaved repeats and what is read off them. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: Runs one thing once and returns its seconds.
Once = Callable[[], float]


@dataclass(frozen=True)
class Ratio:
    """One thing over another, both measured in turns.

    value: the median of the ratios of the pairs measured next to each other; low, high: their quartiles. pairs: how
    many.
    """

    value: float
    low: float
    high: float
    pairs: int


def ratio(measured: Sequence[float], base: Sequence[float]) -> Ratio:
    """`measured` over `base`, pair by pair in the order they were taken. Raises ValueError for unequal lengths."""
    if len(measured) != len(base) or not measured:
        raise ValueError("A ratio needs pairs.")
    ratios = [a / b for a, b in zip(measured, base, strict=True)]
    return Ratio(statistics.median(ratios), *quartiles(ratios), len(ratios))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile (of one value, that value twice)."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def interleave(things: Mapping[str, Once], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Each thing once per round, in an order that turns around every round; the first rounds are thrown away.

    A machine that slows down or speeds up meanwhile then does so for all of them alike.
    """
    names, seconds = list(things), {name: [] for name in things}  # type: dict[str, list[float]]
    for index in range(rounds + warm_up):
        for name in names if index % 2 == 0 else reversed(names):
            taken = things[name]()
            if index >= warm_up:
                seconds[name].append(taken)
    return seconds
