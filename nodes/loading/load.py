"""A MOSS-Image file into a MODEL: ComfyUI's own class where it has one, else the built-in one."""

from __future__ import annotations

import logging

import comfy.model_management as mm
import comfy.model_patcher
import comfy.sd
import comfy.utils
import torch
from comfy.cli_args import args

from ...fold.arch import MossArch
from ...fold.checkpoint.load import default_bands
from ...fold.checkpoint.reader import Checkpoint, is_finite, open_checkpoint
from ...fold.dtypes import DTYPES, DtypeRule, parse_rules
from ...fold.errors import MossError
from ...fold.qkv import split_state_dict
from ...fold.scaling.factors import Factors
from ...fold.scaling.record import StoredFold
from ...fold.scaling.weights import unfold_tensor
from ..engines.dtypes import rules_on, store_parameters
from ..model.comfy_types import ModelPatcher
from ..model.moss import is_moss
from ..model.native_class import native_config
from ..model.stored_fold import KEY
from .builtin import MossModelConfig
from .checked_copy import CheckedCopies
from .qkv_patcher import take_both_layouts

log = logging.getLogger(__name__)

#: ComfyUI's launch flags for the dtype a diffusion model runs in, the first that is set counts. fp64 is more than any
#: weight of MOSS-Image holds, and not every device has it.
COMPUTED_BY_FLAG = {
    "fp32_unet": torch.float32,
    "fp64_unet": torch.float32,
    "bf16_unet": torch.bfloat16,
    "fp16_unet": torch.float16,
    "force_fp16": torch.float16,
    "force_fp32": torch.float32,
}
#: Those for the dtype that its weights are stored in.
STORED_BY_FLAG = {
    flag: getattr(torch, dtype)
    for flag, dtype in (
        ("fp8_e4m3fn_unet", "float8_e4m3fn"),
        ("fp8_e5m2_unet", "float8_e5m2"),
        ("fp8_e8m0fnu_unet", "float8_e8m0fnu"),
    )
    if hasattr(torch, dtype)
}


def load_moss(
    path: str, dtype: str, unfold: bool, engine: str, rules: str = "", disable_dynamic: bool = False
) -> ModelPatcher:
    """The MODEL of a checkpoint file or HF folder, weights stored in the compute dtype.

    dtype: auto, fp16, bf16 or fp32. unfold: take a recorded fold out of the weights. engine: auto, native, builtin.
    rules: lines of `glob = dtype` for single parameters, which the built-in class stores in that dtype.
    Raises MossError for what is no whole MOSS-Image checkpoint.
    """
    with open_checkpoint(path) as checkpoint:
        stored, chosen = chosen_dtypes(dtype, checkpoint)
        weights, record = ready_weights(checkpoint, unfold), checkpoint.record
        plain = {name: weight for name, weight in weights.items() if checkpoint.is_plain(name)}
        with CheckedCopies(plain, checkpoint.where) as copies:
            model = None if engine == "builtin" else load_native(weights, stored, checkpoint, disable_dynamic)
            if model is None and engine == "native":
                raise MossError("This ComfyUI has no MOSS-Image class of its own: update it, or use engine = auto.")
            if model is None:
                model = load_builtin(weights, (stored, chosen), checkpoint, parse_rules(rules), disable_dynamic)
        # a dynamic MODEL leaves its weights in the file until they are needed; the guard looks at them then
        copies.refuse_not_finite(rest=not model.is_dynamic())
    if model.get_model_object("manual_cast_dtype") != chosen and model.model.get_dtype_inference() != chosen:
        model.set_model_compute_dtype(chosen)
    model.cached_patcher_init = (load_moss, (path, dtype, unfold, engine, rules))
    model.set_attachments(KEY, StoredFold(record, unfolded=unfold and record is not None))
    return model


