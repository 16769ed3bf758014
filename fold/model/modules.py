"""The parameters of MOSS-Image under their official names; what is done with them is in `model.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..arch import MossArch
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

    def linear(self, inputs: int, outputs: int, bias: bool = True) -> nn.Module:
        layer: nn.Module = self.operations.Linear(inputs, outputs, bias=bias, device=self.device, dtype=self.dtype)
        return layer

    def norm(self, dim: int) -> nn.Module:
        layer: nn.Module = self.operations.RMSNorm(dim, eps=self.eps, device=self.device, dtype=torch.float32)
        return layer


class TextBlock(nn.Module):
    """Parameters of one text refiner block."""

    def __init__(self, arch: MossArch, new: Maker):
        super().__init__()
        d, f = arch.dim, arch.text_ffn_dim
        self.norm1, self.norm2 = new.norm(d), new.norm(d)
        self.q_norm, self.k_norm = new.norm(arch.head_dim), new.norm(arch.head_dim)
        self.qkv, self.proj = new.linear(d, 3 * d), new.linear(d, d)
        self.ffn_gate, self.ffn_up, self.ffn_down = new.linear(d, f), new.linear(d, f), new.linear(f, d)


class Projections(nn.Module):
    """The big matrices of one joint block, none with a bias."""

    def __init__(self, arch: MossArch, new: Maker, fused: bool):
        super().__init__()
        d, f = arch.dim, arch.ffn_dim
        if fused:
            self.qkv = new.linear(d, 3 * d, bias=False)
        else:
            self.q, self.k, self.v = (new.linear(d, d, bias=False) for _ in "qkv")
        self.o = new.linear(d, d, bias=False)
        self.ffn_up_gate = new.linear(d, 2 * f, bias=False)
        self.ffn_down = new.linear(f, d, bias=False)


class JointBlock(nn.Module):
    """Parameters of one joint block."""

    def __init__(self, arch: MossArch, new: Maker, fused: bool):
        super().__init__()
        self.norm1, self.norm2 = new.norm(arch.dim), new.norm(arch.dim)
        self.q_norm, self.k_norm = new.norm(arch.head_dim), new.norm(arch.head_dim)
        self.proj = Projections(arch, new, fused)


class TextEmbedder(nn.Module):
    """Context projection and the text refiner."""

    def __init__(self, arch: MossArch, new: Maker):
        super().__init__()
        self.proj = new.linear(arch.text_dim, arch.dim)
        self.blocks = nn.ModuleList(TextBlock(arch, new) for _ in range(arch.text_blocks))


class Rope(nn.Module):
    """Holds the checkpoint's `rope.bands`; the forward derives them anew, in fp32, since the file may lack them."""

    def __init__(self, arch: MossArch, device: torch.device | None):
        super().__init__()
        self.register_buffer("bands", ops.rope_bands(arch.head_dim, arch.rope_base, device or torch.device("cpu")))
