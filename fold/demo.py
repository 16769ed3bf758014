"""A synthetic checkpoint of any size, made from a seed, whose stream overflows fp16 the way the real one does.

Random weights, except that a few channels are massive: they start large, they drive one hidden unit of each FFN that
writes into them again, the gates let far more into them than into others, and the norms that read the stream hold
them down. So the stream grows to a chosen peak, block by block, while the linears work at ordinary magnitudes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from .arch import MossArch
from .checkpoint.header import header_bytes
from .errors import MossError
from .files import new_file, tensor_bytes
from .names import GATE_ATTN, GATE_FFN, MODULATION, NORMS, Role

PEAK = 2.0**17
_MASSIVE = 3
# In the stream a massive channel is this much larger than the others.
_RATIO = 64.0
# Behind a stream norm ordinary channels are of order one, massive ones this large.
_SEEN = 2.0
# What the FFN writes into a massive channel, by way of its first hidden unit, which all massive channels drive:
# situ(3, 3) for an input of _MASSIVE * _SEEN / 2.
_WRITTEN = 7.2


def demo_arch(
    dim: int = 256, depth: int = 6, heads: int = 4, *, ffn_dim: int | None = None, text_dim: int = 128
) -> MossArch:
    """The geometry of a demo model; MossError when the sizes do not go together."""
    sizes = {"dim": dim, "depth": depth, "heads": heads, "text_dim": text_dim, "ffn_dim": ffn_dim or 1}
    for name, size in sizes.items():
        if size < 1:
            raise MossError(f"{name} must be at least 1, but it is {size}.")
    if dim % (8 * heads) or dim <= _MASSIVE:
        raise MossError(f"dim must be a multiple of 8 * heads = {8 * heads}, but it is {dim}.")
    ffn_dim = ffn_dim or max(8, dim * 8 // 3 // 8 * 8)
    return MossArch(dim, depth, heads, ffn_dim, text_dim, 2, ffn_dim, 128, 256)


def write_demo(
    target: str | Path,
    arch: MossArch,
    *,
    seed: int = 0,
    peak: float = PEAK,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write the demo model in bf16 (rope.bands fp32), one tensor at a time; returns the file's size in bytes.

    ``peak`` is about where the largest |stream| ends up, within a factor of three. MossError as ``new_file``.
    """
    if not 1.0 <= peak <= 2.0**24:
        raise MossError(f"peak must lie between 1 and 2^24, but it is {peak:g}.")
    shapes, bands = arch.expected_shapes(fused=False), arch.names.rope_bands
    dtypes = {name: torch.float32 if name == bands else torch.bfloat16 for name in shapes}
    names = sorted(shapes, key=lambda name: (-dtypes[name].itemsize, name))
    entries = [
        (name, "F32" if name == bands else "BF16", shapes[name], math.prod(shapes[name]) * dtypes[name].itemsize)
        for name in names
    ]
    head = header_bytes(entries, {"title": f"synthetic MOSS-Image, seed {seed}, peak {peak:g}"})
    total = len(head) + sum(nbytes for *_, nbytes in entries)
    done = len(head)
    with new_file(target, overwrite=overwrite) as write:
        write(head)
        for name, *_, nbytes in entries:
            tensor = demo_tensor(name, shapes[name], arch, seed, peak).to(dtypes[name])
            write(tensor_bytes(tensor))
            done += nbytes
            if progress is not None:
                progress(done, total)
    return total


def demo_inputs(
    arch: MossArch, *, height: int = 8, width: int = 8, tokens: int = 12, batch: int = 1, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random fp32 inputs of one call: ``latent`` [batch, C, height, width], ``context`` [batch, tokens, text_dim]."""
    generator = torch.Generator().manual_seed(_tensor_seed("inputs", seed))
    latent = torch.randn(batch, arch.latent_channels, height, width, generator=generator, dtype=torch.float32)
    return {"latent": latent, "context": torch.randn(batch, tokens, arch.text_dim, generator=generator)}


def demo_tensor(name: str, shape: tuple[int, ...], arch: MossArch, seed: int, peak: float) -> torch.Tensor:
    """Tensor ``name`` of the demo model in fp32; each is drawn from its own generator."""
    if name == arch.names.rope_bands:
        steps = torch.arange(shape[0], dtype=torch.float32) / shape[0]
        return arch.rope_base**-steps
    generator = torch.Generator().manual_seed(_tensor_seed(name, seed))
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
    channels, signs = massive_channels(arch, seed)
    path, _, leaf = name.rpartition(".")
    part, names = arch.names.of(path), arch.names
    if part is None:
        raise KeyError(name)
    if part.role is Role.STREAM_NORM and names.block_of(path) is not names.text:
        values = (1 + 0.1 * values) * math.sqrt(1 + _MASSIVE * _RATIO**2 / arch.dim)
        values[channels] *= _SEEN / _RATIO
    elif part.role in NORMS:
        values = 1 + 0.1 * values
    elif leaf == "bias":
        values *= 0.05
    else:
        values /= math.sqrt(shape[1])
    if leaf == "bias" and path in (names.video_embedder.path, names.text_proj.path):
        values[channels] = _RATIO * signs
    elif leaf == "bias" and part.role is Role.GATES:
        _open_gates(values.view(len(MODULATION), arch.dim), channels, arch, peak)
    elif part is names.joint.ffn_up_gate:
        values[[0, arch.ffn_dim]] = 0.0
        values[0, channels] = values[arch.ffn_dim, channels] = signs / 2
    elif part is names.joint.ffn_down:
        values[channels, 0] = signs
    return values


def massive_channels(arch: MossArch, seed: int) -> tuple[list[int], torch.Tensor]:
    """Which channels of the stream are massive, and their signs (fp32, one each)."""
    generator = torch.Generator().manual_seed(_tensor_seed("massive", seed))
    channels: list[int] = torch.randperm(arch.dim, generator=generator)[:_MASSIVE].tolist()
    return channels, torch.randint(2, (_MASSIVE,), generator=generator) * 2.0 - 1.0


def _open_gates(rows: torch.Tensor, channels: list[int], arch: MossArch, peak: float) -> None:
    """Set the two gate rows of the modulation's bias [6, D] so that all blocks together reach about ``peak``."""
    gate = peak / (_WRITTEN * arch.depth)
    for row in (GATE_ATTN, GATE_FFN):
        rows[row] = (1 + rows[row]) * gate * _WRITTEN / _RATIO
        rows[row, channels] = gate


def _tensor_seed(name: str, seed: int) -> int:
    return zlib.crc32(f"{seed}:{name}".encode())
