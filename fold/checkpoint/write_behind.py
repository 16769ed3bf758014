"""Writing in a thread, a few chunks behind: while chunks go to the file, the next ones are read and worked on."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from ..files import Write


class WriteBehind:
    """A context manager around a ``write(bytes)``; when its block ends well, everything has been written.

    depth: how many chunks may wait. With more than one, neither side stands still where the other is held up.
    """

    def __init__(self, write: Write, depth: int) -> None:
        self._write, self._depth = write, depth
        self._thread = ThreadPoolExecutor(1, "moss-write")
        self._pending: deque[Future[None]] = deque()

    def put(self, data: bytes | bytearray | memoryview) -> None:
        """Hand over a chunk once fewer than ``depth`` wait; raises what writing an earlier one raised."""
        self._wait(self._depth - 1)
        self._pending.append(self._thread.submit(self._write, data))

    def _wait(self, left: int) -> None:
        while len(self._pending) > left:
            self._pending.popleft().result()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._wait(0)
        finally:
            self._thread.shutdown(cancel_futures=True)
