"""Lets ComfyUI's layers take inputs of another dtype than they store, for as long as a call needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...fold.arch import MossArch
from ..model.comfy_types import BaseModel, ModelPatcher
from ..model.moss import ROOT, small_modules

FLAG = "comfy_cast_weights"
FORCE = "comfy_force_cast_weights"


def cast_small_modules(model: ModelPatcher, tree: nn.Module, arch: MossArch) -> None:
    """Object patches so that norms, conditioning and head take the managed forward's fp32 inputs."""
    for path in small_modules(arch):
        if getattr(tree.get_submodule(path), FLAG, True) is False:
            model.add_object_patch(f"{ROOT}.{path}.{FLAG}", True)


@contextlib.contextmanager
def casting(
    base_model: BaseModel, tree: nn.Module, dtype: torch.dtype | None = None, *, exact: bool = False
) -> Iterator[None]:
    """Every layer casts its weights on call, until this ends.

    dtype: what ComfyUI hands the model, and what the class takes for its own dtype (None: as before). exact: quantized
    weights are multiplied as the numbers they stand for, and fp32 products are not rounded to TF32.
    """
    with contextlib.ExitStack() as undo:
        for module in tree.modules():
            if getattr(module, FLAG, True) is False:
                _lend(undo, module, FLAG, True)
            if exact and hasattr(module, "quant_format"):
                _lend(undo, module, FORCE, True)
        if dtype is not None:
            _lend(undo, base_model, "manual_cast_dtype", dtype)
            if isinstance(tree.__dict__.get("dtype"), torch.dtype):
                _lend(undo, tree, "dtype", dtype)
        if exact:
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        yield


def _lend(undo: contextlib.ExitStack, owner: nn.Module | BaseModel, name: str, value: Any) -> None:
    """Set an attribute until `undo` is closed; one that the class had goes back to the class."""
    if name in owner.__dict__:
        undo.callback(setattr, owner, name, owner.__dict__[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)
