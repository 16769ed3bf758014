"""Finds weights with NaN or infinity while ComfyUI copies them: a pass of its own would read all of them once more."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import comfy.model_management as mm
import comfy.utils
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...fold.checkpoint.load import not_finite
from ...fold.checkpoint.reader import copy_checked, is_finite

Span = tuple[int, int]


@dataclass(order=True)
class Watched:
    """Memory that is looked at when it is copied. span: its first byte, and the one after the last."""

    span: Span
    #: the weight by its name; several where a class joined them, in the order of their rows
    parts: tuple[tuple[str, Tensor], ...] = field(compare=False)
    #: what was looked at
    seen: set[Span] = field(compare=False, default_factory=set)

    def complete(self) -> bool:
        """Whether nothing was left out."""
        return _covered(self.span, self.seen)


class CheckedCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, watched tensors, or rows of one, are copied and joined piece by piece.

    That is `target.copy_(source)` and `torch.cat(sources)`, on the CPU. Each piece is looked at while it is in the
    cache. Every value arrives as it would without, until one is not finite or the job is cancelled: then nothing more
    is copied.
    """

    def __init__(self, weights: Mapping[str, Tensor], where: str) -> None:
        """weights: by the name in the file `where`; on the CPU, contiguous, none in another's memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where
        self._watched = sorted(
            Watched(_span(weight), ((name, weight),))
            for name, weight in weights.items()
            if weight.is_floating_point() and weight.numel()
        )
        #: the weight that is not finite in this dtype
        self._bad: tuple[str, Tensor, torch.dtype] | None = None
        self._bar = comfy.utils.ProgressBar(len(self._watched))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if isinstance(error, Exception):  # it may come of what was not copied
            self.refuse_not_finite(rest=False)

    def refuse_not_finite(self, *, rest: bool) -> None:
        """MossError for the weight that is not finite, or was not in the dtype it was copied into.

        rest: look now at what the class copied in another way, or not at all. Raises ComfyUI's own where the job was
        cancelled.
        """
        mm.throw_exception_if_processing_interrupted()
        for watched in self._watched if rest and self._bad is None else ():
            if not watched.complete():
                self._note_bad(watched)
                self._bar.update(1)
                mm.throw_exception_if_processing_interrupted()
        if self._bad is not None:
            raise not_finite(*self._bad, self._where)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func, args:
            case torch.ops.aten.copy_.default, (target, source, *_) if _plain(target) and target.shape == source.shape:
                if (watched := self._find(source)) is not None:
                    self._copy(watched, target, source)
                    return target
            case torch.ops.aten.cat.default, (list(sources), *dim) if not any(dim) and _joinable(sources):
                found = [watched for source in sources if (watched := self._find(source)) is not None]
                if len(found) == len(sources):
                    return self._join(sources, found)
        return func(*args, **(kwargs or {}))

    def _find(self, source: Tensor) -> Watched | None:
        """What `source` is, or is rows of."""
        if not _plain(source) or not source.numel():
            return None
        start, stop = _span(source)
        index = bisect_right(self._watched, start, key=lambda watched: watched.span[0]) - 1
        return self._watched[index] if index >= 0 and stop <= self._watched[index].span[1] else None

    def _copy(self, watched: Watched, target: Tensor, source: Tensor) -> None:
        if self._bad is not None or mm.processing_interrupted():
            return
        if not copy_checked(source, target):
            self._note_bad(watched, target.dtype)
        if not watched.complete():
            watched.seen.add(_span(source))
            self._bar.update(int(watched.complete()))

    def _join(self, sources: Sequence[Tensor], found: Sequence[Watched]) -> Tensor:
        """The joined tensor, watched from now on: its values are to fit where they are copied to next."""
        rows = [len(source) for source in sources]
        joined = sources[0].new_empty((sum(rows), *sources[0].shape[1:]))
        targets = torch.split_with_sizes(joined, rows)
        for watched, target, source in zip(found, targets, sources, strict=True):
            self._copy(watched, target, source)
        names = [watched.parts[0][0] for watched in found]
        insort(self._watched, Watched(_span(joined), tuple(zip(names, targets, strict=True)), {_span(joined)}))
        return joined

    def _note_bad(self, watched: Watched, dtype: torch.dtype | None = None) -> None:
        """Remember which part is not finite once in this dtype, if any is."""
        for name, weight in watched.parts:
            if self._bad is None and not is_finite(weight if dtype is None else weight.to(dtype)):
                self._bad = name, weight, dtype or weight.dtype


def _plain(tensor: Tensor) -> bool:
    """Whether this is no subclass, and floats in the CPU's memory without gaps."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point()
    return plain and tensor.device.type == "cpu" and tensor.is_contiguous()


def _joinable(sources: Sequence[Tensor]) -> bool:
    """Whether these can be joined row by row, nothing cast."""
    kinds = {(source.dtype, source.shape[1:]) for source in sources}
    return len(kinds) == 1 and all(source.dim() > 0 for source in sources)


def _span(tensor: Tensor) -> Span:
    """First byte, and the one after the last, of a contiguous tensor."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _covered(span: Span, parts: set[Span]) -> bool:
    """Whether the parts leave no byte of a span out."""
    at, stop = span
    for first, last in sorted(parts):
        if first > at:
            break
        at = max(at, last)
    return at >= stop
