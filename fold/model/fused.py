"""Fused kernels where they can be had: tried once against plain torch, and plain torch at the first thing wrong."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from types import ModuleType

import torch
from torch import Tensor, nn

from . import ops
from .kernels import FUNCTIONAL, Kernels, Slabs

log = logging.getLogger(__name__)

#: Set to anything but 0, fused kernels of Triton are not used.
SWITCH = "MOSS_FP16_NO_TRITON"
_DEVICES = ("cuda", "xpu")
#: How far a kernel may be from plain torch in the trial, in roundings of its dtype.
_ROUNDINGS = 8.0
#: Beside its square an eps is nothing.
_LARGE = 2.0**20


class Fused(Slabs):
    """The pointwise pieces by Triton. What Triton cannot take goes to plain torch."""

    def __init__(self, device: torch.device, kernels: ModuleType) -> None:
        super().__init__(device)
        self.triton = kernels

    def modulated_norm(
        self, norm: nn.Module, x: Tensor, unscale: ops.Unscale | None, factor: Tensor, shift: Tensor, dtype: torch.dtype
    ) -> Tensor:
        eps = getattr(norm, "eps", None)
        if not isinstance(eps, float) or not self.triton.fits(x, factor, shift):
            return super().modulated_norm(norm, x, unscale, factor, shift, dtype)
        weight = norm_weight(norm, x)
        return self.triton.modulated_norm(x, weight, eps, unscale, factor, shift, dtype)  # type: ignore[no-any-return]

    def norm_rope(self, norm: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        eps = getattr(norm, "eps", None)
        if not isinstance(eps, float) or not self.triton.fits(x, *rope):
            return super().norm_rope(norm, x, rope, dtype)
        return self.triton.norm_rope(x, norm_weight(norm, x), eps, rope, dtype)  # type: ignore[no-any-return]

    def situ(self, up: Tensor, gate: Tensor, factor: float) -> Tensor:
        if not self.triton.fits(up, gate):
            return super().situ(up, gate, factor)
        return self.triton.situ(up, gate, factor)  # type: ignore[no-any-return]

    def gated_add(self, x: Tensor, y: Tensor, gate: Tensor, *, keep: bool) -> Tensor:
        if not self.triton.fits(x, y, gate):
            return super().gated_add(x, y, gate, keep=keep)
        return self.triton.gated_add(x, y, gate, keep=keep)  # type: ignore[no-any-return]


def norm_weight(norm: nn.Module, x: Tensor) -> Tensor:
    """The weight that an RMSNorm over x's last dimension multiplies by, fp32, however the module stores, casts, patches
    or fetches it: what it makes of a row of one large number (a power of two, so that nothing is rounded)."""
    weight: Tensor = norm(torch.full((1, x.shape[-1]), _LARGE, device=x.device))[0]
    return weight


def chosen(kernels: Kernels | None, device: torch.device) -> Kernels:
    """Those given, or else the best that the device has; but `Functional` where gradients or a compiler are at work."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return FUNCTIONAL
    return kernels or fused_kernels(device) or Slabs(device)


def fused_kernels(device: torch.device) -> Fused | None:
    """Triton's, on a device where they work and are not switched off. The trial waits for the device, once."""
    wanted = device.type in _DEVICES and os.environ.get(SWITCH, "0") == "0"
    kernels = _tried(str(device)) if wanted else None
    return None if kernels is None else Fused(device, kernels)


@functools.cache
def _tried(device: str) -> ModuleType | None:
    """The Triton kernels, if Triton is here and they give what plain torch gives on this device."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from . import triton_kernels

        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            if (difference := trial(triton_kernels, torch.device(device), dtype)) > _ROUNDINGS:
                raise ArithmeticError(f"{difference:.1f} roundings off in {dtype}")
    except Exception as error:  # a compiler, a driver, an old card: whatever it is, plain torch works
        log.warning(
            "Triton's kernels are not used on %s: %s. Plain torch does the same, somewhat slower.", device, error
        )
        return None
    return triton_kernels


@torch.no_grad()
def trial(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> float:
    """How far the kernels are from plain torch on numbers of all sizes, in roundings of the dtype.

    On halves of one tensor and on a slab of tokens, as a block uses them. Infinite where one result is not finite.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    made = random(2, 33, 2 * 130) * torch.logspace(-3, 2, 33, device=device)[:, None]
    up, gate = made.to(dtype).chunk(2, dim=-1)
    x, y, row = up[:, 3:20], gate[:, 3:20], random(2, 1, 130)
    unscale = ops.Unscale(16.0, row.new_full((1,), 16.0))
    pairs = [(kernels.gated_add(x, y, row, keep=True), ops.gated_add(x, y, row))]
    norm = _norm(random(130))
    normed = kernels.modulated_norm(x, norm_weight(norm, x), norm.eps, unscale, row, row, dtype)
    pairs.append((normed, ops.modulated_norm(norm, x, unscale, row, row, dtype)))
    heads, angle, norm = up[..., :96].view(2, 33, 3, 32), random(1, 33, 1, 16), _norm(random(32))
    rope = torch.cat((angle, angle), dim=-1).cos(), angle.sin()
    turned = kernels.norm_rope(heads.clone(), norm_weight(norm, heads), norm.eps, rope, dtype)
    pairs.append((turned, ops.norm_rope(norm, heads, rope, dtype)))
    plain = ops.situ(up, gate, 0.5)
    pairs.append((kernels.situ(up, gate, 0.5), plain))
    return max(_roundings(one, other) for one, other in pairs)


def _norm(weight: Tensor) -> ops.RMSNorm:
    norm = ops.RMSNorm(len(weight), 1e-6, device=weight.device, dtype=torch.float32)
    norm.weight.copy_(weight)
    return norm


def _roundings(one: Tensor, other: Tensor) -> float:
    """The largest difference in roundings of the largest number in the row."""
    step = torch.finfo(other.dtype).eps * other.float().abs().amax(dim=-1, keepdim=True)
    return float(((one.float() - other.float()).abs() / step).nan_to_num(nan=float("inf")).max())
