"""The fold in the weights: which rows of which tensor are multiplied by what, there and back.

Every writer to a stream carries c. What ``o`` and ``ffn_down`` give up (s), the gates behind them take over (c/s).
With powers of two all of it is exact, except where a value falls into a dtype's subnormals.
"""

from __future__ import annotations

import torch

from ..arch import MossArch
from ..errors import MossError
from ..names import GATE_ATTN, GATE_FFN, MODULATION, Role
from .factors import Factors

# Stands for "untouched" (None), one factor for the whole tensor, or one fp32 factor per row.
RowScale = float | torch.Tensor | None


def row_scale(name: str, arch: MossArch, factors: Factors) -> RowScale:
    """What the fold multiplies the rows of tensor ``name`` (bare key) by: None, a float, or fp32 [6 * dim].

    It is also what an adapter's delta on that tensor must be multiplied by. Raises MossError for per-block factors,
    which one shared modulation cannot carry.
    """
    if not factors.uniform:
        raise MossError(
            "Per-block factors cannot be folded into weights, because all blocks share one modulation: "
            "give one value for c, s_attn and s_ffn, or use the online mode."
        )
    c, s_attn, s_ffn = factors.c[0], factors.s_attn[0], factors.s_ffn[0]
    part = arch.names.of(name.rpartition(".")[0])
    match part.role if part is not None else None:
        case Role.GATES:
            scale = torch.ones(len(MODULATION), arch.dim, dtype=torch.float32)
            scale[GATE_ATTN], scale[GATE_FFN] = c / s_attn, c / s_ffn
            return None if bool((scale == 1.0).all()) else scale.flatten()
        case Role.STREAM_WRITER:
            factor = c
        case Role.ATTN_WRITER:
            factor = s_attn
        case Role.FFN_WRITER:
            factor = s_ffn
        case _:
            factor = 1.0
    return None if factor == 1.0 else factor


def unfold_tensor(
    name: str, tensor: torch.Tensor, arch: MossArch, factors: Factors, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``tensor`` (bare key ``name``) with the fold taken out, rounded once to ``dtype`` (default: its own)."""
    return rescale(tensor, divide=row_scale(name, arch, factors), dtype=dtype)


def rescale(
    tensor: torch.Tensor, *, multiply: RowScale = None, divide: RowScale = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``tensor / divide * multiply`` per row, in fp32 (or the tensor's own dtype if wider), rounded once to ``dtype``.

    Returns ``tensor`` itself when nothing changes. A value too large for ``dtype`` becomes infinite: the caller checks.
    """
    target = dtype or tensor.dtype
    if multiply is None and divide is None:
        return tensor.to(target)
    wide = tensor if tensor.element_size() > 4 else tensor.to(torch.float32)
    if divide is not None:
        wide = wide / _per_row(divide, wide)
    if multiply is not None:
        wide = wide * _per_row(multiply, wide)
    return wide.to(target)


def _per_row(scale: float | torch.Tensor, tensor: torch.Tensor) -> float | torch.Tensor:
    """``scale`` shaped so that it multiplies the rows of ``tensor``."""
    if isinstance(scale, float):
        return scale
    return scale.to(tensor.device, tensor.dtype).reshape(-1, *[1] * (tensor.dim() - 1))
