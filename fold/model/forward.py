"""MOSS-Image: one forward over any tree of its modules, under any stream plan.

The tree may be `MossDiT` below, or another runtime's class with the modules of `arch.names` (q, k, v split or fused):
they are only called, never read, so LoRA, quantization, casting and offloading inside them keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..arch import MossArch
from ..names import GATE_ATTN, GATE_FFN, HEAD_MODULATION, MODULATION
from ..qkv import split
from ..scaling.plan import BlockScale, StreamPlan
from . import ops
from .fused import chosen
from .kernels import FUNCTIONAL, Kernels, slabs
from .modules import Maker, Modules, PlainLayers, build_modules
from .observer import Kind, Observer


class Attention(Protocol):
    """q, k, v [B, H, S, Dh], keep [B, 1, 1, S] bool or None -> [B, S, H*Dh]; scale Dh^-1/2.

    layer: the joint block it is called in; None in the text refiner.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, layer: int | None = None) -> Tensor: ...


#: Runs a joint block, or something in its place: (stream, run_the_block) -> stream.
BlockReplacement = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, layer: int | None = None) -> Tensor:
    """torch's scaled dot product attention."""
    dtype = ops.product_dtype(q)
    out = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=keep)
    return out.transpose(1, 2).flatten(2).to(q.dtype)


#: Into how many slabs of tokens the feed-forward of (block, compute dtype, device) is cut; each calls its two matrices.
FfnSlabs = Callable[[Modules, torch.dtype, torch.device], int]

#: Below this many tokens (of all images together) a call's memory is small however it is run.
_FEW_TOKENS = 1024


def two_slabs(_block: Modules, _dtype: torch.dtype, _device: torch.device) -> int:
    """Half the feed-forward's intermediates at a time: then attention is what needs the most memory in a block."""
    return 2


def skip_block(x: Tensor, _run: Callable[[Tensor], Tensor]) -> Tensor:
    """The replacement that leaves a block out."""
    return x


@dataclass(frozen=True)
class Run:
    """Everything of one call that its blocks share.

    keep: text tokens that are real [B, T] bool, or None for all. mod: the modulation's rows in the order of
    `MODULATION`, but 1 + scale in place of scale. ffn_slabs: see `FfnSlabs`.
    """

    arch: MossArch
    plan: StreamPlan
    dtype: torch.dtype
    observer: Observer
    attention: Attention
    kernels: Kernels
    ffn_slabs: FfnSlabs
    image_tokens: int
    keep: Tensor | None
    rope: tuple[Tensor, Tensor]
    mod: tuple[Tensor, ...]

    def joint_keys(self) -> Tensor | None:
        """Which joint tokens may be attended to, [B, 1, 1, N + T]."""
        return None if self.keep is None else F.pad(self.keep, (self.image_tokens, 0), value=True)[:, None, None]

    def text_keys(self) -> Tensor | None:
        """The same for the text refiner, [B, 1, 1, T]; a sample without any text attends to all, or it would be 0/0."""
        if self.keep is None:
            return None
        return (self.keep | ~self.keep.any(dim=1, keepdim=True))[:, None, None]

    def observe(self, kind: Kind, layer: int, value: Tensor, scale: float = 1.0) -> None:
        """Show `value`, `scale` times what it truly is, to an observer that wants values inside blocks."""
        if self.observer.wants_inner:
            self.observer.inner(kind, layer, value, scale)

    def ffn_parts(self, block: Modules, x: Tensor) -> Iterator[slice]:
        """The tokens that a block's feed-forward takes at a time.

        All at once for whoever wants to see inside, and on a CPU, whose products of half as many tokens are slower.
        """
        whole = self.observer.wants_inner or self.kernels is FUNCTIONAL or x.device.type == "cpu"
        few = x.shape[0] * x.shape[1] < _FEW_TOKENS
        return slabs(x, 1 if whole or few else self.ffn_slabs(block, self.dtype, x.device))


@dataclass(frozen=True)
class BlockTensors:
    """`BlockScale` as the kernels take it: gates [B, 1, D] with c / s in them, unscale as `ops.Unscale` or None."""

    scale: BlockScale
    gate_attn: Tensor
    gate_ffn: Tensor
    unscale: ops.Unscale | None

    @classmethod
    def of(cls, scale: BlockScale, run: Run) -> BlockTensors:
        gate_a, gate_f = run.mod[GATE_ATTN], run.mod[GATE_FFN]
        return cls(
            scale, _times(gate_a, scale.gate_attn), _times(gate_f, scale.gate_ffn), unscaling(scale.unscale, gate_a)
        )


