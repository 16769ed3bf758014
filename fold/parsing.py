"""Lists that people type, read once: sizes in pixels and plain numbers."""

from __future__ import annotations

from .errors import MossError


def parse_sizes(text: str, field: str) -> tuple[tuple[int, int], ...]:
    """`1024x1024, 832x1216` as (width, height) pairs; MossError naming `field` for anything else."""
    found = []
    for part in _parts(text):
        width, cross, height = (piece.strip() for piece in part.lower().partition("x"))
        if not (cross and width.isdecimal() and height.isdecimal()):
            raise MossError(f"{field} must be like 1024x1024, 832x1216, but it has {part[:40]!r}.")
        found.append((int(width), int(height)))
    return tuple(found)


def parse_numbers(text: str, field: str) -> tuple[float, ...]:
    """`1, 0.5, 0.02`; MossError naming `field` for anything else."""
    try:
        return tuple(float(part) for part in _parts(text))
    except ValueError:
        raise MossError(f"{field} must be numbers like 1, 0.5, but it is {text[:40]!r}.") from None


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", ",").split(",")]
