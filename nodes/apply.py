"""Puts a fix on a MODEL: chooses the path, patches and wraps a clone, takes off what an earlier node put on."""

from __future__ import annotations

import logging
from typing import Any

import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP, PatcherInjection, WrappersMP
from torch import nn

from ..fold.dtypes import NOTHING_APPLIED
from ..fold.errors import MossError
from ..fold.report.messages import message
from ..fold.scaling.plan import StreamPlan
from ..fold.scaling.record import NO_FOLD, StoredFold
from .engines.adapters import fold_adapters, unfold_adapters
from .engines.casting import cast_small_modules
from .engines.dtypes import patch_parameters, rules_on
from .engines.native import patch_native
from .engines.router import OURS, Router
from .guard.guard import Guard
from .guard.run import SamplingRun
from .inputs import FixOptions
from .loading.builtin import BuiltinDiT
from .model.comfy_types import ModelPatcher
from .model.foreign import held_by, patched_object
from .model.moss import ROOT, arch_of, compute_dtype_of, is_manageable, moss_tree
from .state import KEY, FixState, Path, Rung, fix_of

log = logging.getLogger(__name__)

#: Key of the callback that a clone on another module needs; adapters have one of their own under KEY.
FOLLOW = f"{KEY}_follow"


def apply_fix(
    model: ModelPatcher,
    options: FixOptions,
    *,
    node: str,
    node_id: str,
    compute_dtype: torch.dtype | None = None,
    stored: StoredFold = NO_FOLD,
) -> ModelPatcher:
    """A clone of MODEL that runs under `options`. Weights are shared, the MODEL given stays as it was.

    compute_dtype: changes the MODEL's (None keeps it). stored: the fold of its file. Raises MossError where
    the MODEL is not MOSS-Image or the options do not fit it.
    """
    tree = moss_tree(model, node)
    if model.get_additional_models_with_key("multigpu"):
        refuse_multigpu()
    clone = remove_fix(model.clone())
    if compute_dtype is not None and compute_dtype != compute_dtype_of(clone):
        clone.set_model_compute_dtype(compute_dtype)
    dtype, arch = compute_dtype_of(clone), arch_of(tree)
    half = dtype == torch.float16
    plan = options.plan(half=half, stored=stored)
    plan.blocks(arch.depth)
    path = choose_path(options, plan, tree)
    manageable = is_manageable(tree)
    if path == "managed" and not manageable:
        raise MossError(
            f"This MOSS-Image class ({type(tree).__name__}) is built otherwise than the managed path knows, so only "
            "fix = online with one c for all blocks, s_attn = s_ffn = 1 and no clamp can run on it."
        )
    notes = (message("no_fix"),) if half and plan.mode == "none" else ()
    for note in notes:
        log.warning(note.text)
    own = path != "native"
    applied = NOTHING_APPLIED if dtype is None else rules_on(tree, arch.names, options.rules, dtype, own=own)
    fix = FixState(
        node_id=node_id,
        node=node,
        options=options,
        arch=arch,
        first_rung=Rung(plan, managed=path != "native"),
        path=path,
        compute_dtype=dtype,
        manageable=manageable,
        notes=notes,
        param_dtypes=dict(applied.record),
    )
    patch_parameters(clone, tree, applied, fix)
    if not plan.baked.identity:
        fold_adapters(clone, tree, arch, plan.baked)
    if path == "native":
        patch_native(clone, tree, fix)
    else:
        cast_small_modules(clone, tree, arch)
    name = f"{ROOT}.forward"
    clone.add_object_patch(name, Router(patched_object(clone, name), fix, clone.model))
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, SamplingRun(fix))
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, Guard(fix))
    clone.add_callback_with_key(CallbacksMP.ON_DEEPCLONE_MULTIGPU, KEY, refuse_multigpu)
    clone.set_injections(KEY, [PatcherInjection(last_on_first_off, lambda _: None)])
    clone.add_callback_with_key(CallbacksMP.ON_CLONE, FOLLOW, follow_module)
    clone.set_attachments(KEY, fix)
    return clone


