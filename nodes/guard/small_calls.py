"""The same model call on less: a strip of the latent and the ends of the text, where nothing in the call is tied to
their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from .call import ModelCall

#: Tokens kept of each end of a text: what is real and what pads it are at its ends.
TEXT_END = 32
#: The shortest strip, in latent pixels.
SHORTEST = 8
#: Sigma of the small call where the call's own is larger: a part of a class that is idle in pure noise shows, too.
SIGMA = 0.6


@dataclass(frozen=True)
class SmallCall:
    """A call to prove a rung on. what: in words, for the report. whole: all of the latent."""

    call: ModelCall
    what: str
    whole: bool = False


def small_calls(call: ModelCall) -> Iterator[SmallCall]:
    """Calls to prove a rung on, each cheaper than the one before; without other packs' wrappers.

    A strip keeps the latent's longer side, since positions may depend on it, and two or three pixels of the other, so
    that odd sizes stay odd. Where a conditioning is tied to the latent's size there is only the call itself.
    """
    if is_tied_to_size(call):
        yield whole_call(call)
        return
    bare = _at_sigma(call.bare())
    h, w = call.x.shape[-2:]
    narrow, long = _even(min(h, w), 2), max(h, w)
    while True:
        size = (long, narrow) if h >= w else (narrow, long)
        yield SmallCall(_strip(bare, size), f"a strip of the latent ({size[0]} x {size[1]} of {h} x {w})")
        if long <= SHORTEST:
            return
        long = _even(long, max(SHORTEST, long // 2))


def whole_call(call: ModelCall) -> SmallCall:
    """The call itself, for a class that cannot run on a part of it."""
    h, w = call.x.shape[-2:]
    return SmallCall(_at_sigma(call.bare()), f"the whole call ({h} x {w})", whole=True)


def _even(size: int, wanted: int) -> int:
    """About `wanted`, at most `size`, and odd where that is."""
    return min(size, wanted - wanted % 2 + size % 2)


def is_tied_to_size(call: ModelCall) -> bool:
    """Whether a conditioning's shape holds the latent's size or a multiple of it, or is not known."""
    if call.control is not None or call.x.dim() != 4:
        return True
    h, w = call.x.shape[-2:]
    others = [value for key, value in call.conds.items() if key not in ("c_crossattn", "attention_mask")]
    return any(_has_size(tensor.shape, h, w) for tensor in _tensors(others))


def _has_size(shape: tuple[int, ...], h: int, w: int) -> bool:
    if h * w > 1 and h * w in shape:
        return True
    return any(a % h == 0 and b % w == 0 and a // h == b // w > 0 for a, b in pairwise(shape))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _at_sigma(call: ModelCall) -> ModelCall:
    return replace(call, t=call.t.clamp(max=SIGMA))


def _strip(call: ModelCall, size: tuple[int, int]) -> ModelCall:
    """The middle of the latent, [B, C, *size], and the ends of the text."""
    h, w = call.x.shape[-2:]
    top, left = (h - size[0]) // 2, (w - size[1]) // 2
    x = call.x[..., top : top + size[0], left : left + size[1]].contiguous()
    return replace(call.with_conds(**_ends_of_text(call)), x=x)


def _ends_of_text(call: ModelCall) -> dict[str, Tensor]:
    """The first and last tokens of a long text, and of its mask; nothing where another conditioning has its length."""
    context, mask = call.conds.get("c_crossattn"), call.conds.get("attention_mask")
    if not isinstance(context, Tensor) or context.dim() != 3 or context.shape[1] <= 2 * TEXT_END:
        return {}
    length = context.shape[1]
    others = [value for key, value in call.conds.items() if key not in ("c_crossattn", "attention_mask")]
    if any(length in tensor.shape for tensor in _tensors(others)):
        return {}
    cut = {"c_crossattn": _ends(context, 1)}
    if isinstance(mask, Tensor):
        if mask.shape[-1] != length or length in mask.shape[:-1]:
            return {}
        cut["attention_mask"] = _ends(mask, -1)
    return cut


def _ends(tensor: Tensor, dim: int) -> Tensor:
    length = tensor.shape[dim]
    return torch.cat((tensor.narrow(dim, 0, TEXT_END), tensor.narrow(dim, length - TEXT_END, TEXT_END)), dim=dim)
