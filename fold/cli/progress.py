"""A progress bar on stderr: drawn on a terminal; elsewhere a plain line now and then, once the work is slow."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_WIDTH = 28
_TTY_SECONDS = 0.1
_LOG_SECONDS = 10.0


class Progress:
    """``with Progress("Exporting") as progress: work(progress)``, where work calls ``progress(done, total)``.

    ``unit`` turns a count into text (``human_bytes``, or ``str`` for steps).
    """

    def __init__(self, title: str, unit: Callable[[int], str] = str, stream: TextIO | None = None) -> None:
        self.title, self.unit, self.stream = title, unit, stream or sys.stderr
        self.is_tty = self.stream.isatty()
        self.started = self.drawn_at = time.monotonic()
        self.drawn, self.longest = False, 0

    def __call__(self, done: int, total: int) -> None:
        """Draw, unless that was done a moment ago."""
        now = time.monotonic()
        pause = _TTY_SECONDS if self.is_tty else _LOG_SECONDS
        if now - self.drawn_at < pause and not (self.drawn and done >= total):
            return
        self.drawn_at, self.drawn = now, True
        share = min(done / total, 1.0) if total else 1.0
        text = f"{self.title} {share:4.0%}  {self.unit(done)} of {self.unit(total)}{self._remaining(share, now)}"
        if self.is_tty:
            bar = "#" * round(share * _WIDTH)
            line = f"[{bar:<{_WIDTH}}] {text}"
            # Padded over what stood there: not every console takes the escape code that clears the rest of a line.
            self.stream.write(f"\r{line:<{self.longest}}")
            self.longest = max(self.longest, len(line))
        else:
            self.stream.write(text + "\n")
        self.stream.flush()

    def _remaining(self, share: float, now: float) -> str:
        spent = now - self.started
        if share <= 0.0 or share >= 1.0 or spent < 1.0:
            return ""
        return f", {spent / share - spent:.0f} s left"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar's line, so that what is printed next starts on its own."""
        if self.is_tty and self.drawn:
            self.stream.write("\n")
            self.stream.flush()
