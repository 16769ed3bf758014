"""The JSON of a safetensors header, read one member at a time.

A header may have 100 MB. Read at once, hostile JSON of that size would fill gigabytes before the first look at it; read
like this, it costs what its sound members cost, and one bad member ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

# A tensor's entry has some 80 characters. Unknown fields may make it longer, within reason.
_FIRST_PIECE, _LARGEST_VALUE = 512, 2**20
_SPACE = re.compile(r"[ \t\n\r]*")
_decoder: Any = json.JSONDecoder()


def read_object(text: str, start: int, read: Callable[[str, int], int]) -> int:
    """Read the JSON object at ``start`` and return where it ends.

    For each member ``read(name, position)`` is called with the place of its value; it returns where that value ends.
    Raises ValueError for anything that is no JSON object.
    """
    position = _expect(text, start, "{")
    if _character(text, position) == "}":
        return _expect(text, position, "}")
    while True:
        name, position = read_string(text, position)
        position = read(name, _expect(text, position, ":"))
        if _character(text, position) == "}":
            return _expect(text, position, "}")
        position = _expect(text, position, ",")


def read_string(text: str, start: int) -> tuple[str, int]:
    """The JSON string at ``start``, and where it ends; ValueError where there is none."""
    found: tuple[str, int] = _decoder.parse_string(text, _expect(text, start, '"'), True)
    return found


def read_value(text: str, start: int) -> tuple[Any, int]:
    """Any JSON value of at most 1 MiB at ``start``, and where it ends; ValueError where there is none.

    A name given twice in an object is a ValueError, too.
    """
    start = skip_space(text, start)
    size = _FIRST_PIECE
    while True:
        piece, is_rest = text[start : start + size], start + size >= len(text)
        try:
            value, end = _VALUES.raw_decode(piece)
            if is_rest or end < len(piece):  # else it may be a number that goes on
                return value, start + end
        except json.JSONDecodeError:
            if is_rest:
                raise
        if size >= _LARGEST_VALUE:
            raise ValueError("a value of more than 1 MiB")
        size *= 8


def skip_space(text: str, start: int) -> int:
    """The position of the first character from ``start`` on that is no white space."""
    found = _SPACE.match(text, start)
    return found.end() if found else start


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can write ``text``: JSON can hold halves of surrogate pairs."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


class RepeatedNameError(ValueError):
    """An object gives the same name twice. ``name``: that name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise RepeatedNameError(name)
            seen.add(name)
    return table


_VALUES = json.JSONDecoder(object_pairs_hook=_unique)


def _character(text: str, position: int) -> str:
    position = skip_space(text, position)
    return text[position : position + 1]


def _expect(text: str, start: int, character: str) -> int:
    """The place after ``character``, which must be the next one; ValueError where it is not."""
    position = skip_space(text, start)
    if not text.startswith(character, position):
        raise ValueError(f"no {character} at {position}")
    return position + 1
