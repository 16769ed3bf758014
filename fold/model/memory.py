"""How much memory the activations of a model call take on a device: what has to be free beside the weights."""

from __future__ import annotations

import torch

from ..arch import MossArch
from .kernels import device_slab

#: For what is small beside the stages: modulation, positions, the embedded inputs, the counters.
SAFETY = 1.04


def activation_bytes(
    arch: MossArch,
    batch: int,
    image_tokens: int,
    text_tokens: int,
    dtype: torch.dtype,
    *,
    fp32_stream: bool = False,
    ffn_slabs: int = 2,
) -> int:
    """The most that one call holds at once, in bytes, without weights: the largest of a block's stages.

    dtype: what the linears compute in. fp32_stream: the residual streams are kept in fp32. ffn_slabs: see `FfnSlabs`.
    Attention is taken to be a fused one, which has no memory for its logits.
    """
    tokens, item = batch * (image_tokens + text_tokens), dtype.itemsize
    width = tokens * arch.dim * item
    stream = tokens * arch.dim * 4 if fp32_stream else width
    # two fp32 slabs at a time, here and in SiTU, whose tensors are wider
    slabs = 2 * 4 * device_slab(tokens * arch.dim)
    rope = 4 * batch * (image_tokens + text_tokens) * arch.head_dim * 3 // 2
    part = -(-tokens // ffn_slabs)
    up_gate = part * 2 * arch.ffn_dim * item
    stages = (
        stream + 4 * width,  # q, k, v and what attention gives
        stream + 3 * width + slabs,  # q, k, v while they are normed and turned
        stream + part * arch.dim * item + up_gate,
        stream + up_gate + 2 * 4 * device_slab(part * arch.ffn_dim),  # SiTU
        stream + batch * image_tokens * arch.dim * 4 + slabs,  # the head, in fp32
    )
    return int(SAFETY * max(stages)) + rope
