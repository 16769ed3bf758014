"""MOSS-Image: one forward over any module tree that has the official names, under any stream plan.

The tree may be `MossDiT` below, or another runtime's class with the same names (split or fused qkv): modules are only
called, never read, so LoRA, quantization, casting and offloading inside them keep working.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..arch import MossArch
from ..scaling.plan import BlockScale, StreamPlan
from . import ops
from .modules import JointBlock, Maker, PlainLayers, Rope, TextEmbedder
from .observer import Observer


class Attention(Protocol):
    """q, k, v [B, H, S, Dh], keep [B, 1, 1, S] bool or None -> [B, S, H*Dh]; scale Dh^-1/2."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor: ...


#: The rows of the shared modulation and of the head's, as they are told to an observer.
MODULATION = ("shift_a", "scale_a", "gate_a", "shift_f", "scale_f", "gate_f")
HEAD_MODULATION = ("head_shift", "head_scale")

#: Runs a joint block, or something in its place: (stream, run_the_block) -> stream.
BlockReplacement = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """torch's scaled dot product attention."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2)


def skip_block(x: Tensor, _run: Callable[[Tensor], Tensor]) -> Tensor:
    """The replacement that leaves a block out."""
    return x


@dataclass(frozen=True)
class Run:
    """Everything of one call that its blocks share. keep: text tokens that are real [B, T] bool, or None for all."""

    arch: MossArch
    plan: StreamPlan
    dtype: torch.dtype
    observer: Observer
    attention: Attention
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

    def tell(self, kind: str, layer: int, value: Tensor, scale: float = 1.0) -> None:
        if self.observer.wants_inner:
            self.observer.inner(kind, layer, value, scale)


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
) -> Tensor:
    """The flow velocity [B, C, h, w], fp32.

    x [B, C, h, w] latent, sigma [B] in 0..1, context [B, T, text_dim], mask [B, T] true where a text token is real.
    dtype: the compute dtype of linears and attention (x's own if None). replace: joint blocks to run otherwise, by
    index (`skip_block` leaves one out; the rescale between blocks happens all the same). Raises MossError for a
    per-block factor list of the wrong length.
    """
    dtype = dtype or x.dtype
    _, _, h, w = x.shape
    keep = None if mask is None else mask.to(torch.bool)
    if keep is not None:
        context = context.masked_fill(~keep[..., None], 0)  # whatever the padding holds, 0 * NaN must not reach a key
    places, length = ops.text_positions(keep, context.shape[1], x.device)
    mod, head = conditioning(tree, arch, sigma)
    run = Run(
        arch=arch,
        plan=plan,
        dtype=dtype,
        observer=observer or Observer(),
        attention=attention,
        image_tokens=h * w,
        keep=keep,
        rope=ops.rope_table(ops.rope_bands(arch.head_dim, arch.rope_base, x.device), h, w, places, length),
        mod=mod,
    )
    for row, name in enumerate(MODULATION):
        run.tell(name, 0, mod[row])
    for row, name in enumerate(HEAD_MODULATION):
        run.tell(name, 0, head[:, row])
    text = text_stream(tree, context.to(dtype), run)
    image = tree.video_embedder(x.to(dtype).flatten(2).transpose(1, 2))
    stream = joint_blocks(tree, torch.cat((_enter(image, plan), text), dim=1), run, replace or {})
    v = velocity(tree, stream[:, : h * w], head, run)
    return v.transpose(1, 2).reshape(x.shape[0], -1, h, w)


def conditioning(tree: Any, arch: MossArch, sigma: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The blocks' (shift_a, scale_a, gate_a, shift_f, scale_f, gate_f), each [B, 1, D]; the head's [B, 2, D]; fp32."""
    first, second = tree.time_embedding[0], tree.time_embedding[2]
    time = second(F.silu(first(ops.sinusoid(sigma, arch.freq_dim, arch.time_scale)))).float()
    mod = tree.shared_block_modulation(time).float().view(-1, 6, arch.dim)
    head = tree.video_head_modulation(time).float().view(-1, 2, arch.dim)
    return tuple(row[:, None] for row in mod.unbind(1)), head


def velocity(tree: Any, image: Tensor, head: Tensor, run: Run) -> Tensor:
    """Image tokens of the stream [B, N, D] -> velocity tokens [B, N, C]: a sliver of the work, so in fp32.

    In fp16 this one projection made up to nine tenths of the whole model's rounding error on the golden models.
    """
    shift, scale = head[:, :1], head[:, 1:]
    unscale = run.plan.exit_unscale(run.arch.depth)
    y = ops.modulated_norm(tree.final_norm_video, image, unscale, scale, shift, torch.float32)
    v: Tensor = tree.final_linear_video(y)
    return v


def _enter(y: Tensor, plan: StreamPlan) -> Tensor:
    """An embedder's output, onto the stream: its scale and its dtype."""
    y = y.float() if plan.fp32_stream else y
    return y if plan.entry == 1.0 else y * plan.entry


def text_stream(tree: Any, context: Tensor, run: Run) -> Tensor:
    """The refined text tokens [B, T, D] at the stream's entry scale c_0."""
    embedder, plan, dtype = tree.text_embedder, run.plan, run.dtype
    rope = (run.rope[0][:, run.image_tokens :], run.rope[1][:, run.image_tokens :])
    x, keys, unscale = _enter(embedder.proj(context), plan), run.text_keys(), plan.unscale(plan.entry)
    run.tell("text_entry", 0, x, plan.entry)
    for i in range(run.arch.text_blocks):
        block = embedder.blocks[i]
        y = ops.plain_norm(block.norm1, x, unscale, dtype)
        q, k, v = _heads(block.qkv(y), run.arch.head_dim)
        q, k = _position(block, q, k, rope, dtype)
        run.tell("text_q", i, q)
        run.tell("text_k", i, k)
        y = block.proj(run.attention(q, k, v.transpose(1, 2), keys))
        x = torch.add(x, y, alpha=plan.entry)
        run.tell("text_o", i, y)
        run.tell("text_mid", i, x, plan.entry)
        y = ops.plain_norm(block.norm2, x, unscale, dtype)
        y = block.ffn_down(ops.situ(block.ffn_up(y), block.ffn_gate(y)))
        x = torch.add(x, y, alpha=plan.entry)
        run.tell("text_ffn_down", i, y)
        run.observer.stream(i, x)
    return x


def joint_blocks(tree: Any, x: Tensor, run: Run, replace: Mapping[int, BlockReplacement]) -> Tensor:
    """All joint blocks over the stream [B, N + T, D]."""
    scales = run.plan.blocks(run.arch.depth)
    keys = run.joint_keys()
    run.tell("entry", 0, x, run.plan.entry)
    for i, scale in enumerate(scales):
        if scale.rescale != 1.0:
            x = x * scale.rescale

        def block(stream: Tensor, i: int = i, scale: BlockScale = scale) -> Tensor:
            if i in replace:
                stream = (
                    stream.clone()
                )  # the block works in place, but its replacement may still want what it was given
            stream = joint_block(tree.layers[i], stream, i, scale, run, keys)
            run.observer.stream(run.arch.text_blocks + i, stream)  # here, so that a block left out is not counted
            return stream

        x = replace[i](x, block) if i in replace else block(x)
    return x


def joint_block(block: Any, x: Tensor, layer: int, scale: BlockScale, run: Run, keys: Tensor | None) -> Tensor:
    """One joint block: attention and SiTU feed-forward, each modulated, gated and added to the stream."""
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = run.mod
    y = ops.modulated_norm(block.norm1, x, scale.unscale, scale_a, shift_a, run.dtype)
    y = attend(block, y, layer, run, keys)
    y = block.proj.o(_times(y, scale.s_attn))
    run.tell("o", layer, y, scale.s_attn)
    x = _clamp(ops.gated_add(x, y, _times(gate_a, scale.gate_attn)), layer, run)
    run.tell("mid", layer, x, scale.gate_attn * scale.s_attn)

    y = ops.modulated_norm(block.norm2, x, scale.unscale, scale_f, shift_f, run.dtype)
    y = block.proj.ffn_up_gate(y)
    run.tell("ffn_up_gate", layer, y)
    y = block.proj.ffn_down(_times(ops.situ(*y.chunk(2, dim=-1)), scale.s_ffn))
    run.tell("ffn_down", layer, y, scale.s_ffn)
    return _clamp(ops.gated_add(x, y, _times(gate_f, scale.gate_ffn)), layer, run)


def attend(block: Any, y: Tensor, layer: int, run: Run, keys: Tensor | None) -> Tensor:
    """Joint attention of the normed stream [B, S, D] -> [B, S, D], before the output projection."""
    q, k, v = project(block.proj, y, run.arch.head_dim)
    q, k = _position(block, q, k, run.rope, run.dtype)
    run.tell("q", layer, q)
    run.tell("k", layer, k)
    return run.attention(q, k, v.transpose(1, 2), keys)


def _position(
    block: Any, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Per-head RMSNorm and RoPE in fp32, one rounding: [B, S, H, Dh] -> [B, H, S, Dh]."""
    q = ops.rotate(block.q_norm(q.float()), rope, dtype).transpose(1, 2)
    k = ops.rotate(block.k_norm(k.float()), rope, dtype).transpose(1, 2)
    return q, k


def project(proj: Any, y: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [B, S, H, Dh] from split or fused projections.

    A runtime may have a stand-in for the fused one where they are split; it is called unless it says that it is idle.
    """
    fused = getattr(proj, "qkv", None)
    if fused is not None and not getattr(fused, "idle", False):
        return _heads(fused(y), head_dim)
    q, k, v = (_split(getattr(proj, name)(y), head_dim) for name in "qkv")
    return q, k, v


def _heads(qkv: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_split(t, head_dim) for t in qkv.chunk(3, dim=-1))
    return q, k, v


def _split(t: Tensor, head_dim: int) -> Tensor:
    """[B, S, H*Dh] -> [B, S, H, Dh]."""
    return t.reshape(*t.shape[:2], -1, head_dim)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _clamp(x: Tensor, layer: int, run: Run) -> Tensor:
    limit = run.plan.clamp
    if limit is None:
        return x
    run.observer.clamping(run.arch.text_blocks + layer, x, limit)
    return x.clamp_(-limit, limit)


class MossDiT(nn.Module):
    """The built-in class: parameters under the official names, forward by `run_dit`.

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
        new = Maker(operations, arch.eps, device, dtype)
        wide = dataclasses.replace(new, dtype=torch.float32)
        self.video_embedder = new.linear(arch.latent_channels, arch.dim)
        self.text_embedder = TextEmbedder(arch, new)
        self.rope = Rope(arch, device)
        self.time_embedding = nn.Sequential(
            wide.linear(arch.freq_dim, arch.dim), nn.SiLU(), wide.linear(arch.dim, arch.dim)
        )
        self.shared_block_modulation = wide.linear(arch.dim, 6 * arch.dim)
        self.layers = nn.ModuleList(JointBlock(arch, new, fused) for _ in range(arch.depth))
        self.final_norm_video = new.norm(arch.dim)
        self.final_linear_video = wide.linear(arch.dim, arch.latent_channels, bias=False)
        self.video_head_modulation = wide.linear(arch.dim, 2 * arch.dim)

    def forward(self, x: Tensor, sigma: Tensor, context: Tensor, **options: Any) -> Tensor:
        """See `run_dit`."""
        options.setdefault("plan", StreamPlan())
        return run_dit(self, self.arch, x, sigma, context, **options)