def run_dit(
    tree: Any,
    arch: MossArch,
    x: Tensor,
    sigma: Tensor,
    context: Tensor,
    *,
    plan: StreamPlan,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
    replace: Mapping[int, BlockReplacement] | None = None,
    observer: Observer | None = None,
    attention: Attention = sdpa,
    kernels: Kernels | None = None,
    ffn_slabs: FfnSlabs = two_slabs,
) -> Tensor:
    """The flow velocity [B, C, h, w], fp32.

    x [B, C, h, w] latent, sigma [B] in 0..1, context [B, T, text_dim], mask [B, T] true where a text token is real.
    dtype: the compute dtype of linears and attention (x's own if None). replace: joint blocks to run otherwise, by
    index (`skip_block` leaves one out; the rescale between blocks happens all the same). kernels: who does the
    pointwise work (None: fused kernels where they work, else plain torch in slabs); with gradients or under a compiler
    it is plain torch that both can follow. Raises MossError for a per-block factor list of the wrong length.
    """
    dtype = dtype or x.dtype
    _, _, h, w = x.shape
    keep = None if mask is None else mask.to(torch.bool)
    if keep is not None:
        context = context.masked_fill(~keep[..., None], 0)  # whatever the padding holds, 0 * NaN must not reach a key
    places, length = ops.text_positions(keep, context.shape[1], x.device)
    modules = Modules(tree, arch.names)
    mod, head = conditioning(modules, arch, sigma)
    run = Run(
        arch=arch,
        plan=plan,
        dtype=dtype,
        observer=observer or Observer(),
        attention=attention,
        kernels=chosen(kernels, x.device),
        ffn_slabs=ffn_slabs,
        image_tokens=h * w,
        keep=keep,
        rope=ops.rope_table(ops.rope_bands(arch.head_dim, arch.rope_base, x.device), h, w, places, length),
        mod=tuple(1.0 + row if name.startswith("scale") else row for name, row in zip(MODULATION, mod, strict=True)),
    )
    if run.observer.wants_inner:
        for name, row in zip((*MODULATION, *HEAD_MODULATION), (*mod, *head.unbind(dim=1)), strict=True):
            run.observer.modulation(name, row)
    stream = joint_blocks(modules, x, context, run, replace or {})
    v = velocity(modules, stream[:, : h * w], head, run)
    return v.transpose(1, 2).reshape(x.shape[0], -1, h, w)


def entry_stream(modules: Modules, x: Tensor, context: Tensor, run: Run) -> Tensor:
    """Embedded image tokens and refined text tokens, the joint stream [B, N + T, D] before the first block."""
    text = text_stream(modules, context.to(run.dtype), run)
    image = modules.video_embedder(x.to(run.dtype).flatten(2).transpose(1, 2))
    return torch.cat((_enter(image, run.plan), text), dim=1)


