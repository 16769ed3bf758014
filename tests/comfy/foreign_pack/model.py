"""A second MOSS-Image class, in the style of ComfyUI's late-2026 models: what survives patching and what does not.

norm + modulation are one fused call that reads the norm's weight and eps and never calls the module; q, k, v are one
projection; gated residuals are in place; every block ends in a clip for fp16. With `Built.plain` it is of the older
style: every module is called, q, k and v are apart, nothing is in place.

`Built` says in what a class differs from MOSS-Image, as a class that nobody here has read may.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import comfy.ops
import comfy.patcher_extension
import comfy.quant_ops
import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import optimized_attention
from torch import nn


@dataclass(frozen=True)
class Built:
    """How a class is built. The defaults are MOSS-Image.

    writer: amplitude of a writer to the stream without a module. later: that writer is idle in pure noise. rope:
    image positions are moved by this many pixels. stretch: positions are scaled by this much in latents of more than
    8 pixels a side. swapped: the halves of the time embedding are. drops_mask: the text mask is not looked at. eps: the
    norms' own, whatever their attribute says.
    """

    plain: bool = False
    writer: float = 0.0
    later: bool = False
    rope: float = 0.0
    stretch: float = 1.0
    swapped: bool = False
    drops_mask: bool = False
    eps: float | None = None

    @staticmethod
    def from_environment():
        """From the file that MOSS_FOREIGN_CLASS names, which holds "writer=0.5 rope=0.5" and is read at every load."""
        file = os.environ.get("MOSS_FOREIGN_CLASS")
        given = dict(part.split("=") for part in (Path(file).read_text("utf-8").split() if file else ()))
        return Built(**{name: float(value) for name, value in given.items()})


def eps_of(norm):
    return getattr(norm, "fixed_eps", None) or norm.eps


def fused_norm(norm, x, scale, shift):
    weight = comfy.ops.cast_to_input(norm.weight, x)
    return comfy.quant_ops.ck.rms_adaln(x, (1 + scale) * weight - 1, shift, eps_of(norm))


def plain_norm(norm, x):
    return F.rms_norm(x, norm.weight.shape, comfy.ops.cast_to_input(norm.weight, x), eps_of(norm))


def modulated(norm, x, scale, shift):
    y = plain_norm(norm, x) if hasattr(norm, "fixed_eps") else norm(x)
    return y * (1 + scale) + shift


def attention(q, k, v, heads, keep, transformer_options):
    """[B, H, S, Dh] -> [B, S, D]. keep: the keys that are real, [B, S] bool, or None for all."""
    if keep is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None]).transpose(1, 2).flatten(2)
    return optimized_attention(q, k, v, heads, skip_reshape=True, transformer_options=transformer_options)


def situ(up, gate):
    u, g = up.float(), gate.float()
    return ((4 * torch.tanh(g / 4) * torch.sigmoid(g)) * (25 * torch.tanh(u / 25))).to(up.dtype)


def apply_rope(x, freqs):
    # x [B, S, H, Dh], freqs complex-free: (cos, sin) [S, 1, Dh/2]
    cos, sin = freqs
    half = x.shape[-1] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class TextBlock(nn.Module):
    def __init__(self, dim, head, ffn, dtype, device, operations):
        super().__init__()
        kw = {"dtype": dtype, "device": device}
        self.norm1 = operations.RMSNorm(dim, eps=1e-6, **kw)
        self.norm2 = operations.RMSNorm(dim, eps=1e-6, **kw)
        self.q_norm = operations.RMSNorm(head, eps=1e-6, **kw)
        self.k_norm = operations.RMSNorm(head, eps=1e-6, **kw)
        self.qkv = operations.Linear(dim, 3 * dim, **kw)
        self.proj = operations.Linear(dim, dim, **kw)
        self.ffn_gate = operations.Linear(dim, ffn, **kw)
        self.ffn_up = operations.Linear(dim, ffn, **kw)
        self.ffn_down = operations.Linear(ffn, dim, **kw)
        self.heads = dim // head

    def forward(self, x, freqs, keep, transformer_options):
        b, s, _ = x.shape
        q, k, v = self.qkv(plain_norm(self.norm1, x)).view(b, s, 3, self.heads, -1).unbind(2)
        q, k = apply_rope(plain_norm(self.q_norm, q), freqs), apply_rope(plain_norm(self.k_norm, k), freqs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        x += self.proj(attention(q, k, v, self.heads, keep, transformer_options))
        y = plain_norm(self.norm2, x)
        x += self.ffn_down(situ(self.ffn_up(y), self.ffn_gate(y)))
        return x


class Projections(nn.Module):
    def __init__(self, dim, ffn, plain, dtype, device, operations):
        super().__init__()
        kw = {"dtype": dtype, "device": device, "bias": False}
        for name in "qkv" if plain else ():
            setattr(self, name, operations.Linear(dim, dim, **kw))
        if not plain:
            self.qkv = operations.Linear(dim, 3 * dim, **kw)
        self.o = operations.Linear(dim, dim, **kw)
        self.ffn_up_gate = operations.Linear(dim, 2 * ffn, **kw)
        self.ffn_down = operations.Linear(ffn, dim, **kw)


class Block(nn.Module):
    plain = False

    def __init__(self, dim, head, ffn, dtype, device, operations):
        super().__init__()
        kw = {"dtype": dtype, "device": device}
        self.norm1 = operations.RMSNorm(dim, eps=1e-6, **kw)
        self.norm2 = operations.RMSNorm(dim, eps=1e-6, **kw)
        self.q_norm = operations.RMSNorm(head, eps=1e-6, **kw)
        self.k_norm = operations.RMSNorm(head, eps=1e-6, **kw)
        self.proj = Projections(dim, ffn, self.plain, dtype, device, operations)
        self.heads = dim // head

    def forward(self, x, vec, freqs, keep=None, transformer_options=None):
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = vec
        b, s, _ = x.shape
        y = fused_norm(self.norm1, x, scale_a, shift_a)
        q, k, v = self.proj.qkv(y).view(b, s, 3, self.heads, -1).unbind(2)
        patches, extra = (transformer_options or {}).get("patches", {}), dict(transformer_options or {})
        for patch in patches.get("attn1_patch", []):
            heads_first = (t.transpose(1, 2) for t in (q, k, v))
            changed = patch(*heads_first, pe=freqs, attn_mask=None, extra_options=extra)
            q, k, v = (changed[n].transpose(1, 2) if n in changed else t for n, t in zip("qkv", (q, k, v), strict=True))
        q, k = apply_rope(plain_norm(self.q_norm, q), freqs), apply_rope(plain_norm(self.k_norm, k), freqs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = attention(q, k, v, self.heads, keep, transformer_options)
        for patch in patches.get("attn1_output_patch", []):
            y = patch(y, extra)
        x.addcmul_(self.proj.o(y), gate_a)
        y = fused_norm(self.norm2, x, scale_f, shift_f)
        up, gate = self.proj.ffn_up_gate(y).chunk(2, dim=-1)
        x.addcmul_(self.proj.ffn_down(situ(up, gate)), gate_f)
        if x.dtype == torch.float16:
            x = x.clip(-65504, 65504)
        return x


class PlainBlock(Block):
    """The same function in the older style."""

    plain = True

    def forward(self, x, vec, freqs, keep=None, transformer_options=None):
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = vec
        b, s, _ = x.shape
        y = modulated(self.norm1, x, scale_a, shift_a)
        q, k, v = (getattr(self.proj, name)(y).view(b, s, self.heads, -1) for name in "qkv")
        q, k = apply_rope(plain_norm(self.q_norm, q), freqs), apply_rope(plain_norm(self.k_norm, k), freqs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        x = x + self.proj.o(attention(q, k, v, self.heads, keep, transformer_options)) * gate_a
        up, gate = self.proj.ffn_up_gate(modulated(self.norm2, x, scale_f, shift_f)).chunk(2, dim=-1)
        return x + self.proj.ffn_down(situ(up, gate)) * gate_f


class TextEmbedder(nn.Module):
    def __init__(self, text_dim, dim, head, ffn, blocks, dtype, device, operations):
        super().__init__()
        self.proj = operations.Linear(text_dim, dim, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(TextBlock(dim, head, ffn, dtype, device, operations) for _ in range(blocks))


class ForeignMoss(nn.Module):
    def __init__(
        self,
        dim,
        head_dim,
        ffn,
        text_dim,
        text_ffn,
        text_blocks,
        channels,
        depth,
        built=None,
        dtype=None,
        device=None,
        operations=None,
        **kwargs,
    ):
        super().__init__()
        self.built = built or Built()
        kw = {"dtype": dtype, "device": device}
        self.dtype, self.dim, self.head_dim = dtype, dim, head_dim
        self.in_channels = channels
        self.video_embedder = operations.Linear(channels, dim, **kw)
        self.text_embedder = TextEmbedder(text_dim, dim, head_dim, text_ffn, text_blocks, dtype, device, operations)
        self.time_embedding = nn.Sequential(
            operations.Linear(256, dim, **kw), nn.SiLU(), operations.Linear(dim, dim, **kw)
        )
        self.shared_block_modulation = operations.Linear(dim, 6 * dim, **kw)
        self.layers = nn.ModuleList(
            (PlainBlock if self.built.plain else Block)(dim, head_dim, ffn, dtype, device, operations)
            for _ in range(depth)
        )
        self.final_norm_video = operations.RMSNorm(dim, eps=1e-6, **kw)
        self.final_linear_video = operations.Linear(dim, channels, bias=False, **kw)
        self.video_head_modulation = operations.Linear(dim, 2 * dim, **kw)
        if self.built.eps is not None:
            for module in self.modules():
                if isinstance(module, operations.RMSNorm):
                    module.fixed_eps = self.built.eps

    def forward(self, x, timesteps, context, control=None, transformer_options=None, **kwargs):
        options = transformer_options or {}
        return comfy.patcher_extension.WrapperExecutor.new_class_executor(
            self._forward,
            self,
            comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options),
        ).execute(x, timesteps, context, control, options, **kwargs)

    def frequencies(self, h, w, tokens, keep, device):
        """cos and sin [B or 1, h*w + tokens, 1, Dh/2]; with a mask a text's own length counts."""
        n = self.head_dim // 8
        bands = 10000.0 ** (-torch.arange(n, device=device, dtype=torch.float32) / n)
        stretch = self.built.stretch if max(h, w) > 8 else 1.0
        y, x = torch.meshgrid(
            (torch.arange(h, device=device).float() - (h - 1) / 2 + self.built.rope) * stretch,
            (torch.arange(w, device=device).float() - (w - 1) / 2 + self.built.rope) * stretch,
            indexing="ij",
        )
        places = torch.arange(tokens, device=device).float()[None]
        lengths = torch.full((1,), float(tokens), device=device)
        if keep is not None:
            counts = keep.float().cumsum(dim=1)
            places, lengths = (counts - 1).clamp_min(0), counts[:, -1]
        b = places.shape[0]
        image = torch.zeros(b, h * w, 4, device=device)
        image[..., 1], image[..., 2], image[..., 3] = lengths[:, None], y.flatten(), x.flatten()
        text = torch.zeros(b, tokens, 4, device=device)
        text[..., 1] = places
        angle = (torch.cat((image, text), dim=1)[..., None] * bands).flatten(2)[:, :, None]
        return angle.cos(), angle.sin()

    def add_control(self, channels: int) -> None:
        """Give the class a projection of control maps, as a control adapter's loader would."""
        weight = self.video_embedder.weight
        self.control_embedder = nn.Linear(channels, self.dim, device=weight.device, dtype=weight.dtype)

    def _forward(
        self,
        x,
        timesteps,
        context,
        control=None,
        transformer_options=None,
        control_map=None,
        control_hint=None,
        attention_mask=None,
        **kwargs,
    ):
        b, _, h, w = x.shape
        n, tokens = h * w, context.shape[1]
        keep = joint = None
        if attention_mask is not None and not self.built.drops_mask:
            keep = attention_mask.reshape(attention_mask.shape[0], -1) != 0
            joint = F.pad(keep, (n, 0), value=True)
        freqs = self.frequencies(h, w, tokens, keep, x.device)
        k = torch.arange(128, device=x.device, dtype=torch.float32)
        phase = timesteps.float()[:, None] * 1000 * torch.exp(-math.log(10000.0) * k / 128)
        emb = torch.cat((phase.cos(), phase.sin())[:: -1 if self.built.swapped else 1], dim=-1).to(x.dtype)
        time = self.time_embedding(emb)
        vec = self.shared_block_modulation(time).view(b, 6, 1, self.dim).unbind(1)
        head_shift, head_scale = self.video_head_modulation(time).view(b, 2, 1, self.dim).unbind(1)

        text = self.text_embedder.proj(context)
        text_freqs = (freqs[0][:, n:], freqs[1][:, n:])
        for block in self.text_embedder.blocks:
            text = block(text, text_freqs, keep, transformer_options)
        img = self.video_embedder(x.flatten(2).transpose(1, 2))
        if self.built.writer:
            wave = torch.sin(torch.arange(img[0].numel(), device=img.device, dtype=torch.float32)).view(img[0].shape)
            amount = self.built.writer * ((1 - timesteps.float()).view(-1, 1, 1) if self.built.later else 1.0)
            img = img + (amount * wave).to(img.dtype)
        if control_map is not None:
            # a writer that nobody outside this class knows of
            img = img + control_map.to(img.dtype).mean() * 8.0
        if control_hint is not None:
            # a writer under a name that others can know
            img = img + self.control_embedder(control_hint.flatten(2).transpose(1, 2).to(img.dtype))
        x = torch.cat((img, text), dim=1)
        replaced = transformer_options.get("patches_replace", {}).get("dit", {})
        place = {"block_type": "single", "total_blocks": len(self.layers), "img_slice": [0, n]}
        for i, block in enumerate(self.layers):
            transformer_options = {**transformer_options, **place, "block_index": i}
            if ("single_block", i) in replaced:

                def wrap(args, block=block):
                    return {"img": block(args["img"], args["vec"], args["pe"], joint, args["transformer_options"])}

                args = {"img": x, "vec": vec, "pe": freqs, "transformer_options": transformer_options}
                x = replaced[("single_block", i)](args, {"original_block": wrap})["img"]
            else:
                x = block(x, vec, freqs, joint, transformer_options)
        y = fused_norm(self.final_norm_video, x[:, :n], head_scale, head_shift)
        return self.final_linear_video(y).transpose(1, 2).reshape(b, -1, h, w)
