"""A checkpoint into a `MossDiT`: cast, unfolded where asked, one tensor at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arch import MossArch
from ..dtypes import NOTHING_APPLIED, AppliedDtypes, dtype_name, in_own_dtype, stored_dtype
from ..errors import MossError
from ..model.forward import MossDiT
from ..model.ops import rope_bands
from ..scaling.weights import rescale, row_scale
from .reader import Checkpoint, cast_checked, damaged, is_finite

#: So much of a file is read before its pages are given back.
RELEASE_BYTES = 128 * 1024 * 1024
#: What needs no casting stays mapped, and with it the pages around; something small is not worth that.
SMALL_BYTES = 1024 * 1024


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    *,
    unfold: bool = True,
    overrides: AppliedDtypes = NOTHING_APPLIED,
) -> MossDiT:
    """The built-in model in compute dtype `dtype`, its weights as `stored_dtype` says, or as `overrides` says instead.

    unfold: take a recorded fold out (the plan then applies it online). Raises MossError for a quantized file, a NaN or
    infinite weight, or one that does not fit the dtype.
    """
    if checkpoint.quantization not in (None, "fp8"):
        raise MossError(
            f"{checkpoint.where} is quantized ({checkpoint.quantization}), which only ComfyUI's loaders can run: "
            "use it there, or give an unquantized file."
        )
    with torch.device("meta"):
        model = MossDiT(checkpoint.arch, fused=checkpoint.fused, dtype=dtype)
    weights: dict[str, Tensor] = {}
    read = 0
    for name in checkpoint.names():
        target = overrides.parameters.get(name, stored_dtype(name, dtype, checkpoint.arch.names))
        weights[name] = ready_tensor(checkpoint, name, target, unfold).to(device)
        read += checkpoint.info(name).nbytes
        if read > RELEASE_BYTES:
            checkpoint.release()
            read = 0
    checkpoint.release()
    weights.setdefault(checkpoint.arch.names.rope_bands, default_bands(checkpoint.arch).to(device))
    model.load_state_dict(weights, assign=True)
    for path, own in overrides.modules(checkpoint.arch.names).items():
        module = model.get_submodule(path)
        module.forward = in_own_dtype(module.forward, own)
    return model.requires_grad_(False).eval()


def ready_tensor(checkpoint: Checkpoint, name: str, target: torch.dtype, unfold: bool) -> Tensor:
    """One weight in dtype `target`. Raises MossError where it holds, or becomes, anything not finite."""
    tensor, scale = checkpoint.tensor(name), None
    if unfold and checkpoint.record is not None:
        scale = row_scale(name, checkpoint.arch, checkpoint.record.factors)
    if scale is None:
        ready, finite = cast_checked(tensor, target)
        if ready is tensor and ready.nbytes < SMALL_BYTES:
            ready = tensor.clone()
    else:
        ready = rescale(tensor, divide=scale, dtype=target)
        finite = is_finite(ready)
    if not finite:
        raise not_finite(name, tensor, target, checkpoint.where)
    return ready


def not_finite(name: str, tensor: Tensor, target: torch.dtype, where: str) -> MossError:
    """The error for a weight that is not finite in dtype `target`; `tensor` is what the file `where` holds."""
    if not is_finite(tensor):
        return damaged(name, where)
    instead = "compute in bf16 or fp32" if target == torch.float16 else "use a wider dtype"
    return MossError(f"{name} in {where} does not fit {dtype_name(target)}: {instead}.")


def default_bands(arch: MossArch) -> Tensor:
    """`rope.bands` for a file that leaves it out."""
    return rope_bands(arch.head_dim, arch.rope_base, torch.device("cpu"))
