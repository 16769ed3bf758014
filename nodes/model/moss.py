"""Recognises a MOSS-Image MODEL and knows where things are in it."""

from __future__ import annotations

import torch
from torch import nn

from ...fold.arch import MossArch
from ...fold.errors import MossError
from ...fold.model.modules import Modules, module_at
from ...fold.names import FP32_ROLES, OFFICIAL, ModuleNames, Role
from .comfy_types import ModelPatcher

#: What the modules are called in the classes there are: for one that calls some otherwise, add `OFFICIAL.renamed(...)`.
CLASSES: tuple[ModuleNames, ...] = (OFFICIAL,)

ROOT = "diffusion_model"


def moss_tree(model: ModelPatcher, node: str) -> nn.Module:
    """The MODEL's diffusion model, if it is MOSS-Image. Raises MossError naming what was given instead."""
    tree: nn.Module = getattr(model.model, ROOT, nn.Module())
    missing = [_missing(tree, names) for names in CLASSES]
    if all(missing):
        raise MossError(
            f"{node} needs a MOSS-Image MODEL; this one is {type(model.model).__name__} (no {missing[0]}). "
            "Connect the MODEL of Load MOSS-Image (FP16), or of any loader that loaded a MOSS checkpoint."
        )
    return tree


def is_moss(tree: nn.Module) -> bool:
    """Whether a diffusion model is MOSS-Image."""
    return any(not _missing(tree, names) for names in CLASSES)


def names_of(tree: nn.Module) -> ModuleNames:
    """What the modules of a MOSS-Image class are called."""
    return next((names for names in CLASSES if not _missing(tree, names)), OFFICIAL)


def _missing(tree: nn.Module, names: ModuleNames) -> str | None:
    """The first module that a tree lacks for being MOSS-Image under these names; None where it is."""
    needed = (names.shared_block_modulation, names.video_embedder, names.text_proj, names.final_norm_video)
    paths = (*(part.path for part in needed), names.joint.blocks, names.text.blocks)
    return next((path for path in paths if not has_module(tree, path)), None)


def has_module(tree: nn.Module, path: str) -> bool:
    """Whether something is at a path below a module tree."""
    try:
        module_at(tree, path)
    except AttributeError:
        return False
    return True


def arch_of(tree: nn.Module) -> MossArch:
    """The geometry of a module tree, whatever its weights are stored as (quantized ones are not looked at)."""
    if isinstance(arch := getattr(tree, "arch", None), MossArch):
        return arch
    names = names_of(tree)
    modules = Modules(tree, names)
    block, text = modules.joint_block(0), modules.text_block(0)
    dim = block.norm1.weight.shape[0]
    return MossArch(
        dim=dim,
        depth=len(module_at(tree, names.joint.blocks)),
        heads=dim // block.q_norm.weight.shape[0],
        ffn_dim=block.ffn_down.in_features,
        text_dim=modules.text_proj.in_features,
        text_blocks=len(module_at(tree, names.text.blocks)),
        text_ffn_dim=text.ffn_up.out_features,
        latent_channels=modules.video_embedder.in_features,
        freq_dim=modules.time_in.in_features,
        eps=float(getattr(block.norm1, "eps", None) or 1e-6),
        names=names,
    )


def compute_dtype_of(model: ModelPatcher) -> torch.dtype | None:
    """What the MODEL computes in."""
    chosen: torch.dtype | None = model.get_model_object("manual_cast_dtype")
    return chosen if chosen is not None else model.model.get_dtype()


def is_manageable(tree: nn.Module) -> bool:
    """Whether a class has every module that the managed forward calls, where it expects it."""
    arch = arch_of(tree)
    return any(all(has_module(tree, path) for path, _ in arch.modules(fused)) for fused in (False, True))


def stream_norms(arch: MossArch) -> tuple[str, ...]:
    """Paths of the RMSNorms that read a stream: their eps goes with c^2."""
    return arch.paths(Role.STREAM_NORM)


def stream_writers(arch: MossArch) -> tuple[str, ...]:
    """Paths of the linears outside the joint blocks whose outputs go onto a stream."""
    return arch.paths(Role.STREAM_WRITER)


def blocks(arch: MossArch) -> tuple[str, ...]:
    """Paths of all blocks, in the order of the report's sites."""
    return arch.block_paths()


def small_modules(arch: MossArch) -> tuple[str, ...]:
    """Paths of the norms, the conditioning and the head: what the managed forward calls in fp32."""
    return arch.paths(*FP32_ROLES)


def containers(arch: MossArch) -> list[str]:
    """Paths of the modules that hold what the managed forward calls, without being called by it."""
    found: dict[str, None] = {}
    for path, _ in arch.modules(fused=True):
        while path := path.rpartition(".")[0]:
            found[path] = None
    return list(found)
