"""stdout and stderr as Python makes them of a pipe in an old encoding."""

from __future__ import annotations

import io
import sys

import pytest

ENCODINGS = ("cp932", "cp1252", "ascii")
NAME = "模型 é 😀"  # none of them has all of these


def pipe(monkeypatch: pytest.MonkeyPatch, encoding: str) -> tuple[io.TextIOWrapper, io.TextIOWrapper]:
    """Put such streams into sys for the rest of the test; returns stdout and stderr."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out, err


def written(stream: io.TextIOWrapper) -> str:
    """What went through the pipe."""
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(stream.encoding)
