"""Which fused kernels the managed forward gets: Triton's own of `fold`, else ComfyUI's comfy-kitchen, else none."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor, nn

from ...fold.model.fused import fused_kernels, norm_weight
from ...fold.model.kernels import FUNCTIONAL, Kernels, Slabs
from ...fold.model.ops import Unscale

log = logging.getLogger(__name__)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """For a model call on a device that computes in a dtype; what is tried out is tried once."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return FUNCTIONAL
    if (fused := fused_kernels(device)) is not None:
        return fused
    return Kitchen(device) if device.type != "cpu" and _kitchen_has(str(device), dtype) else Slabs(device)


class Kitchen(Slabs):
    """comfy-kitchen's rms_adaln for the norms, the rest by plain torch in slabs.

    Its rms_rope rounds q and k between norm and RoPE, once more than the model does, so that is not used. Nor is
    rms_adaln where the stream is wider than the compute dtype: it gives what it takes.
    """

    def modulated_norm(
        self, norm: nn.Module, x: Tensor, unscale: Unscale | None, factor: Tensor, shift: Tensor, dtype: torch.dtype
    ) -> Tensor:
        eps = getattr(norm, "eps", None)
        if x.dtype != dtype or not isinstance(eps, float):
            return super().modulated_norm(norm, x, unscale, factor, shift, dtype)
        if unscale is not None:
            eps = eps / unscale.value**2
        scale = factor * norm_weight(norm, x) - 1.0
        out: Tensor = _kitchen().rms_adaln(x, scale, shift, eps)
        return out


def _kitchen() -> ModuleType:
    import comfy.quant_ops

    kitchen: ModuleType = comfy.quant_ops.ck
    return kitchen


@functools.cache
def _kitchen_has(device: str, dtype: torch.dtype) -> bool:
    """Whether comfy-kitchen has more than plain torch for rms_adaln on this device and dtype."""
    try:
        x, row = torch.zeros(1, 1, 8, device=device, dtype=dtype), torch.zeros(1, 1, 8, device=device)
        call = {"x": x, "scale": row, "shift": row, "eps": 1e-6}
        backend: str = _kitchen().registry.get_capable_backend("rms_adaln", call)
    except Exception as error:  # an older comfy-kitchen, or none
        log.debug("comfy-kitchen's rms_adaln is not used on %s: %s", device, error)
        return False
    return backend != "eager"