def conditioning(modules: Modules, arch: MossArch, sigma: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The blocks' (shift_a, scale_a, gate_a, shift_f, scale_f, gate_f), each [B, 1, D]; the head's [B, 2, D]; fp32."""
    time = modules.time_in(ops.sinusoid(sigma, arch.freq_dim, arch.time_scale))
    time = modules.time_out(F.silu(time)).float()
    mod = modules.shared_block_modulation(time).float().view(-1, len(MODULATION), arch.dim)
    head = modules.video_head_modulation(time).float().view(-1, len(HEAD_MODULATION), arch.dim)
    return tuple(row[:, None] for row in mod.unbind(1)), head


def velocity(modules: Modules, image: Tensor, head: Tensor, run: Run) -> Tensor:
    """Image tokens of the stream [B, N, D] -> velocity tokens [B, N, C]: a sliver of the work, so in fp32.

    In fp16 this one projection made up to nine tenths of the whole model's rounding error on the golden models.
    """
    shift, factor = head[:, :1], 1.0 + head[:, 1:]
    unscale = unscaling(run.plan.exit_unscale(run.arch.depth), head)
    y = run.kernels.modulated_norm(modules.final_norm_video, image, unscale, factor, shift, torch.float32)
    v: Tensor = modules.final_linear_video(y)
    return v


def unscaling(factor: float, like: Tensor) -> ops.Unscale | None:
    """What the norms multiply the stream by, as a tensor (see `ops.plain_norm`)."""
    return None if factor == 1.0 else ops.Unscale(factor, like.new_full((1,), factor))


def _enter(y: Tensor, plan: StreamPlan) -> Tensor:
    """An embedder's output, onto the stream: its scale and its dtype."""
    y = y.float() if plan.fp32_stream else y
    return y if plan.entry == 1.0 else y * plan.entry


def text_stream(modules: Modules, context: Tensor, run: Run) -> Tensor:
    """The refined text tokens [B, T, D] at the stream's entry scale c_0."""
    plan, dtype = run.plan, run.dtype
    rope = (run.rope[0][:, run.image_tokens :], run.rope[1][:, run.image_tokens :])
    x, keys = _enter(modules.text_proj(context), plan), run.text_keys()
    unscale = unscaling(plan.unscale(plan.entry), run.mod[0])
    run.observe(Kind.TEXT_ENTRY, 0, x, plan.entry)
    for i in range(run.arch.text_blocks):
        block = modules.text_block(i)
        y = ops.plain_norm(block.norm1, x, unscale, dtype)
        q, k, v = _heads(split(block.qkv(y), dim=-1), run.arch.head_dim)
        q, k = _position(block, q, k, rope, run)
        run.observe(Kind.TEXT_Q, i, q)
        run.observe(Kind.TEXT_K, i, k)
        y = block.proj(run.attention(q, k, v.transpose(1, 2), keys))
        x = torch.add(x, y, alpha=plan.entry)
        run.observe(Kind.TEXT_O, i, y)
        run.observe(Kind.TEXT_MID, i, x, plan.entry)
        y = ops.plain_norm(block.norm2, x, unscale, dtype)
        y = block.ffn_down(run.kernels.situ(block.ffn_up(y), block.ffn_gate(y), 1.0))
        x = torch.add(x, y, alpha=plan.entry)
        run.observe(Kind.TEXT_FFN_DOWN, i, y)
        run.observer.stream(i, x)
    return x


def joint_blocks(
    modules: Modules, latent: Tensor, context: Tensor, run: Run, replace: Mapping[int, BlockReplacement]
) -> Tensor:
    """The joint stream [B, N + T, D] after all joint blocks.

    It is made in here: until Python 3.11 a caller holds on to what it hands over, and with it to a second stream.
    """
    x, keys, tensors = entry_stream(modules, latent, context, run), run.joint_keys(), None
    run.observe(Kind.ENTRY, 0, x, run.plan.entry)
    for i, scale in enumerate(run.plan.blocks(run.arch.depth)):
        if scale.rescale != 1.0:
            x = x * scale.rescale
        if tensors is None or tensors.scale != scale:  # mostly all blocks have the same
            tensors = BlockTensors.of(scale, run)

        def block(stream: Tensor, i: int = i, tensors: BlockTensors = tensors) -> Tensor:
            # a block works in place, but its replacement may still want what it was given
            stream = joint_block(modules.joint_block(i), stream, i, tensors, run, keys, keep=i in replace)
            run.observer.stream(run.arch.text_blocks + i, stream)  # here, so that a block left out is not counted
            return stream

        x = replace[i](x, block) if i in replace else block(x)
    return x


def joint_block(
    block: Modules, x: Tensor, layer: int, tensors: BlockTensors, run: Run, keys: Tensor | None, *, keep: bool = False
) -> Tensor:
    """One joint block: attention and SiTU feed-forward, each modulated, gated and added to the stream.

    x [B, S, D] is overwritten unless it is to be kept.
    """
    scale = tensors.scale
    y = block.o(_times(attend(block, x, layer, tensors, run, keys), scale.s_attn))
    run.observe(Kind.O, layer, y, scale.s_attn)
    x = _clamp(run.kernels.gated_add(x, y, tensors.gate_attn, keep=keep), layer, run)
    run.observe(Kind.MID, layer, x, scale.gate_attn * scale.s_attn)
    del y  # its memory, before the feed-forward needs some
    return _clamp(feed_forward(block, x, layer, tensors, run), layer, run)


def attend(block: Modules, x: Tensor, layer: int, tensors: BlockTensors, run: Run, keys: Tensor | None) -> Tensor:
    """Joint attention of the stream x [B, S, D] -> [B, S, D], before the output projection."""
    shift, factor = run.mod[:2]
    y = run.kernels.modulated_norm(block.norm1, x, tensors.unscale, factor, shift, run.dtype)
    q, k, v = project(block, y, run.arch.head_dim)
    del y
    q, k = _position(block, q, k, run.rope, run)
    run.observe(Kind.Q, layer, q)
    run.observe(Kind.K, layer, k)
    return run.attention(q, k, v.transpose(1, 2), keys, layer)


def feed_forward(block: Modules, x: Tensor, layer: int, tensors: BlockTensors, run: Run) -> Tensor:
    """x [B, S, D] with the gated SiTU feed-forward added, slab by slab."""
    shift, factor = run.mod[3:5]
    out = [_ffn_part(block, x[:, part], layer, tensors, (shift, factor), run) for part in run.ffn_parts(block, x)]
    return out[0] if len(out) == 1 else x  # slabs are written in place


def _ffn_part(
    block: Modules, x: Tensor, layer: int, tensors: BlockTensors, modulation: tuple[Tensor, Tensor], run: Run
) -> Tensor:
    shift, factor = modulation
    y = run.kernels.modulated_norm(block.norm2, x, tensors.unscale, factor, shift, run.dtype)
    y = block.ffn_up_gate(y)
    run.observe(Kind.FFN_UP_GATE, layer, y)
    up, gate = y.chunk(2, dim=-1)
    y = block.ffn_down(run.kernels.situ(up, gate, tensors.scale.s_ffn))
    run.observe(Kind.FFN_DOWN, layer, y, tensors.scale.s_ffn)
    return run.kernels.gated_add(x, y, tensors.gate_ffn, keep=False)


def _position(block: Modules, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], run: Run) -> tuple[Tensor, Tensor]:
    """Per-head RMSNorm and RoPE in fp32, one rounding: [B, S, H, Dh] -> [B, H, S, Dh]."""
    q = run.kernels.norm_rope(block.q_norm, q, rope, run.dtype).transpose(1, 2)
    k = run.kernels.norm_rope(block.k_norm, k, rope, run.dtype).transpose(1, 2)
    return q, k


