"""Writing in a thread, one chunk behind: while a chunk goes to the file, the next one is read and worked on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from .files import Write


class WriteBehind:
    """A context manager around a ``write(bytes)``; when its block ends well, everything has been written."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._thread = ThreadPoolExecutor(1, "moss-write")
        self._pending: Future[None] | None = None

    def put(self, data: bytes | bytearray | memoryview) -> None:
        """Hand over a chunk, after the one before it has been written; raises what writing that one raised."""
        self._wait()
        self._pending = self._thread.submit(self._write, data)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._thread.shutdown()
