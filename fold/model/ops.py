"""The pointwise pieces of MOSS-Image: sinusoid, SiTU, RoPE, the gated add, and the two parameter layers.

The pieces are fp32 inside and round once on the way out; `Linear` and `RMSNorm` compute in their input's dtype. Nothing
is ever float64, and nothing works in place, so that gradients and compilers can follow. `kernels.Slabs` does the same
in little memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: The largest magnitude of SiTU: 4 * 25.
SITU_PEAK = 100.0


class Unscale(NamedTuple):
    """What the norms multiply the stream by, as a number and as an fp32 tensor [1] on the device."""

    value: float
    tensor: Tensor


#: Where oneDNN has no fp16, torch's fp16 products on a CPU are several times slower than fp32 ones.
_CPU_HAS_FP16 = bool(
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)()
)


def product_dtype(x: Tensor) -> torch.dtype:
    """What products of x are computed in: its dtype, but fp32 for fp16 on a CPU that is slow at it.

    Either way sums are fp32 and the result is rounded to fp16 once.
    """
    slow = x.dtype == torch.float16 and x.device.type == "cpu" and not _CPU_HAS_FP16
    return torch.float32 if slow else x.dtype


class Linear(nn.Linear):
    """A linear that computes in its input's dtype whatever dtype it stores (see `product_dtype`)."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if (dtype := product_dtype(x)) != x.dtype and x.shape[:-1].numel() >= _MANY_ROWS:
            return wide_linear(x, weight, bias, dtype)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


#: From so many rows on, widening a weight takes less time than it saves.
_MANY_ROWS = 8
#: Elements of a weight that are widened at a time: they stay in a CPU's cache.
_WIDENED = 2**20


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A linear of operands rounded to x's dtype, computed in a wider one and rounded once to x's."""
    wide, rows = x.to(dtype), max(1, _WIDENED // weight.shape[1])
    parts = []
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        y = F.linear(wide, weight[part].to(x.dtype).to(dtype))
        y = y if bias is None else y + bias[part].to(x.dtype)
        parts.append(y.to(x.dtype))
    return torch.cat(parts, dim=-1)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in the input's dtype."""

    def __init__(self, dim: int, eps: float, device: torch.device | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def sinusoid(sigma: Tensor, freq_dim: int, time_scale: float) -> Tensor:
    """[B] sigmas in 0..1 -> [B, freq_dim] fp32 as [cos | sin], frequencies 10000^(-k / half)."""
    half = freq_dim // 2
    steps = torch.arange(half, device=sigma.device, dtype=torch.float32)
    frequencies = torch.exp(steps * (-math.log(10000.0) / half))
    phase = (sigma.float() * time_scale)[:, None] * frequencies
    return torch.cat((phase.cos(), phase.sin()), dim=-1)


def situ(up: Tensor, gate: Tensor, factor: float = 1.0) -> Tensor:
    """factor * (4 tanh(g/4) sigmoid(g)) * (25 tanh(u/25)) in fp32, rounded once to `up`'s dtype."""
    g, u = gate.float(), up.float()
    return (times_sigmoid(torch.tanh(g * 0.25), g) * (SITU_PEAK * factor) * torch.tanh(u * 0.04)).to(up.dtype)


def times_sigmoid(x: Tensor, g: Tensor) -> Tensor:
    """x * sigmoid(g), as the gradient of softplus, which is just that in one pass."""
    out: Tensor = torch.ops.aten.softplus_backward(x, g, 1.0, 20.0)  # above 20 sigmoid is 1 in fp32
    return out


def rope_bands(head_dim: int, base: float, device: torch.device) -> Tensor:
    """[Dh/8] fp32: base^(-j/n), n = Dh/8."""
    n = head_dim // 8
    return torch.exp(torch.arange(n, device=device, dtype=torch.float32) * (-math.log(base) / n))


def text_positions(keep: Tensor | None, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each text token's place [B or 1, T] and each sample's text length [B or 1], fp32; padding takes no place."""
    if keep is None:
        return (
            torch.arange(tokens, device=device, dtype=torch.float32)[None],
            torch.full((1,), float(tokens), device=device),
        )
    count = keep.to(torch.float32).cumsum(dim=1)
    return (count - 1).clamp_(min=0), count[:, -1]


def rope_table(bands: Tensor, h: int, w: int, text: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """cos [B or 1, h*w + T, 1, Dh] (its two halves alike) and sin [B or 1, h*w + T, 1, Dh/2], fp32, for the joint
    order [image row-major ; text].

    Four axes of Dh/8 bands: text token t sits at (0, t, 0, 0), image token (y, x) at
    (0, T, y - (h-1)/2, x - (w-1)/2) with T the sample's own text length.
    """
    device, batch = bands.device, text.shape[0]
    y = torch.arange(h, device=device, dtype=torch.float32) - (h - 1) / 2
    x = torch.arange(w, device=device, dtype=torch.float32) - (w - 1) / 2
    image = torch.zeros(batch, h, w, 4, device=device)
    image[..., 1] = length[:, None, None]
    image[..., 2] = y[None, :, None]
    image[..., 3] = x[None, None, :]
    words = torch.zeros(batch, text.shape[1], 4, device=device)
    words[..., 1] = text
    places = torch.cat((image.view(batch, h * w, 4), words), dim=1)
    angle = (places[..., None] * bands).flatten(-2)[:, :, None]
    cos = angle.cos()
    return torch.cat((cos, cos), dim=-1), angle.sin()


def rotate(y: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """RoPE on [B, S, H, Dh] fp32 with split-half pairs (j, j + Dh/2), rounded once to `dtype`."""
    cos, sin = rope
    a, b = y.chunk(2, dim=-1)
    turned_a, turned_b = (y * cos).chunk(2, dim=-1)
    return torch.cat((torch.addcmul(turned_a, b, sin, value=-1), torch.addcmul(turned_b, a, sin)), dim=-1).to(dtype)


def norm_rope(norm: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Per-head RMSNorm and RoPE of q or k [B, S, H, Dh] in fp32, rounded once to `dtype`."""
    return rotate(norm(x.float()), rope, dtype)


def gated_add(x: Tensor, y: Tensor, gate: Tensor, *, keep: bool = False) -> Tensor:
    """x + y * gate in fp32, rounded once to x's dtype. `keep` is for kernels that work in place: x is still needed.

    A gate rounded to fp16 first would go subnormal under a small fold factor and lose bits, so it stays fp32.
    """
    return torch.addcmul(x, y, gate).to(x.dtype)


def modulated_norm(
    norm: nn.Module, x: Tensor, unscale: Unscale | None, factor: Tensor, shift: Tensor, dtype: torch.dtype
) -> Tensor:
    """rms(x) * factor + shift in fp32, rounded once to `dtype`. See `plain_norm` for unscale."""
    return torch.addcmul(shift, plain_norm(norm, x, unscale, torch.float32), factor).to(dtype)


def plain_norm(norm: nn.Module, x: Tensor, unscale: Unscale | None, dtype: torch.dtype) -> Tensor:
    """The norm module over the stream brought back to its unfolded scale in fp32.

    unscale: a factor, or None for one. rms(c x) with eps c^2 is rms(x) with eps, so dividing by c
    leaves the module's own eps exact and nothing to patch; for a power of two the division is exact, which is what
    makes the folded fp32 output bit-equal. A tensor, not a number: one pass widens and scales, and nothing is rounded
    to x's dtype.
    """
    y: Tensor = norm(x.float() if unscale is None else x * unscale.tensor)
    return y.to(dtype)
