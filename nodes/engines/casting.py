"""Lets ComfyUI's layers take inputs of another dtype than they store, for as long as a call needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ...fold.arch import MossArch
from ..model.comfy_types import BaseModel, ModelPatcher
from ..model.moss import ROOT, small_modules

FLAG = "comfy_cast_weights"


def cast_small_modules(model: ModelPatcher, tree: nn.Module, arch: MossArch) -> None:
    """Object patches so that norms, conditioning and head take the managed forward's fp32 inputs."""
    for path in small_modules(arch):
        if getattr(tree.get_submodule(path), FLAG, True) is False:
            model.add_object_patch(f"{ROOT}.{path}.{FLAG}", True)


@contextlib.contextmanager
def casting(base_model: BaseModel, tree: nn.Module, *, full: bool) -> Iterator[None]:
    """Every layer casts on call; with `full`, ComfyUI also hands the model fp32. All of it is undone at the end."""
    changed = [m for m in tree.modules() if getattr(m, FLAG, True) is False]
    own = [FLAG in m.__dict__ for m in changed]
    before = base_model.manual_cast_dtype
    try:
        for module in changed:
            setattr(module, FLAG, True)
        if full:
            base_model.manual_cast_dtype = torch.float32
        yield
    finally:
        base_model.manual_cast_dtype = before
        for module, was_own in zip(changed, own, strict=True):
            setattr(module, FLAG, False)
            if not was_own:
                delattr(module, FLAG)  # the class says so
