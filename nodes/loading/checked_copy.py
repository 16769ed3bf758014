"""Finds weights with NaN or infinity while ComfyUI copies them: a pass of its own would read all of them once more."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import comfy.model_management as mm
import comfy.utils
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...fold.checkpoint.load import not_finite
from ...fold.checkpoint.reader import copy_checked, is_finite

Interval = tuple[int, int]


class CheckedCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, watched tensors, or rows of one, are copied and joined piece by piece.

    That is `target.copy_(source)` and `torch.cat(sources)`. Each piece is looked at while it is in the cache. Every
    value arrives as it would without, until one is not finite or the job is cancelled: then nothing more is copied.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """weights: on the CPU and contiguous, none of them twice."""
        super().__init__()  # type: ignore[no-untyped-call]
        watched = {name: weight for name, weight in weights.items() if weight.is_floating_point() and weight.numel()}
        self._watched = dict(sorted(watched.items(), key=lambda item: item[1].data_ptr()))
        self._names, self._spans = list(self._watched), [_span(weight) for weight in self._watched.values()]
        self._starts = [first for first, _ in self._spans]
        self._seen: list[set[Interval]] = [set() for _ in self._names]
        self._bad: tuple[str, torch.dtype] | None = None
        self._bar = comfy.utils.ProgressBar(len(watched))

    def refuse_not_finite(self, where: str, *, rest: bool) -> None:
        """MossError for the weight of the file `where` that is not finite, or was not once cast.

        rest: look now at what the class copied in another way, or not at all. Raises ComfyUI's own where the job was
        cancelled.
        """
        mm.throw_exception_if_processing_interrupted()
        for name, span, seen in zip(self._names, self._spans, self._seen, strict=True):
            if rest and self._bad is None and not _covered(span, seen):
                if not is_finite(self._watched[name]):
                    self._bad = name, self._watched[name].dtype
                self._bar.update(1)
                mm.throw_exception_if_processing_interrupted()
        if self._bad is not None:
            name, dtype = self._bad
            raise not_finite(name, self._watched[name], dtype, where)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func, args:
            case torch.ops.aten.copy_.default, (target, source, *_) if self._copies(target, source):
                self._copy(target, source)
                return target
            case torch.ops.aten.cat.default, (list(sources), *dim) if not any(dim) and self._joins(sources):
                rows = [source.shape[0] for source in sources]
                joined = sources[0].new_empty((sum(rows), *sources[0].shape[1:]))
                for source, target in zip(sources, joined.split(rows), strict=True):
                    self._copy(target, source)
                return joined
        return func(*args, **(kwargs or {}))

    def _copies(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        return target.shape == source.shape and _plain(target) and _plain(source) and self._index(source) is not None

    def _joins(self, sources: list[torch.Tensor]) -> bool:
        first = sources[0]
        return all(
            _plain(source)
            and self._index(source) is not None
            and (source.dtype, source.shape[1:]) == (first.dtype, first.shape[1:])
            for source in sources
        )

    def _index(self, source: torch.Tensor) -> int | None:
        """The watched tensor that `source` is, or is rows of."""
        start, stop = _span(source)
        index = bisect_right(self._starts, start) - 1
        return index if index >= 0 and start < stop <= self._spans[index][1] else None

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        index = self._index(source)
        if index is None or self._bad is not None or mm.processing_interrupted():
            return
        if not copy_checked(source, target):
            self._bad = self._names[index], target.dtype
        self._seen[index].add(_span(source))
        if _covered(self._spans[index], self._seen[index]):
            self._bar.update(1)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether this is no subclass, and its values lie in the CPU's memory without gaps."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.device.type == "cpu" and tensor.is_contiguous()


def _span(tensor: torch.Tensor) -> Interval:
    """First byte, and the one after the last, of a contiguous tensor."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _covered(span: Interval, parts: set[Interval]) -> bool:
    """Whether the parts leave no byte of a span out."""
    at, stop = span
    for first, last in sorted(parts):
        if first > at:
            break
        at = max(at, last)
    return at >= stop