def chosen_dtypes(name: str, checkpoint: Checkpoint) -> tuple[torch.dtype, torch.dtype]:
    """What weights are stored in, and what the model computes in.

    auto: what ComfyUI was started with (--fp16-unet, --force-fp16 and their like), else fp16 where the device is good
    at it, else bf16, else fp32 (a CPU). --fp8_e4m3fn-unet and its like are about storing only.
    """
    if name != "auto":
        return DTYPES[name], DTYPES[name]
    stored = next((dtype for flag, dtype in STORED_BY_FLAG.items() if getattr(args, flag, False)), None)
    computed = next((dtype for flag, dtype in COMPUTED_BY_FLAG.items() if getattr(args, flag, False)), None)
    if computed is None:
        computed = _dtype_for_device(checkpoint.nbytes // 2)
    return computed if stored is None or checkpoint.quantization else stored, computed


def _dtype_for_device(parameters: int) -> torch.dtype:
    device = mm.get_torch_device()
    if mm.should_use_fp16(device, model_params=parameters):
        return torch.float16
    return torch.bfloat16 if mm.should_use_bf16(device) else torch.float32


def ready_weights(checkpoint: Checkpoint, unfold: bool) -> dict[str, torch.Tensor]:
    """Bare-key weights and companions as stored, but for the few that an unfold changes."""
    weights, record = stored_weights(checkpoint), checkpoint.record
    if unfold and record is not None:
        for name in filter(checkpoint.is_plain, checkpoint.names()):
            weights[name] = _unfolded(name, weights[name], checkpoint.arch, record.factors)
    return weights


def _unfolded(name: str, weight: torch.Tensor, arch: MossArch, factors: Factors) -> torch.Tensor:
    """In the weight's dtype where that holds it: fp16 may hold the folded weight only."""
    plain = unfold_tensor(name, weight, arch, factors)
    fits = weight.dtype != torch.float16 or plain is weight or is_finite(plain)
    return plain if fits else unfold_tensor(name, weight, arch, factors, torch.float32)


def stored_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Bare-key weights and companions, read by ComfyUI's own reader where it can read the file.

    So --disable-mmap counts, and a dynamic MODEL moves weights from the file to the device as it does any other's.
    """
    stored: dict[str, torch.Tensor] = {}
    try:
        for file in checkpoint.files:
            stored |= comfy.utils.load_torch_file(str(file))
        return {name: stored[checkpoint.info(name).name] for name in (*checkpoint.names(), *checkpoint.companions)}
    except Exception as error:  # a dtype that it does not know, or the disk: the pack's own reader says which
        log.debug("ComfyUI cannot read %s: %s", checkpoint.where, error)
        return checkpoint.state_dict()


def load_native(
    weights: dict[str, torch.Tensor], dtype: torch.dtype, checkpoint: Checkpoint, disable_dynamic: bool
) -> ModelPatcher | None:
    """Through ComfyUI's own detection; None where it does not know MOSS-Image."""
    if native_config(weights, checkpoint.metadata) is None:
        return None
    model = comfy.sd.load_diffusion_model_state_dict(
        dict(weights),
        model_options={} if checkpoint.quantization else {"dtype": dtype},
        metadata=dict(checkpoint.metadata),
        disable_dynamic=disable_dynamic,
    )
    return model if model is not None and is_moss(model.model.diffusion_model) else None


def load_builtin(
    weights: dict[str, torch.Tensor],
    dtypes: tuple[torch.dtype, torch.dtype],
    checkpoint: Checkpoint,
    rules: tuple[DtypeRule, ...],
    disable_dynamic: bool,
) -> ModelPatcher:
    """The built-in class, placed as ComfyUI places its own.

    dtypes: what its weights are stored in, and what it computes in. It has q, k and v apart, as the official keys do,
    also for fused files. Adapters fit with the keys of either layout.
    """
    fused = checkpoint.fused and checkpoint.quantization is not None
    if checkpoint.fused and not fused:
        weights = split_state_dict(weights, checkpoint.arch)
    weights = {checkpoint.arch.names.rope_bands: default_bands(checkpoint.arch)} | weights
    weights, _ = comfy.utils.convert_old_quants(dict(weights), "", metadata=dict(checkpoint.metadata))
    config = MossModelConfig({"arch": checkpoint.arch, "fused": fused})
    config.quant_config = comfy.utils.detect_layer_quantization(weights, "") if checkpoint.quantization else None
    stored, dtype = dtypes
    config.set_inference_dtype(stored, dtype if config.quant_config or stored != dtype else None)
    patcher = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    model = config.get_model(weights)
    tree = model.diffusion_model
    store_parameters(tree, rules_on(tree, checkpoint.arch.names, rules, dtype, own=True))
    loaded: ModelPatcher = patcher(model, load_device=mm.get_torch_device(), offload_device=mm.unet_offload_device())
    take_both_layouts(loaded)
    if not mm.is_device_cpu(loaded.offload_device):
        model.to(loaded.offload_device)
    model.load_model_weights(weights, "", assign=loaded.is_dynamic())
    return loaded
