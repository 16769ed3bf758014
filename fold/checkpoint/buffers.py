"""Memory that a streamed export uses again and again, for chunks that wait to be written and for casting them."""

from __future__ import annotations

from collections import deque

import torch


class Turns:
    """Buffers in turns: one is filled while the others wait to be written, and only then its turn comes again.

    Memory fresh from the system costs about as much for each chunk as the work on it, so it is kept.
    """

    def __init__(self, behind: int) -> None:
        """``behind``: how many of them may wait."""
        self._buffers = deque(bytearray() for _ in range(behind + 1))

    def take(self, count: int) -> memoryview:
        """``count`` bytes that hold anything."""
        buffer = self._buffers.popleft()
        if len(buffer) < count:
            buffer = bytearray(count)
        self._buffers.append(buffer)
        return memoryview(buffer)[:count]


class Scratch:
    """Where chunks are cast, in memory that is used again for every chunk."""

    def __init__(self, behind: int) -> None:
        self._wide = bytearray()
        self._turns = Turns(behind)

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """Values of less than 32 bits in fp32, good until the next call; others as they are."""
        if rows.element_size() >= 4:
            return rows
        count = rows.numel() * 4
        if len(self._wide) < count:
            self._wide = bytearray(count)
        return _tensor_on(memoryview(self._wide)[:count], torch.float32, rows.shape).copy_(rows)

    def cast(self, rows: torch.Tensor, target: torch.dtype) -> torch.Tensor:
        """``rows`` in ``target``, good for as long as `Turns` says; ``rows`` itself where that is its dtype.

        torch converts one 16-bit dtype into another a value at a time; by way of fp32 it is exact and much faster.
        """
        if rows.dtype == target:
            return rows
        result = _tensor_on(self._turns.take(rows.numel() * target.itemsize), target, rows.shape)
        return result.copy_(rows if target == torch.float32 else self.widen(rows))


def _tensor_on(data: memoryview, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
