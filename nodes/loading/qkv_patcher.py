"""Hands what adapter loaders put under the other layout's names (see `qkv_names`) on to the weights that are there.

A patch of a fused weight becomes one patch for each of q, k and v: the rows of what it adds. A patch of q, k or v
where they are fused becomes one for those rows of the fused weight.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.lora
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy.weight_adapter import GLoRAAdapter, LoHaAdapter, LoKrAdapter, LoRAAdapter, OFTAdapter
from comfy.weight_adapter.base import WeightAdapterBase
from torch import Tensor

from ...fold.qkv import COUNT, row_range
from .qkv_names import Joined, NamedWeights, Place

KEY = "moss_fp16_layouts"

#: The adapters that can be worked out for some rows at a time, and where in their weights the DoRA scale is.
DORA_SCALE: dict[type, int] = {LoRAAdapter: 4, LoHaAdapter: 7, LoKrAdapter: 8, GLoRAAdapter: 5, OFTAdapter: 3}


class BothLayouts(ModelPatcher):
    """A MODEL of the built-in class: as ComfyUI's, and patches may come under either layout's names."""

    def add_patches(self, patches: Mapping[Any, Any], *strengths: Any, **named: Any) -> list[Any]:
        """As ModelPatcher's. Returns the keys that found a weight, as they were given."""
        own, others = self._sorted(patches)
        taken: list[Any] = super().add_patches(own, *strengths, **named)
        for key, placed in others.items():
            super().add_patches(placed, *strengths, **named)
            taken += [key] if placed else []
        return taken

    def add_hook_patches(self, hook: Any, patches: Mapping[Any, Any], *strengths: Any, **named: Any) -> list[Any]:
        """The same for the adapter of a hook."""
        own, others = self._sorted(patches)
        taken: list[Any] = super().add_hook_patches(hook, own, *strengths, **named)
        for key, placed in others.items():
            super().add_hook_patches(hook, placed, *strengths, **named)
            taken += [key] if placed else []
        return taken

    def model_state_dict(self, filter_prefix: str | None = None) -> Any:
        """Each weight under its own name: what is merged, extracted or looked through."""
        found = super().model_state_dict(filter_prefix)
        return found.plain() if isinstance(found, NamedWeights) else found

    def _sorted(self, patches: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, dict[Any, Any]]]:
        """Patches of weights that exist, and for each other key what it comes to."""
        own: dict[Any, Any] = {}
        others: dict[Any, dict[Any, Any]] = {}
        for key, value in patches.items():
            name, *where = (key,) if isinstance(key, str) else key
            place = self.model.other_names.get(name)
            if place is None:
                own[key] = value
            else:
                others[key] = dict(patches_at(value, place, *where))
        return own, others


def take_both_layouts(model: Any) -> None:
    """Make a MODEL of the built-in class, and every clone of it, `BothLayouts`.

    ComfyUI chooses the class of a patcher and of some clones for itself (by device, for torch.compile), hence this way.
    """
    model.__class__ = _both(model.__class__)
    model.add_callback_with_key(CallbacksMP.ON_CLONE, KEY, _on_clone)


def _on_clone(_: Any, made: Any) -> None:
    made.__class__ = _both(made.__class__)


@functools.cache
def _both(kind: type) -> type:
    if issubclass(kind, BothLayouts):
        return kind
    return BothLayouts if kind is ModelPatcher else type(f"BothLayouts{kind.__name__}", (BothLayouts, kind), {})


def patches_at(value: Any, place: Place, offset: Any = None, function: Any = None) -> Iterator[tuple[Any, Any]]:
    """The patches, by key, that do together what `value` does to the weight of another name; none where that cannot be.

    offset, function: as in the keys of ModelPatcher.add_patches.
    """
    if not isinstance(place, Joined):
        if offset is None:
            yield (place.key, (0, place.start, place.rows), function), value
    elif is_row_wise(value):
        for index, key in enumerate(place.keys):
            rows = sliced(value, index) if offset is None and function is None else None
            yield key, FusedSlice(set(), (value, index, offset, function)) if rows is None else rows


def is_row_wise(value: Any) -> bool:
    """Whether what a patch makes of q's, k's or v's rows of a fused weight depends on those rows alone."""
    if not isinstance(value, WeightAdapterBase):
        return True
    if type(value) not in DORA_SCALE:
        return False
    scale = value.weights[DORA_SCALE[type(value)]]
    if scale is not None and scale.shape[0] == 1:
        return False  # a DoRA scale per input column goes with the norms of whole columns
    return type(value) is not OFTAdapter or value.weights[0].shape[0] % COUNT == 0


def sliced(value: Any, index: int) -> Any | None:
    """A patch of a fused weight cut to the rows of q (0), k (1) or v (2); None for what cannot be cut."""
    match value:
        case (str() as kind, (Tensor() as whole, *rest)):
            return (kind, (_rows(whole, index), *rest))
        case (Tensor() as whole, *rest) if isinstance(value, tuple):
            return (_rows(whole, index), *rest)
        case LoRAAdapter(weights=(up, down, alpha, None, scale, None)):
            scale = None if scale is None else _rows(scale, index)
            return LoRAAdapter(value.loaded_keys, (_rows(up, index), down, alpha, None, scale, None))
    return None


def _rows(whole: Tensor, index: int) -> Tensor:
    rows = whole.shape[0] // COUNT if whole.dim() else 0
    return whole[row_range(index, rows)] if rows else whole


class FusedSlice(WeightAdapterBase):
    """A patch of a fused weight for q, k or v alone: applied to a fused weight in which only their rows are filled.

    weights: (value, 0 for q, 1 for k, 2 for v, offset, function).
    """

    name = "moss_fused_slice"

    def __init__(self, loaded_keys: set[str], weights: tuple[Any, ...]) -> None:
        self.loaded_keys, self.weights = loaded_keys, weights

    def calculate_weight(
        self,
        weight: Tensor,
        key: str,
        strength: float,
        strength_model: float,  # the weight comes with it multiplied in
        offset: Any = None,
        function: Any = None,
        intermediate_dtype: torch.dtype = torch.float32,
        original_weights: Any = None,
    ) -> Tensor:
        value, index, *where = self.weights
        fused = weight.new_zeros(COUNT * weight.shape[0], *weight.shape[1:])
        own = row_range(index, weight.shape[0])
        fused[own] = weight
        patched = comfy.lora.calculate_weight([(strength, value, 1.0, *where)], fused, key, intermediate_dtype)
        return weight.copy_(patched[own])
