"""Recognises a MOSS-Image MODEL and knows where things are in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...fold.arch import MossArch
from ...fold.errors import MossError

ROOT = "diffusion_model"

#: A module tree with the official names. Its attributes are known by those names only, so to the checker it is Any.
Tree = Any


def moss_tree(model: Any, node: str) -> Tree:
    """The MODEL's diffusion model, if it is MOSS-Image. Raises MossError naming what was given instead."""
    tree = getattr(model.model, ROOT, None)
    for name in ("shared_block_modulation", "layers", "text_embedder", "video_embedder", "final_norm_video"):
        if not hasattr(tree, name):
            raise MossError(
                f"{node} needs a MOSS-Image MODEL; this one is {type(model.model).__name__} (no {name}). "
                "Connect the MODEL of Load MOSS-Image (FP16), or of any loader that loaded a MOSS checkpoint."
            )
    return tree


def arch_of(tree: Tree) -> MossArch:
    """The geometry of a module tree, whatever its weights are stored as (quantized ones are not looked at)."""
    if isinstance(arch := getattr(tree, "arch", None), MossArch):
        return arch
    block, text = tree.layers[0], tree.text_embedder
    dim = block.norm1.weight.shape[0]
    return MossArch(
        dim=dim,
        depth=len(tree.layers),
        heads=dim // block.q_norm.weight.shape[0],
        ffn_dim=block.proj.ffn_down.in_features,
        text_dim=text.proj.in_features,
        text_blocks=len(text.blocks),
        text_ffn_dim=text.blocks[0].ffn_up.out_features,
        latent_channels=tree.video_embedder.in_features,
        freq_dim=tree.time_embedding[0].in_features,
        eps=float(getattr(block.norm1, "eps", None) or 1e-6),
    )


def compute_dtype_of(model: Any) -> torch.dtype | None:
    """What the MODEL computes in."""
    chosen: torch.dtype | None = model.get_model_object("manual_cast_dtype")
    return chosen if chosen is not None else model.model.get_dtype()


def is_manageable(tree: nn.Module) -> bool:
    """Whether a class has every module that the managed forward calls, where it expects it."""
    text = [f"text_embedder.blocks.0.{name}" for name in ("qkv", "proj", "ffn_gate", "ffn_up", "ffn_down")]
    joint = [f"layers.0.proj.{name}" for name in ("o", "ffn_up_gate", "ffn_down")]
    norms = [f"{b}.0.{n}" for b in ("text_embedder.blocks", "layers") for n in ("norm1", "norm2", "q_norm", "k_norm")]
    head = ["final_norm_video", "final_linear_video", "video_head_modulation", "shared_block_modulation"]
    entry = ["video_embedder", "text_embedder.proj", "time_embedding.0", "time_embedding.2"]
    attention = [["layers.0.proj.qkv"], [f"layers.0.proj.{letter}" for letter in "qkv"]]

    def has(paths: list[str]) -> bool:
        try:
            return all(callable(tree.get_submodule(path)) for path in paths)
        except AttributeError:
            return False

    return has([*text, *joint, *norms, *head, *entry]) and any(has(paths) for paths in attention)


def stream_norms(arch: MossArch) -> tuple[str, ...]:
    """Paths of the RMSNorms that read a stream: their eps goes with c^2."""
    text = [f"text_embedder.blocks.{i}.{norm}" for i in range(arch.text_blocks) for norm in ("norm1", "norm2")]
    joint = [f"layers.{i}.{norm}" for i in range(arch.depth) for norm in ("norm1", "norm2")]
    return (*text, *joint, "final_norm_video")


def stream_writers(arch: MossArch) -> tuple[str, ...]:
    """Paths of the linears outside the joint blocks whose outputs go onto a stream."""
    text = [f"text_embedder.blocks.{i}.{name}" for i in range(arch.text_blocks) for name in ("proj", "ffn_down")]
    return ("video_embedder", "text_embedder.proj", *text)


def blocks(arch: MossArch) -> tuple[str, ...]:
    """Paths of all blocks, in the order of the report's sites."""
    text = tuple(f"text_embedder.blocks.{i}" for i in range(arch.text_blocks))
    return text + tuple(f"layers.{i}" for i in range(arch.depth))


def small_modules(arch: MossArch) -> list[str]:
    """Paths of the norms, the conditioning and the head: what the managed forward calls in fp32."""
    heads = [f"{block}.{norm}" for block in blocks(arch) for norm in ("q_norm", "k_norm")]
    conditioning = ["time_embedding.0", "time_embedding.2", "shared_block_modulation", "video_head_modulation"]
    return [*stream_norms(arch), *heads, *conditioning, "final_linear_video"]


def containers(arch: MossArch) -> list[str]:
    """Paths of the modules that hold what the managed forward calls, without being called by it."""
    called = [*small_modules(arch), *stream_writers(arch), *(f"layers.{i}.proj.o" for i in range(arch.depth))]
    found: dict[str, None] = {}
    for path in called:
        while path := path.rpartition(".")[0]:
            found[path] = None
    return list(found)
