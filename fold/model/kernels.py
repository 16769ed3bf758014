"""Who does the pointwise work of a block: plain torch in slabs, plain torch that gradients can follow, fused kernels.

Norms, q/k norm with RoPE, SiTU and the gated add are row by row, so their fp32 intermediates need not exist for all
tokens at once. A slab of tokens stays in a CPU's cache, and is small beside the stream on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from . import ops

#: Elements of a slab: what fits a core's cache; what keeps a GPU busy, but a quarter of all at most.
CPU_ELEMENTS, DEVICE_ELEMENTS, DEVICE_SHARE = 2**18, 2**22, 4


class Kernels(Protocol):
    """The four pointwise pieces; what each computes stands in `ops`. Only what is named here may be overwritten."""

    def modulated_norm(
        self, norm: nn.Module, x: Tensor, unscale: ops.Unscale | None, factor: Tensor, shift: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Overwrites nothing."""

    def norm_rope(self, norm: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """May overwrite x."""

    def situ(self, up: Tensor, gate: Tensor, factor: float) -> Tensor:
        """May overwrite up."""

    def gated_add(self, x: Tensor, y: Tensor, gate: Tensor, *, keep: bool) -> Tensor:
        """May overwrite x, unless it is to be kept."""


class Functional:
    """Nothing in place, nothing in slabs: for gradients, and for compilers, which fuse by themselves."""

    modulated_norm = staticmethod(ops.modulated_norm)
    norm_rope = staticmethod(ops.norm_rope)
    situ = staticmethod(ops.situ)

    @staticmethod
    def gated_add(x: Tensor, y: Tensor, gate: Tensor, *, keep: bool) -> Tensor:
        return ops.gated_add(x, y, gate)


class Slabs:
    """Plain torch in little memory: slab after slab, in place where the result fits.

    Bit-equal to `Functional`, but for SiTU in 16 bits on a CPU, where tanh is `near_tanh`.
    """

    def __init__(self, device: torch.device) -> None:
        # as tensors: one pass widens and scales, and nothing is rounded to 16 bits
        self.quarter, self.twenty_fifth, self.zero = (
            torch.full((1,), value, device=device) for value in (0.25, 0.04, 0.0)
        )

    def modulated_norm(
        self, norm: nn.Module, x: Tensor, unscale: ops.Unscale | None, factor: Tensor, shift: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        for part in slabs(x):
            y = ops.plain_norm(norm, x[:, part], unscale, torch.float32)
            torch.addcmul(shift, y, factor, out=out[:, part])
            del y  # or it would still be there while the next slab's is made
        return out

    def norm_rope(self, norm: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """x is overwritten where it has the dtype."""
        cos, sin = rope
        out = x if x.dtype == dtype else torch.empty(x.shape, dtype=dtype, device=x.device)
        half = x.shape[-1] // 2
        for part in slabs(x):
            y = norm(x[:, part].float())
            turned = y * cos[:, part]
            torch.addcmul(turned[..., :half], y[..., half:], sin[:, part], value=-1, out=out[:, part, :, :half])
            torch.addcmul(turned[..., half:], y[..., :half], sin[:, part], out=out[:, part, :, half:])
            del y, turned
        return out

    def situ(self, up: Tensor, gate: Tensor, factor: float) -> Tensor:
        """The result takes the place of `up`; not on a CPU, whose products in 16 bits are slower on rows with gaps."""
        on_cpu, on_mps = (up.device.type == name for name in ("cpu", "mps"))
        out = torch.empty(up.shape, dtype=up.dtype) if on_cpu else up
        tanh = near_tanh if on_cpu and up.dtype.itemsize == 2 else torch.tanh
        for part in slabs(up):
            g = gate[:, part]
            quarter = torch.mul(g, self.quarter)
            left = tanh(quarter, out=torch.empty_like(quarter) if on_mps else quarter)
            # Metal's version of the next, for which see ops.times_sigmoid, takes no two dtypes
            g, beta = (quarter, 4.0) if on_mps else (g, 1.0)
            torch.ops.aten.softplus_backward.grad_input(left, g, beta, 20.0, grad_input=left)
            del quarter, g
            right = torch.mul(up[:, part], self.twenty_fifth)
            tanh(right, out=right)
            torch.addcmul(self.zero, left, right, value=ops.SITU_PEAK * factor, out=out[:, part])
            del left, right
        return out

    def gated_add(self, x: Tensor, y: Tensor, gate: Tensor, *, keep: bool) -> Tensor:
        """x is overwritten unless it is to be kept."""
        out = torch.empty_like(x) if keep else x
        if x.device.type != "cpu" or x.dtype == y.dtype == torch.float32:
            return torch.addcmul(x, y, gate, out=out)
        for part in slabs(x):  # a CPU widens 16 bits into memory, which for a slab is its cache
            torch.addcmul(x[:, part], y[:, part], gate, out=out[:, part])
        return out


#: tanh(x) / x = P(x^2) / Q(x^2) up to 6, fitted for the smallest relative error; highest powers first.
_TANH_END = 6.0
_TANH_P = (0.0015145763, 0.11483070, 0.99999267)
_TANH_Q = (5.6271850e-05, 0.017611146, 0.44811391, 1.0)


def near_tanh(x: Tensor, *, out: Tensor) -> Tensor:
    """tanh of an fp32 tensor, off by at most 2e-5 of itself: 1/24 of fp16's rounding. NaN stays NaN. out may be x.

    On a CPU torch's own is half of SiTU's time.
    """
    torch.clamp(x, -_TANH_END, _TANH_END, out=out)
    square = out.square()
    return out.mul_(_polynomial(_TANH_P, square)).div_(_polynomial(_TANH_Q, square))


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Highest power first, by Horner's rule."""
    out = (x * coefficients[0]).add_(coefficients[1])
    for coefficient in coefficients[2:]:
        out.mul_(x).add_(coefficient)
    return out


FUNCTIONAL: Kernels = Functional()


def slabs(x: Tensor, count: int | None = None) -> Iterator[slice]:
    """Ranges of tokens of x [B, S, ...]: so many, or as many as its device's slabs need; one where x is empty."""
    batch, tokens = x.shape[:2]
    if not x.numel():
        yield slice(0, tokens)
        return
    if count is None:
        elements = CPU_ELEMENTS if x.device.type == "cpu" else device_slab(x.numel())
        step = max(1, elements // (batch * x.shape[2:].numel()))
    else:
        step = -(-tokens // count)
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def device_slab(elements: int) -> int:
    """The elements of a slab on a device, for a tensor of so many."""
    return min(DEVICE_ELEMENTS, -(-elements // DEVICE_SHARE))
