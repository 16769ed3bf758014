"""The pointwise pieces as one Triton kernel each: fp32 inside, one rounding. Import this only where Triton is.

All walk rows of [B, S, width] with any strides over batch and tokens and a last dimension without gaps, so that slabs
of tokens and halves of a wider tensor need no copy. NaN and infinity are passed on as plain torch does.
"""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ops import SITU_PEAK, Unscale

_BLOCK = 1024


@triton.jit
def _tanh(x):
    # near zero by its series, where the quotient would lose digits
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    e = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.2, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def _situ_kernel(up, gate, tokens, width, up_batch, up_token, gate_batch, gate_token, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = up + batch * up_batch + token * up_token + column
    u = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + batch * gate_batch + token * gate_token + column, mask=inside, other=0.0).to(tl.float32)
    out = _tanh(g * 0.25) / (1.0 + tl.exp(-g)) * factor * _tanh(u * 0.04)
    tl.store(place, out.to(up.dtype.element_ty), mask=inside)


@triton.jit
def _gated_add_kernel(
    x, y, gate, out, tokens, width, x_batch, x_token, y_batch, y_token, out_batch, out_token, gate_batch,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(x + batch * x_batch + token * x_token + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y + batch * y_batch + token * y_token + column, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(gate + batch * gate_batch + column, mask=inside, other=0.0).to(tl.float32)
    place = out + batch * out_batch + token * out_token + column
    tl.store(place, (a + b * c).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _modulated_norm_kernel(
    x, weight, unscale, factor, shift, out, tokens, width, x_batch, x_token, factor_batch, shift_batch, eps,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    column = tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(x + batch * x_batch + token * x_token + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        a = a * tl.load(unscale)
    a = a / tl.sqrt(tl.sum(a * a) / width + eps) * tl.load(weight + column, mask=inside, other=0.0)
    a = a * tl.load(factor + batch * factor_batch + column, mask=inside, other=0.0)
    a = a + tl.load(shift + batch * shift_batch + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, a.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rope_kernel(
    x, weight, cos, sin, out, tokens, heads, half, x_batch, x_token, x_head, out_batch, out_token, out_head,
    cos_batch, cos_token, sin_batch, sin_token, eps, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside, real = (head < heads) & (column < half), column < half
    place = x + batch * x_batch + token * x_token + head * x_head + column
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    root = tl.sqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * half) + eps)[:, None]
    a = a / root * tl.load(weight + column, mask=real, other=0.0)
    b = b / root * tl.load(weight + half + column, mask=real, other=0.0)
    c = tl.load(cos + batch * cos_batch + token * cos_token + column, mask=real, other=0.0)
    s = tl.load(sin + batch * sin_batch + token * sin_token + column, mask=real, other=0.0)
    place = out + batch * out_batch + token * out_token + head * out_head + column
    tl.store(place, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(place + half, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


def modulated_norm(
    x: Tensor, weight: Tensor, eps: float, unscale: Unscale | None, factor: Tensor, shift: Tensor, dtype: torch.dtype
) -> Tensor:
    """`ops.modulated_norm` of x [B, S, D] with an fp32 weight [D]; factor and shift [B or 1, 1, D] fp32."""
    batch, tokens, width = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _modulated_norm_kernel[(batch * tokens,)](
        x, weight, weight if unscale is None else unscale.tensor, factor, shift, out, tokens, width, x.stride(0),
        x.stride(1), _batch_stride(factor), _batch_stride(shift), eps, SCALED=unscale is not None,
        BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


def norm_rope(x: Tensor, weight: Tensor, eps: float, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """`ops.norm_rope` of x [B, S, H, Dh] with an fp32 weight [Dh]; x is overwritten where it has the dtype."""
    cos, sin = rope
    batch, tokens, heads, width = x.shape
    out = x if x.dtype == dtype else torch.empty(x.shape, dtype=dtype, device=x.device)
    _norm_rope_kernel[(batch * tokens,)](
        x, weight, cos, sin, out, tokens, heads, width // 2, x.stride(0), x.stride(1), x.stride(2), out.stride(0),
        out.stride(1), out.stride(2), _batch_stride(cos), cos.stride(1), _batch_stride(sin), sin.stride(1), eps,
        HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(width // 2),
    )  # fmt: skip
    return out


def situ(up: Tensor, gate: Tensor, factor: float) -> Tensor:
    """`ops.situ` of up and gate [B, S, F]; the result takes `up`'s place."""
    _, tokens, width = up.shape
    _situ_kernel[_grid(up)](
        up, gate, tokens, width, up.stride(0), up.stride(1), gate.stride(0), gate.stride(1), SITU_PEAK * factor,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return up


def gated_add(x: Tensor, y: Tensor, gate: Tensor, *, keep: bool) -> Tensor:
    """`ops.gated_add` of x and y [B, S, D] with gate [B or 1, 1, D]; x is overwritten unless it is to be kept."""
    out = torch.empty_like(x) if keep else x
    _, tokens, width = x.shape
    _gated_add_kernel[_grid(x)](
        x, y, gate, out, tokens, width, x.stride(0), x.stride(1), y.stride(0), y.stride(1), out.stride(0),
        out.stride(1), _batch_stride(gate), BLOCK=_BLOCK,
    )  # fmt: skip
    return out


def _grid(x: Tensor) -> tuple[Any, ...]:
    return (x.shape[0] * x.shape[1], triton.cdiv(x.shape[2], _BLOCK))


def _batch_stride(x: Tensor) -> int:
    """Zero where all of a batch share one row."""
    return x.stride(0) if x.shape[0] > 1 else 0


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels can walk these: no gaps in the last dimension."""
    return all(tensor.stride(-1) == 1 for tensor in tensors)
