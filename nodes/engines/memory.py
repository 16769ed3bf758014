"""What ComfyUI's memory manager is told: how much our forward needs beside the weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import comfy.model_management as mm

from ...fold.arch import MossArch
from ...fold.model.memory import activation_bytes
from ...fold.model.modules import Modules
from ...fold.scaling.plan import StreamPlan
from ..model.comfy_types import BaseModel
from ..model.foreign import unwrapped
from ..state import FixState
from .managed import ffn_slabs

#: Text tokens of a prompt whose length nobody told.
TEXT_TOKENS = 512

Shapes = Mapping[str, Sequence[Sequence[int]]]


def memory_required(
    base: BaseModel, arch: MossArch, plan: StreamPlan, input_shape: Sequence[int], cond_shapes: Shapes | None = None
) -> float:
    """Bytes of activations of one call for latents [B, C, h, w]; cond_shapes: of its conditionings, by name.

    ComfyUI asks this before it decides how much of the weights stays on the device. Where they do not fit as a whole,
    the feed-forward runs in one piece (see `ffn_slabs`), which takes more memory.
    """
    text = max((shape[1] for shape in (cond_shapes or {}).get("c_crossattn", ())), default=TEXT_TOKENS)
    needed = partial(
        activation_bytes,
        arch,
        input_shape[0],
        math.prod(input_shape[2:]),
        text,
        base.get_dtype_inference(),
        fp32_stream=plan.fp32_stream,
    )
    return float(needed(ffn_slabs=1 if _in_one_piece(base, arch, needed()) else 2))


def _in_one_piece(base: BaseModel, arch: MossArch, activations: int) -> bool:
    """Whether the weights will be brought over or converted call by call, or the device is a CPU."""
    device = mm.get_torch_device()
    if mm.is_device_cpu(device):
        return True
    tree = unwrapped(base.diffusion_model)
    block, dtype = Modules(tree, arch.names).joint_block(0), base.get_dtype_inference()
    if ffn_slabs(block, dtype, block.ffn_up_gate.weight.device) == 1:
        return True
    weights = sum(weight.nbytes for weight in tree.parameters())
    return bool(weights + activations > mm.get_total_memory(device))


@contextlib.contextmanager
def told_to_comfyui(base: BaseModel, fix: FixState) -> Iterator[None]:
    """For the length of a run that our forward computes: ComfyUI gets our estimate from the BaseModel.

    Its own formula knows the class, not the forward that runs in its place, nor an fp32 stream.
    """
    if not fix.first_rung.managed:
        yield
        return
    own = base.__dict__.get("memory_required")
    base.memory_required = partial(memory_required, base, fix.arch, fix.first_rung.plan)
    try:
        yield
    finally:
        if own is None:
            del base.memory_required
        else:
            base.memory_required = own
