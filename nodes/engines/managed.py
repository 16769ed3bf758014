"""The managed path: our forward over the MODEL's own modules, in the shape in which ComfyUI calls a diffusion model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.patcher_extension
import comfy.sd
import comfyui_version
import torch
from torch import Tensor, nn

from ...fold.arch import MossArch
from ...fold.errors import MossError
from ...fold.model.forward import MossDiT, run_dit
from ...fold.model.modules import Modules
from ...fold.model.observer import Observer
from ...fold.scaling.plan import StreamPlan
from ..model.comfy_types import BaseModel, ModelPatcher
from ..model.foreign import changed_modules
from ..model.moss import containers
from ..model.native_class import native_config
from .kernels import kernels_for
from .native import inside_wrappers
from .patches import attention_of, note_passed_over, replacements, unsupported

#: The conditionings and arguments of a call that our forward takes in.
UNDERSTOOD_CONDS = frozenset({"attention_mask", "transformer_options", "control"})

NATIVE_NEEDS = "which needs fix = online with one c for all blocks, s_attn = s_ffn = 1 and no clamp."


def managed_forward(
    tree: nn.Module,
    arch: MossArch,
    plan: StreamPlan,
    observer: Observer | None,
    x: Tensor,
    timesteps: Tensor,
    context: Tensor | None = None,
    control: Any = None,
    transformer_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Velocity [B, C, h, w] for x [B, C, h, w] in the compute dtype, inside other packs' DIFFUSION_MODEL wrappers."""
    options = transformer_options if transformer_options is not None else {}

    def forward(
        x: Tensor,
        timesteps: Tensor,
        context: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,  # under this name, as wrappers may give it by name
        **conds: Any,
    ) -> Tensor:
        return _forward(tree, arch, plan, observer, x, timesteps, context, control, transformer_options or {}, conds)

    wrappers = comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options)
    executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(forward, tree, wrappers)
    out: Tensor = executor.execute(x, timesteps, context, control, options, **kwargs)
    return out


