"""Triton's kernels as the trace sees them: the same calls, each counted as the one kernel that it launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from fold.model.fused import Fused

from .watch import Watch


def fused(device: torch.device) -> Fused:
    """`fold.model.fused` over kernels that are counted instead of launched."""
    return Fused(device, cast(Any, _KERNELS))


def _count(name: str, taken: list[Tensor], out: Tensor) -> Tensor:
    assert Watch.current is not None
    Watch.current.kernel(name, "pointwise", taken, out)
    return out


def _modulated_norm(
    x: Tensor, weight: Tensor, _eps: float, _unscale: Any, factor: Tensor, shift: Tensor, dtype: torch.dtype
) -> Tensor:
    return _count("modulated_norm", [x, weight, factor, shift], torch.empty(x.shape, dtype=dtype, device=x.device))


def _norm_rope(x: Tensor, weight: Tensor, _eps: float, rope: tuple[Tensor, Tensor], _dtype: torch.dtype) -> Tensor:
    return _count("norm_rope", [x, weight, *rope], x)


def _situ(up: Tensor, gate: Tensor, _factor: float) -> Tensor:
    return _count("situ", [up, gate], up)


def _gated_add(x: Tensor, y: Tensor, gate: Tensor, *, keep: bool) -> Tensor:
    return _count("gated_add", [x, y, gate], torch.empty_like(x) if keep else x)


_KERNELS = SimpleNamespace(
    modulated_norm=_modulated_norm,
    norm_rope=_norm_rope,
    situ=_situ,
    gated_add=_gated_add,
    fits=lambda *tensors: all(tensor.stride(-1) == 1 for tensor in tensors),
)
