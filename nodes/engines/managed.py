"""The managed path: our forward over the MODEL's own modules, in the shape in which ComfyUI calls a diffusion model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import comfy.patcher_extension
import torch
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor, nn

from ...fold.arch import MossArch
from ...fold.errors import MossError
from ...fold.model.forward import Attention, BlockReplacement, run_dit, sdpa
from ...fold.model.modules import Modules
from ...fold.model.observer import Observer
from ...fold.scaling.plan import StreamPlan
from ..model.foreign import changed_modules
from ..model.moss import containers
from .native import inside_wrappers

#: The conditionings and arguments of a call that our forward takes in.
UNDERSTOOD_CONDS = frozenset({"attention_mask", "transformer_options", "control"})

USE_NATIVE = "Use engine = native, which needs fix = online with one c for all blocks, s_attn = s_ffn = 1 and no clamp."


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

    def forward(x: Tensor, timesteps: Tensor, context: Any = None, control: Any = None, options: Any = None, **kw: Any):
        return _forward(tree, arch, plan, observer, x, timesteps, context, control, options or {}, kw)

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
        raise MossError(problem)
    assert context is not None
    mask = kwargs.get("attention_mask")
    if problem := wrong_shape(arch, x, context, mask):
        raise MossError(problem)
    return run_dit(
        tree,
        arch,
        x,
        timesteps,
        context,
        plan=plan,
        mask=None if mask is None else mask.reshape(mask.shape[0], -1) != 0,
        dtype=x.dtype,
        replace=replacements(options),
        observer=observer,
        attention=attention_of(arch, options),
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
    odd += [f"the block patch {name}" for name, found in options.get("patches", {}).items() if found]
    for group, found in options.get("patches_replace", {}).items():
        odd += [f"the replace patch {group} {key}" for key in found if group != "dit" or key[0] != "single_block"]
    if odd:
        return f"The managed path of the MOSS fp16 fix cannot run {', '.join(odd[:3])}. {USE_NATIVE}"
    return "MOSS-Image needs a text conditioning, but none was given." if context is None else None


def lost_changes(tree: nn.Module, arch: MossArch, patcher: Any) -> str | None:
    """A sentence where other packs have changed blocks as a whole: our forward calls only what is in them, so that the
    change would be lost. None where there are none."""
    found = changed_modules(tree, patcher, containers(arch), inside_wrappers)
    if not found:
        return None
    return (
        f"Another node has changed {', '.join(found[:3])}, which the managed path of the MOSS fp16 fix does not call "
        f"as a whole: the change would be lost. {USE_NATIVE}"
    )


def wrong_shape(arch: MossArch, x: Tensor, context: Tensor, mask: Tensor | None) -> str | None:
    """What of a call was made for another model; None where it fits."""
    if context.dim() != 3 or context.shape[-1] != arch.text_dim:
        return (
            f"The conditioning is {list(context.shape)}, but this MOSS-Image takes [batch, tokens, {arch.text_dim}]: "
            "encode the prompt with MOSS-Image's own text encoder (CLIP Loader, type moss_image)."
        )
    if x.dim() != 4 or x.shape[1] != arch.latent_channels:
        return (
            f"The latent is {list(x.shape)}, but this MOSS-Image takes [batch, {arch.latent_channels}, height, width]: "
            "use a FLUX.2 latent (its VAE, or its empty latent node)."
        )
    if mask is not None and mask.numel() != mask.shape[0] * context.shape[1]:
        return (
            f"The attention_mask is {list(mask.shape)}, but the conditioning has {context.shape[1]} tokens: they must "
            "come from the same text encode node."
        )
    return None


def replacements(options: Mapping[str, Any]) -> dict[int, BlockReplacement]:
    """ComfyUI's ("single_block", i) patches, skip-layer guidance among them, as our block replacements."""
    found = options.get("patches_replace", {}).get("dit", {})
    return {key[1]: _replacement(patch, options) for key, patch in found.items() if key[0] == "single_block"}


def _replacement(patch: Callable[..., Any], options: Mapping[str, Any]) -> BlockReplacement:
    def replaced(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        def original(args: dict[str, Any]) -> dict[str, Any]:
            return {**args, "img": run(args["img"])}

        out: Tensor = patch({"img": x, "transformer_options": options}, {"original_block": original})["img"]
        return out

    return replaced


def attention_of(arch: MossArch, options: dict[str, Any]) -> Attention:
    """ComfyUI's attention of choice; with a mask torch's own, since not every one of ComfyUI's takes a key mask."""

    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        if keep is not None:
            return sdpa(q, k, v, keep)
        out: Tensor = optimized_attention(q, k, v, arch.heads, skip_reshape=True, transformer_options=options)
        return out

    return attention


def sigma_of(timesteps: Tensor, model: Any) -> Tensor:
    """The model is called with sigma x multiplier; MOSS-Image's own multiplier is 1, older plugins used 1000."""
    multiplier = float(getattr(getattr(model, "model_sampling", None), "multiplier", 1.0) or 1.0)
    return timesteps if multiplier == 1.0 else timesteps / torch.as_tensor(multiplier, dtype=timesteps.dtype)
