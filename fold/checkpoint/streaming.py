"""Streaming a file: chunks are read and worked on while a thread writes earlier ones, in memory that is used again."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from ..files import Write


class WriteBehind:
    """A context manager around a ``write(bytes)`` that writes in a thread; when its block ends well, all is written.

    depth: how many chunks may wait. With more than one, neither side stands still where the other is held up.
    """

    def __init__(self, write: Write, depth: int) -> None:
        self._write, self._depth = write, depth
        self._thread = ThreadPoolExecutor(1, "moss-write")
        self._pending: deque[Future[None]] = deque()

    def write(self, data: bytes | bytearray | memoryview) -> None:
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


class RingBuffer:
    """Buffers used in turn: one is filled while the others wait to be written.

    Memory fresh from the system costs about as much for each chunk as the work on it, so it is kept.
    """

    def __init__(self, waiting: int) -> None:
        """``waiting``: how many of them may wait to be written."""
        self._buffers = deque(bytearray() for _ in range(waiting + 1))

    def take(self, count: int) -> memoryview:
        """``count`` bytes that hold anything, good until ``waiting`` more have been taken."""
        buffer = self._buffers.popleft()
        if len(buffer) < count:
            buffer = bytearray(count)
        self._buffers.append(buffer)
        return memoryview(buffer)[:count]


class CastBuffer:
    """Where chunks are cast, in memory that is used again for every chunk. ``waiting`` as for `RingBuffer`."""

    def __init__(self, waiting: int) -> None:
        self._wide = bytearray()
        self._ring = RingBuffer(waiting)

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """Values of less than 32 bits in fp32, good until the next call; others as they are."""
        if rows.element_size() >= 4:
            return rows
        count = rows.numel() * 4
        if len(self._wide) < count:
            self._wide = bytearray(count)
        return _tensor_on(memoryview(self._wide)[:count], torch.float32, rows.shape).copy_(rows)

    def cast(self, rows: torch.Tensor, target: torch.dtype) -> torch.Tensor:
        """``rows`` in ``target``, good for as long as `RingBuffer.take` says; ``rows`` itself where that is its dtype.

        torch converts one 16-bit dtype into another a value at a time; by way of fp32 it is exact and much faster.
        """
        if rows.dtype == target:
            return rows
        result = _tensor_on(self._ring.take(rows.numel() * target.itemsize), target, rows.shape)
        return result.copy_(rows if target == torch.float32 else self.widen(rows))


def _tensor_on(data: memoryview, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
