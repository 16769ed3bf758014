"""Adapters on weights that carry a fold ("keep"): what they add was made for the weights without it.

ComfyUI applies a MODEL's patches (LoRA, LoKr, LoHa, DoRA, diffs) to the stored weight. Where that weight's rows carry
a factor, the patches get to see it with the factor taken out, and it is put back after them: the folded weight of the
patched model, whatever the kind of patch. Adapter loaders may come before or after the fix and clone the MODEL as they
like, so this sits in the MODEL's own table of patches and moves along with every clone.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import torch
from comfy.patcher_extension import CallbacksMP
from comfy.weight_adapter.base import WeightAdapterBase
from comfy.weight_adapter.bypass import BypassForwardHook
from torch import Tensor, nn

from ...fold.arch import MossArch
from ...fold.errors import MossError
from ...fold.scaling.factors import Factors
from ...fold.scaling.weights import row_scale
from ..model.comfy_types import ModelPatcher
from ..model.moss import ROOT
from ..state import KEY


class RowScale(WeightAdapterBase):
    """A patch that multiplies the rows of a weight."""

    name = "moss_row_scale"

    def __init__(self, loaded_keys: set[str], weights: tuple[Tensor, ...]) -> None:
        self.loaded_keys, self.weights = loaded_keys, weights

    def calculate_weight(self, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        scale = self.weights[0].to(weight.device, weight.dtype)
        return weight.mul_(scale.reshape(-1, *[1] * (weight.dim() - 1)))


class FoldedPatches(dict[str, list[Any]]):
    """A MODEL's patches; reading a key that the fold scales gives them with its factor taken out and put back.

    `get` gives what is stored, which is what ComfyUI appends to.
    """

    def __init__(self, patches: Mapping[str, list[Any]], scales: Mapping[str, Tensor]) -> None:
        super().__init__({key: _bare(found) for key, found in patches.items()})
        self.scales = scales

    def __getitem__(self, key: str) -> list[Any]:
        found, scale = super().__getitem__(key), self.scales.get(key)
        if scale is None:
            return found
        out, back = _step(1.0 / scale), _step(scale)
        # a MODEL merged in (a list) is taken for one that carries the same fold, as without this pack
        return [step for patch in found for step in ((patch,) if isinstance(patch[1], list) else (out, patch, back))]

    def __setitem__(self, key: str, value: list[Any]) -> None:
        super().__setitem__(key, _bare(value))


def _step(scale: Tensor) -> tuple[Any, ...]:
    # (strength, patch, strength of the weight itself, offset, function), as ModelPatcher.add_patches stores them
    return (1.0, RowScale(set(), (scale,)), 1.0, None, None)


def _bare(patches: list[Any]) -> list[Any]:
    return [patch for patch in patches if not isinstance(patch[1], RowScale)]


def fold_adapters(clone: ModelPatcher, tree: nn.Module, arch: MossArch, baked: Factors) -> None:
    """Make a MODEL clone, and every clone of it, scale what adapters add to weights that carry the fold `baked`."""
    scales: dict[str, Tensor] = {}
    for name, _ in tree.named_parameters():
        if (scale := row_scale(name, arch, baked)) is not None:
            scales[f"{ROOT}.{name}"] = torch.as_tensor(scale, dtype=torch.float32).reshape(-1)
    if not scales:
        return

    def on_clone(_: ModelPatcher, made: ModelPatcher) -> None:
        made.patches = FoldedPatches(made.patches, scales)

    on_clone(clone, clone)
    clone.add_callback_with_key(CallbacksMP.ON_CLONE, KEY, on_clone)
    _reload(clone)


def unfold_adapters(clone: ModelPatcher) -> None:
    """Undo `fold_adapters` on a clone."""
    clone.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)
    if isinstance(clone.patches, FoldedPatches):
        clone.patches = {key: clone.patches.get(key, []) for key in clone.patches}
        _reload(clone)


def _reload(clone: ModelPatcher) -> None:
    """Patched weights that another clone has loaded are not this one's."""
    if clone.patches:
        clone.patches_uuid = uuid.uuid4()


def refuse_unscaled(tree: nn.Module, patcher: ModelPatcher | None, arch: MossArch, baked: Factors) -> None:
    """Raise MossError where adapters reach folded weights in a way that this module does not scale."""
    for path, module in tree.named_modules():
        owner = getattr(module.__dict__.get("forward"), "__self__", None)
        if isinstance(owner, BypassForwardHook) and row_scale(f"{path}.weight", arch, baked) is not None:
            raise MossError(_UNSCALED.format(kind="in bypass mode", path=path))
    for found in getattr(patcher, "hook_patches", {}).values():
        for key in found:
            name = key.removeprefix(f"{ROOT}.")
            if row_scale(name, arch, baked) is not None:
                raise MossError(_UNSCALED.format(kind="of a hook", path=name))


_UNSCALED = (
    "A LoRA {kind} adds to {path}, whose weights carry the fold of the file, which it was not made for. Use unfold = "
    "auto in Load MOSS-Image (FP16), or the ordinary LoRA loader."
)