def project(block: Modules, y: Tensor, head_dim: int) -> tuple[Tensor, ...]:
    """q, k, v as [B, S, H, Dh] from split or fused projections.

    A runtime may have a stand-in for the fused one where they are split; it is called unless it says that it is idle.
    """
    fused = block.find("qkv")
    if fused is not None and not getattr(fused, "idle", False):
        return _heads(split(fused(y), dim=-1), head_dim)
    return _heads((block.q(y), block.k(y), block.v(y)), head_dim)


def _heads(parts: tuple[Tensor, ...], head_dim: int) -> tuple[Tensor, ...]:
    """Each [B, S, H*Dh] -> [B, S, H, Dh]."""
    return tuple(part.reshape(*part.shape[:2], -1, head_dim) for part in parts)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _clamp(x: Tensor, layer: int, run: Run) -> Tensor:
    limit = run.plan.clamp
    if limit is None:
        return x
    run.observer.clamping(run.arch.text_blocks + layer, x, limit)
    return x.clamp_(-limit, limit)


class MossDiT(nn.Module):
    """The built-in class: modules under the names of `arch.names`, forward by `run_dit`.

    operations: a namespace with Linear and RMSNorm (a runtime's casting layers; plain ones by default).
    fused: one `proj.qkv` per joint block in place of q, k, v.
    """

    def __init__(
        self,
        arch: MossArch,
        *,
        fused: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        operations: Any = PlainLayers,
    ):
        super().__init__()
        self.arch, self.fused, self.dtype = arch, fused, dtype
        build_modules(self, arch, Maker(operations, arch.eps, device, dtype), fused)

    def forward(self, x: Tensor, sigma: Tensor, context: Tensor, **options: Any) -> Tensor:
        """See `run_dit`."""
        options.setdefault("plan", StreamPlan())
        return run_dit(self, self.arch, x, sigma, context, **options)
