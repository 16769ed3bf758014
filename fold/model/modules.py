"""The modules of MOSS-Image, built from the table of names and found by it; `forward.py` says what they are for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..arch import MossArch
from ..names import FP32_ROLES
from . import ops


class PlainLayers:
    """The layer classes MossDiT is built from when no runtime brings its own."""

    Linear = ops.Linear
    RMSNorm = ops.RMSNorm


@dataclass(frozen=True)
class Maker:
    """Builds layers of one family, device and dtype; norms are always fp32 (see `dtypes.stored_dtype`)."""

    operations: Any
    eps: float
    device: torch.device | None
    dtype: torch.dtype | None

    def linear(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """A linear [outputs, inputs]."""
        layer: nn.Module = self.operations.Linear(inputs, outputs, bias=bias, device=self.device, dtype=self.dtype)
        return layer

    def norm(self, dim: int) -> nn.Module:
        """An RMSNorm over `dim` channels with fp32 weights."""
        layer: nn.Module = self.operations.RMSNorm(dim, eps=self.eps, device=self.device, dtype=torch.float32)
        return layer


def build_modules(root: nn.Module, arch: MossArch, new: Maker, fused: bool) -> None:
    """Make every linear and norm of the table below `root`, the blocks in a `ModuleList`, and RoPE's bands."""
    wide = replace(new, dtype=torch.float32)
    lists = (arch.names.text.blocks, arch.names.joint.blocks)
    for path, part in arch.modules(fused):
        maker = wide if part.role in FP32_ROLES else new
        rows, *columns = arch.shape(part)
        layer = maker.linear(columns[0], rows, part.bias) if columns else maker.norm(rows)
        holder, name = _holder(root, path, lists)
        while isinstance(holder, nn.Sequential) and len(holder) < int(name):
            holder.append(nn.SiLU())  # between the linears of the time embedding
        holder.add_module(name, layer)
    # a place for the checkpoint's bands; the forward derives them anew, in fp32, since a file may lack them
    holder, name = _holder(root, arch.names.rope_bands, lists)
    bands = ops.rope_bands(arch.head_dim, arch.rope_base, new.device or torch.device("cpu"))
    holder.register_buffer(name, bands)


def _holder(root: nn.Module, path: str, lists: tuple[str, ...]) -> tuple[nn.Module, str]:
    """The module that holds what is at `path`, made where it is not there yet, and the last name of the path."""
    above, _, name = path.rpartition(".")
    if not above:
        return root, name
    holder, own = _holder(root, above, lists)
    if own not in holder._modules:
        numbered = nn.ModuleList() if above in lists else nn.Sequential()
        holder.add_module(own, numbered if name.isdecimal() else nn.Module())
    return holder.get_submodule(own), name


def module_at(root: Any, path: str) -> Any:
    """The module at a path below another, or anything else that is there."""
    for name in path.split("."):
        root = getattr(root, name)
    return root


class Modules:
    """A model's modules, or a block's, by their fields in the table of names: `block.o` is what is at `proj.o` in it.

    Looked up each time, since runtimes put other modules in their places for as long as a call takes.
    """

    def __init__(self, root: Any, table: Any) -> None:
        """table: a `ModuleNames`, or one of its blocks."""
        self._root, self._table = root, table

    def __getattr__(self, field: str) -> Any:
        return module_at(self._root, getattr(self._table, field).path)

    def text_block(self, index: int) -> Modules:
        """The modules of one text refiner block."""
        names = self._table.text
        return Modules(module_at(self._root, names.path(index)), names)

    def joint_block(self, index: int) -> Modules:
        """The modules of one joint block."""
        names = self._table.joint
        return Modules(module_at(self._root, names.path(index)), names)

    def find(self, field: str) -> Any | None:
        """The module, or None where this class has none (q, k, v are there in one of two layouts)."""
        found = self._root
        for name in getattr(self._table, field).path.split("."):
            if not hasattr(found, name):  # asked for, not caught: torch 2.4 cannot compile the exception
                return None
            found = getattr(found, name)
        return found
