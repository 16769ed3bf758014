"""A second MOSS-Image class, in the style of ComfyUI's late-2026 models: what survives patching and what does not.

norm + modulation are one fused call that reads the norm's weight and eps and never calls the module; q, k, v are one
projection; gated residuals are in place; every block ends in a clip for fp16.
"""

from __future__ import annotations

import math

import comfy.ops
import comfy.patcher_extension
import comfy.quant_ops
import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import optimized_attention
from torch import nn


def fused_norm(norm, x, scale, shift):
    weight = comfy.ops.cast_to_input(norm.weight, x)
    return comfy.quant_ops.ck.rms_adaln(x, (1 + scale) * weight - 1, shift, norm.eps)


def plain_norm(norm, x):
    return F.rms_norm(x, norm.weight.shape, comfy.ops.cast_to_input(norm.weight, x), norm.eps)


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

    def forward(self, x, freqs, transformer_options):
        b, s, _ = x.shape
        q, k, v = self.qkv(plain_norm(self.norm1, x)).view(b, s, 3, self.heads, -1).unbind(2)
        q, k = apply_rope(plain_norm(self.q_norm, q), freqs), apply_rope(plain_norm(self.k_norm, k), freqs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = optimized_attention(q, k, v, self.heads, skip_reshape=True, transformer_options=transformer_options)
        x += self.proj(y)
        y = plain_norm(self.norm2, x)
        x += self.ffn_down(situ(self.ffn_up(y), self.ffn_gate(y)))
        return x


class Projections(nn.Module):
    def __init__(self, dim, ffn, dtype, device, operations):
        super().__init__()
        kw = {"dtype": dtype, "device": device, "bias": False}
        self.qkv = operations.Linear(dim, 3 * dim, **kw)
        self.o = operations.Linear(dim, dim, **kw)
        self.ffn_up_gate = operations.Linear(dim, 2 * ffn, **kw)
        self.ffn_down = operations.Linear(ffn, dim, **kw)


class Block(nn.Module):
    def __init__(self, dim, head, ffn, dtype, device, operations):
        super().__init__()
        kw = {"dtype": dtype, "device": device}
        self.norm1 = operations.RMSNorm(dim, eps=1e-6, **kw)
        self.norm2 = operations.RMSNorm(dim, eps=1e-6, **kw)
        self.q_norm = operations.RMSNorm(head, eps=1e-6, **kw)
        self.k_norm = operations.RMSNorm(head, eps=1e-6, **kw)
        self.proj = Projections(dim, ffn, dtype, device, operations)
        self.heads = dim // head

    def forward(self, x, vec, freqs, transformer_options=None):
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
        y = optimized_attention(q, k, v, self.heads, skip_reshape=True, transformer_options=transformer_options)
        for patch in patches.get("attn1_output_patch", []):
            y = patch(y, extra)
        x.addcmul_(self.proj.o(y), gate_a)
        y = fused_norm(self.norm2, x, scale_f, shift_f)
        up, gate = self.proj.ffn_up_gate(y).chunk(2, dim=-1)
        x.addcmul_(self.proj.ffn_down(situ(up, gate)), gate_f)
        if x.dtype == torch.float16:
            x = x.clip(-65504, 65504)
        return x


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
        dtype=None,
        device=None,
        operations=None,
        **kwargs,
    ):
        super().__init__()
        kw = {"dtype": dtype, "device": device}
        self.dtype, self.dim, self.head_dim = dtype, dim, head_dim
        self.in_channels = channels
        self.video_embedder = operations.Linear(channels, dim, **kw)
        self.text_embedder = TextEmbedder(text_dim, dim, head_dim, text_ffn, text_blocks, dtype, device, operations)
        self.time_embedding = nn.Sequential(
            operations.Linear(256, dim, **kw), nn.SiLU(), operations.Linear(dim, dim, **kw)
        )
        self.shared_block_modulation = operations.Linear(dim, 6 * dim, **kw)
        self.layers = nn.ModuleList(Block(dim, head_dim, ffn, dtype, device, operations) for _ in range(depth))
        self.final_norm_video = operations.RMSNorm(dim, eps=1e-6, **kw)
        self.final_linear_video = operations.Linear(dim, channels, bias=False, **kw)
        self.video_head_modulation = operations.Linear(dim, 2 * dim, **kw)

    def forward(self, x, timesteps, context, control=None, transformer_options=None, **kwargs):
        options = transformer_options or {}
        return comfy.patcher_extension.WrapperExecutor.new_class_executor(
            self._forward,
            self,
            comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options),
        ).execute(x, timesteps, context, control, options, **kwargs)

    def frequencies(self, h, w, tokens, device):
        n = self.head_dim // 8
        bands = 10000.0 ** (-torch.arange(n, device=device, dtype=torch.float32) / n)
        y, x = torch.meshgrid(
            torch.arange(h, device=device).float() - (h - 1) / 2,
            torch.arange(w, device=device).float() - (w - 1) / 2,
            indexing="ij",
        )
        zero = torch.zeros(h * w, device=device)
        image = torch.stack((zero, zero + tokens, y.flatten(), x.flatten()), dim=1)
        text = torch.zeros(tokens, 4, device=device)
        text[:, 1] = torch.arange(tokens, device=device)
        angle = (torch.cat((image, text))[..., None] * bands).flatten(1)[:, None]
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
        **kwargs,
    ):
        b, _, h, w = x.shape
        n, tokens = h * w, context.shape[1]
        freqs = self.frequencies(h, w, tokens, x.device)
        k = torch.arange(128, device=x.device, dtype=torch.float32)
        phase = timesteps.float()[:, None] * 1000 * torch.exp(-math.log(10000.0) * k / 128)
        emb = torch.cat((phase.cos(), phase.sin()), dim=-1).to(x.dtype)
        time = self.time_embedding(emb)
        vec = self.shared_block_modulation(time).view(b, 6, 1, self.dim).unbind(1)
        head_shift, head_scale = self.video_head_modulation(time).view(b, 2, 1, self.dim).unbind(1)

        text = self.text_embedder.proj(context)
        text_freqs = (freqs[0][n:], freqs[1][n:])
        for block in self.text_embedder.blocks:
            text = block(text, text_freqs, transformer_options)
        img = self.video_embedder(x.flatten(2).transpose(1, 2))
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
                    return {"img": block(args["img"], args["vec"], args["pe"], args["transformer_options"])}

                args = {"img": x, "vec": vec, "pe": freqs, "transformer_options": transformer_options}
                x = replaced[("single_block", i)](args, {"original_block": wrap})["img"]
            else:
                x = block(x, vec, freqs, transformer_options)
        y = fused_norm(self.final_norm_video, x[:, :n], head_scale, head_shift)
        return self.final_linear_video(y).transpose(1, 2).reshape(b, -1, h, w)
