"""Output that a pipe or a console cannot show is replaced, not an error: names in Chinese in a cp1252 pipe, say."""

from __future__ import annotations

import contextlib
import io
import sys


def never_raise() -> None:
    """Let stdout and stderr write `?` for what their encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError):  # closed
                stream.reconfigure(errors="replace")
