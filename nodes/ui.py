"""What nodes show while and after they work: ComfyUI's progress bar and cancel button, a chart as IMAGE."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import comfy.model_management as mm
import comfy.utils
import torch

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


def image_of(chart: Any) -> torch.Tensor:
    """uint8 [H, W, 3] -> IMAGE [1, H, W, 3] fp32 in 0..1."""
    return torch.tensor(chart).float().div(255.0)[None]
