"""What no rung helps: latents, conditionings and weights that hold NaN before the model computes, or texts that do not
fit it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...fold.arch import MossArch
from ...fold.checkpoint.reader import is_finite
from ...fold.names import ModuleNames
from ...fold.report.messages import Message, message
from ..engines.managed import no_tokens, wrong_text
from ..model.comfy_types import Guider


def finite_items(x: Tensor) -> Tensor:
    """Which items of a batch [B, ...] are finite: bool [B, 1, ...]. Without a wait for the device."""
    return x.isfinite().flatten(1).all(dim=1).reshape(-1, *[1] * (x.dim() - 1))


def conditioning_fault(conds: Mapping[str, Any]) -> Message | None:
    """A message naming a conditioning that is not finite; padding of a text is ignored."""
    for name, value in conds.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            mask = conds.get("attention_mask") if name == "c_crossattn" else None
            if not bool(_finite(value, mask).all()):
                return message("input_fault_cond", name="text" if name == "c_crossattn" else name)
    return None


#: Dtypes of weights that are looked at; others are quantized, or stored in 8 bits.
_LOOKED_AT = (torch.float32, torch.float16, torch.bfloat16)


def broken_weights(tree: nn.Module, names: ModuleNames) -> dict[str, Tensor]:
    """The model's parameters with NaN or infinity, by name. Reads them all, and waits for each."""
    parameters = ((name.replace("_orig_mod.", ""), weight) for name, weight in tree.named_parameters())
    return {
        name: weight
        for name, weight in parameters
        if names.of(name.rpartition(".")[0]) is not None  # another module may be there and take no part
        and type(weight) is nn.Parameter
        and weight.dtype in _LOOKED_AT
        and not weight.is_meta
        and not is_finite(weight)
    }


def unusable_text(arch: MossArch, guider: Guider, *, managed: bool) -> str | None:
    """Why a conditioning of the run cannot be used, as a sentence; None where all can. Needs no loaded model.

    managed: our forward runs it, so shapes are checked, too; a class of ComfyUI's own may take others.
    """
    options = getattr(guider, "model_options", {})
    unguided = math.isclose(getattr(guider, "cfg", 0.0), 1.0) and not options.get("disable_cfg1_optimization")
    for name, found in getattr(guider, "conds", {}).items():
        for cond in found if not (name == "negative" and unguided) else ():
            context, mask = cond.get("cross_attn"), cond.get("attention_mask")
            problem = no_tokens(context)
            if managed and problem is None and isinstance(context, Tensor):
                problem = wrong_text(arch, context, _with_zeros(mask))
            if problem:
                return problem
    return None


def _with_zeros(mask: object) -> Tensor | None:
    """A mask that leaves something out; one that does not is not looked at any further."""
    return mask if isinstance(mask, Tensor) and not bool((mask != 0).all()) else None


def _finite(value: Tensor, mask: Tensor | None) -> Tensor:
    """Where a conditioning is finite, or is padding. mask: nonzero where a text token is real."""
    finite = value.isfinite()
    if mask is None or value.dim() != 3 or mask.numel() != value.shape[0] * value.shape[1]:
        return finite
    return finite | (mask.reshape(*value.shape[:2], 1) == 0)


def zeros_for_broken(x: Tensor, finite: Tensor) -> Tensor:
    """x with zeros in the place of the items that are not finite."""
    return torch.where(finite, x, 0.0)


def nan_for_broken(out: Tensor, finite: Tensor) -> Tensor:
    """`out` with NaN for the items that were left out, so that they are not taken for pictures."""
    return torch.where(finite, out, torch.nan)