def _forward(
    tree: nn.Module,
    arch: MossArch,
    plan: StreamPlan,
    observer: Observer | None,
    x: Tensor,
    timesteps: Tensor,
    context: Tensor | None,
    control: Any,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Tensor:
    if problem := not_understood(context, control, options, kwargs):
        raise MossError(f"{problem} {other_way(tree)}" if context is not None else problem)
    assert context is not None
    mask = kwargs.get("attention_mask")
    if problem := wrong_shape(arch, x, context, mask):
        raise MossError(problem)
    note_passed_over(options, arch.depth)
    image_tokens = x.shape[-2] * x.shape[-1]
    return run_dit(
        tree,
        arch,
        x,
        timesteps,
        context,
        plan=plan,
        mask=None if mask is None else mask.reshape(mask.shape[0], -1) != 0,
        dtype=x.dtype,
        replace=replacements(arch, options, image_tokens),
        observer=observer,
        attention=attention_of(arch, options, image_tokens),
        kernels=kernels_for(x.device, x.dtype),
        ffn_slabs=ffn_slabs,
    )


def ffn_slabs(block: Modules, dtype: torch.dtype, device: torch.device) -> int:
    """Two, for the memory; but one where each call would bring the weights over, convert or patch them anew."""
    for linear in (block.ffn_up_gate, block.ffn_down):
        weight: Any = getattr(linear, "weight", None)
        ready = type(weight) in (Tensor, nn.Parameter) and weight.dtype == dtype and weight.device == device
        if not ready or getattr(linear, "weight_function", None):
            return 1
    return 2


def not_understood(context: Any, control: Any, options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why our forward cannot run this call, naming the part it would have to ignore; None where it can."""
    odd = [
        f"the conditioning {key}" for key, value in kwargs.items() if key not in UNDERSTOOD_CONDS and value is not None
    ]
    odd += ["a control input"] if control is not None else []
    odd += unsupported(options)
    if context is None:
        return "MOSS-Image needs a text conditioning, but none was given."
    return f"The managed path of the MOSS fp16 fix cannot run {', '.join(odd[:3])}." if odd else None


def other_way(tree: nn.Module) -> str:
    """What to do about a call that our forward cannot run: what this MODEL, in this ComfyUI, can do."""
    if not isinstance(tree, MossDiT):
        return f"Use engine = native, {NATIVE_NEEDS}"
    if native_config(tree.state_dict()) is not None:
        return f"Load the file with engine = native, {NATIVE_NEEDS}"
    return (
        f"Take the node that adds it out: this ComfyUI ({comfyui_version.__version__}) has no MOSS-Image class of its "
        "own, which could run it. Version 0.42 and newer have one."
    )


def lost_changes(tree: nn.Module, arch: MossArch, patcher: ModelPatcher | None) -> str | None:
    """A sentence where other packs have changed blocks as a whole: our forward calls only what is in them, so that the
    change would be lost. None where there are none."""
    found = changed_modules(tree, patcher, containers(arch), inside_wrappers)
    if not found:
        return None
    return (
        f"Another node has changed {', '.join(found[:3])}, which the managed path of the MOSS fp16 fix does not call "
        f"as a whole: the change would be lost. {other_way(tree)}"
    )


def wrong_shape(arch: MossArch, x: Tensor, context: Tensor, mask: Tensor | None) -> str | None:
    """What of a call was made for another model; None where it fits."""
    if x.dim() != 4 or x.shape[1] != arch.latent_channels:
        return (
            f"The latent is {list(x.shape)}, but this MOSS-Image takes [batch, {arch.latent_channels}, height, width]: "
            "use a FLUX.2 latent (its VAE, or its empty latent node)."
        )
    return wrong_text(arch, context, mask)


def wrong_text(arch: MossArch, context: Tensor, mask: Tensor | None) -> str | None:
    """Why a conditioning [B, T, D] with its mask [B, T] cannot be used; None where it can."""
    if problem := no_tokens(context):
        return problem
    if context.dim() != 3 or context.shape[-1] != arch.text_dim:
        return (
            f"The conditioning is {list(context.shape)}, but this MOSS-Image takes [batch, tokens, {arch.text_dim}]. "
            f"{_encode()}"
        )
    if mask is None or mask.numel() == mask.shape[0] * context.shape[1]:
        return None
    covered, tokens = mask.numel() // max(mask.shape[0], 1), context.shape[1]
    if covered < tokens:
        return (
            f"The attention_mask covers {covered} of the conditioning's {tokens} tokens. Conditioning Concat does "
            "that: it joins two texts and keeps the mask of the first. Write both texts into one prompt, or use "
            "Conditioning Combine."
        )
    return (
        f"The attention_mask is for {covered} tokens, but the conditioning has {tokens}: a node after the text encode "
        "node has changed one and not the other. Take that node out."
    )


def no_tokens(context: Any) -> str | None:
    """A sentence about a conditioning with nothing in it; None for any other."""
    if not isinstance(context, Tensor) or context.dim() != 3 or context.shape[1] > 0:
        return None
    return f"The conditioning has no tokens (it is {list(context.shape)}), and even an empty text has some. {_encode()}"


def _encode() -> str:
    """Where this ComfyUI gets a conditioning from."""
    if hasattr(comfy.sd.CLIPType, "MOSS_IMAGE"):
        return "Encode the prompt with MOSS-Image's own text encoder (CLIP Loader, type moss_image)."
    return (
        "Load one that Save MOSS Conditioning wrote in a ComfyUI with MOSS-Image's text encoder (0.42 and newer): this "
        f"one ({comfyui_version.__version__}) has none."
    )


def sigma_of(timesteps: Tensor, model: BaseModel) -> Tensor:
    """The model is called with sigma x multiplier; MOSS-Image's own multiplier is 1, older plugins used 1000."""
    multiplier = float(getattr(getattr(model, "model_sampling", None), "multiplier", 1.0) or 1.0)
    return timesteps if multiplier == 1.0 else timesteps / torch.as_tensor(multiplier, dtype=timesteps.dtype)