def refuse_multigpu(*_: object) -> None:
    """Raise MossError: copies on other GPUs would run without our patches, or with those of another module."""
    raise MossError("The MOSS fp16 fix runs on one GPU: take the multi-GPU node out.")


def last_on_first_off(patcher: ModelPatcher) -> None:
    """After every load: make ComfyUI take the object patches off in the reverse of the order they were put on.

    ComfyUI takes them off in the order it put them on. Where a node has replaced a module and another patches something
    on it, that leaves the patch on the wrong one of the two for good.
    """
    place = {key: number for number, key in enumerate(patcher.object_patches)}
    backup = patcher.object_patches_backup
    found = sorted(backup.items(), key=lambda item: place.get(item[0], -1), reverse=True)
    backup.clear()
    backup.update(found)


def follow_module(patcher: ModelPatcher, made: ModelPatcher) -> None:
    """Move our patches to the module of a clone that was made on another one.

    ComfyUI makes such clones, loaded anew, for torch.compile and for LoRA hooks under dynamic VRAM.
    """
    if made.model is patcher.model:
        return
    for name, patch in made.object_patches.items():
        if isinstance(patch, OURS):
            made.object_patches[name] = _moved(patch, name, made)


def _moved(patch: Any, name: str, made: ModelPatcher) -> Any:
    """One of our patches, and those of ours that it wraps, on the module of `made`."""
    inner = patch.inner
    if isinstance(inner, OURS):
        inner = _moved(inner, name, made)
    elif isinstance(getattr(inner, "__self__", None), nn.Module):
        put_on = made.object_patches_backup  # where the module is in use already, its own forwards are here
        inner = put_on[name] if name in put_on else comfy.utils.get_attr(made.model, name)
    return patch.on(inner, made.model) if isinstance(patch, Router) else patch.on(inner)


def choose_path(options: FixOptions, plan: StreamPlan, tree: nn.Module) -> Path:
    """The path of the built-in class; else native, unless the plan acts inside blocks or the user asked for managed.

    MossError where engine = native cannot do what the plan needs.
    """
    if isinstance(tree, BuiltinDiT):
        return "builtin"
    match options.engine:
        case "native" if plan.block_local:
            raise MossError(
                "engine = native cannot do what these options ask for: fp32_residual, a clamp, s_attn, s_ffn and a c "
                "per block act inside the blocks. Use engine = auto."
            )
        case "auto" if plan.block_local:
            return "managed"
        case "managed":
            return "managed"
        case _:
            return "native"


def remove_fix(clone: ModelPatcher) -> ModelPatcher:
    """Take an earlier node's fix off a clone: the last one counts. Raises MossError where another pack wrapped it."""
    if (fix := fix_of(clone)) is None:
        return clone
    for name, patch in list(clone.object_patches.items()):
        if isinstance(patch, OURS):
            _restore(clone, name, patch)
        elif any(isinstance(held, OURS) for held in held_by(patch)):
            raise MossError(
                f"Another node has wrapped {name} after the first MOSS fp16 fix, so a second one cannot replace it. "
                "Connect MOSS FP16 Fix before that node."
            )
        elif name.endswith(".eps") and fix.path == "native":
            del clone.object_patches[name]
    for kind in (WrappersMP.OUTER_SAMPLE, WrappersMP.APPLY_MODEL):
        clone.remove_wrappers_with_key(kind, KEY)
    unfold_adapters(clone)
    clone.remove_callbacks_with_key(CallbacksMP.ON_DEEPCLONE_MULTIGPU, KEY)
    clone.remove_injections(KEY)
    clone.remove_callbacks_with_key(CallbacksMP.ON_CLONE, FOLLOW)
    clone.remove_attachments(KEY)
    return clone


def _restore(clone: ModelPatcher, name: str, patch: Any) -> None:
    """Put back what our patches had found: another node's patch, or the module's own method (then no patch at all)."""
    while isinstance(patch, OURS):
        patch = patch.inner
    if isinstance(getattr(patch, "__self__", None), nn.Module):
        del clone.object_patches[name]
    else:
        clone.object_patches[name] = patch
