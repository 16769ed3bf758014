"""Long work in a node: ComfyUI's progress bar, and its cancel button."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import comfy.model_management as mm
import comfy.utils

from ..fold.errors import MossCancelledError


def progress_bar() -> Callable[[int, int], None]:
    """A (done, total) callback that moves the node's progress bar."""
    bar = comfy.utils.ProgressBar(1)
    return lambda done, total: bar.update_absolute(done, total)


def cancelled() -> bool:
    """Whether the user pressed cancel."""
    return bool(mm.processing_interrupted())


@contextlib.contextmanager
def cancellable() -> Iterator[None]:
    """Work in fold/ that was cancelled ends as ComfyUI's own interrupt, not as an error."""
    try:
        yield
    except MossCancelledError:
        # the flag is still up: this raises ComfyUI's exception and takes it down
        mm.throw_exception_if_processing_interrupted()
        raise
