"""Sorts the keys of a checkpoint: the model's prefix, its weights, quantization companions, other components."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..arch import MossArch, block_indices
from ..errors import MossError
from ..names import OFFICIAL, ModuleNames
from ..qkv import block_keys
from .header import TensorInfo, clip

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.")
#: The choices of a new file's q, k, v, as `fused`: as in the source, three matrices, one.
LAYOUTS = {"keep": None, "split": False, "fused": True}
# What a quantized <module>.weight brings along, as <module>.<suffix>; scaled_fp8 is a marker for the whole file.
COMPANIONS = (
    "weight_scale", "weight_scale_2", "scale_weight", "input_scale", "scale_input", "pre_quant_scale",
    "weight_zero_point", "comfy_quant",
)  # fmt: skip
_FILE_COMPANION = "scaled_fp8"
# First words of keys that are plainly another component of an all-in-one file.
_COMPONENTS = {
    "vae", "first_stage_model", "text_encoder", "text_encoders", "cond_stage_model", "conditioner", "clip", "clip_l",
    "te", "tokenizer", "image_encoder", "clip_vision", "model_ema", "audio_vae", "vocoder", "processor",
}  # fmt: skip
_FLOATS = {"F64", "F32", "F16", "BF16"}
_LISTED = 4


class Layout(NamedTuple):
    """How one checkpoint names things. ``model`` and ``companions`` map bare names to header entries."""

    prefix: str
    fused: bool
    arch: MossArch
    model: dict[str, TensorInfo]
    companions: dict[str, TensorInfo]
    foreign: dict[str, TensorInfo]
    quantized: dict[str, str]
    """Bare weight name -> its kind of quantization ("int8", "fp8_scaled", "fp8", "nvfp4", ...)."""

    @property
    def quantization(self) -> str | None:
        """The kinds of quantization in the file joined by "+", or None."""
        return "+".join(sorted(set(self.quantized.values()))) or None


def read_layout(tensors: Mapping[str, TensorInfo], where: str, names: ModuleNames = OFFICIAL) -> Layout:
    """Sort the keys of a file (or folder) named ``where``; MossError when they are not those of a MOSS-Image model."""
    prefix = _find_prefix(tensors, where, names)
    inside: dict[str, TensorInfo] = {}
    foreign: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        belongs = name.startswith(prefix) and (prefix or name.partition(".")[0] not in _COMPONENTS)
        if belongs:
            inside[name.removeprefix(prefix)] = info
        else:
            foreign[name] = info
    companions = {name: inside.pop(name) for name in list(inside) if _is_companion(name, inside)}
    markers = [name for name, info in inside.items() if name != names.rope_bands and _is_marker(name, info)]
    for name in markers:
        foreign[prefix + name] = inside.pop(name)
    if markers:
        _log_markers(markers, where)
    arch = MossArch.from_shapes({name: info.shape for name, info in inside.items()}, where, names)
    fused = any(block_keys(names, index).fused in inside for index in block_indices(inside, names.joint.blocks))
    expected = arch.expected_shapes(fused)
    kinds = {name: _quantization(name, info, companions, where) for name, info in inside.items() if name in expected}
    quantized = {name: kind for name, kind in kinds.items() if kind}
    _check_keys(expected, inside, quantized, where, optional=names.rope_bands)
    return Layout(prefix, fused, arch, inside, companions, foreign, quantized)


def _find_prefix(tensors: Iterable[str], where: str, names: ModuleNames) -> str:
    keys, markers = set(tensors), [f"{path}.weight" for path in names.markers()]
    found = {prefix: sum(prefix + marker in keys for marker in markers) for prefix in PREFIXES}
    best = [prefix for prefix, count in found.items() if count and count == max(found.values())]
    match best:
        case [prefix]:
            return prefix
        case []:
            sample = ", ".join(clip(name) for name in sorted(keys)[:_LISTED]) or "no tensors"
            raise MossError(f"{where} is not a MOSS-Image model: it has no {markers[0]} (it holds {sample}).")
        case _:
            listed = " and ".join(repr(prefix) for prefix in best)
            raise MossError(f"{where} holds more than one MOSS-Image model, under the prefixes {listed}.")


def _is_companion(name: str, names: Mapping[str, TensorInfo]) -> bool:
    module, _, suffix = name.rpartition(".")
    return name == _FILE_COMPANION or (suffix in COMPANIONS and f"{module}.weight" in names)


def _is_marker(name: str, info: TensorInfo) -> bool:
    """Whether a key holds no more than one number and is not named as a weight: a note of the program that saved it.

    ComfyUI's own loader leaves such keys aside, too.
    """
    suffix = name.rpartition(".")[2]
    return math.prod(info.shape) <= 1 and suffix not in ("weight", "bias", *COMPANIONS)


def _log_markers(markers: Iterable[str], where: str) -> None:
    import logging  # here: few files have any, and its import takes longer than reading a header

    log = logging.getLogger(__name__)
    for name in markers:
        log.info("%s: %s is no weight of MOSS-Image and is passed over.", where, clip(name))


def _quantization(name: str, info: TensorInfo, companions: Mapping[str, TensorInfo], where: str) -> str | None:
    """The kind of quantization of one tensor, or None when it is stored as a plain float."""
    if info.dtype in _FLOATS:
        return None
    module = name.removesuffix(".weight")
    scaled = any(f"{module}.{suffix}" in companions for suffix in ("weight_scale", "scale_weight"))
    match info.dtype:
        case "F8_E4M3" | "F8_E5M2":
            return "fp8_scaled" if scaled else "fp8"
        case "I8" if scaled:
            return "int8"
        case "U8" | "F4" if scaled:
            return "nvfp4" if f"{module}.weight_scale_2" in companions else info.dtype.lower()
        case _:
            raise MossError(
                f"{where} stores {clip(name)} as {info.dtype}, which no MOSS-Image weight is without a scale: it was "
                "damaged or converted for another program, so download or convert it again."
            )


def _check_keys(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, TensorInfo],
    quantized: Mapping[str, str],
    where: str,
    optional: str,
) -> None:
    """Refuse missing (but for ``optional``) and unknown keys and wrong shapes, naming the first few."""
    problems: dict[str, list[str]] = defaultdict(list)
    for name, shape in expected.items():
        if name not in found:
            if name != optional:
                problems["has no"].append(name)
        elif not _shape_fits(found[name], shape, packed=quantized.get(name) not in (None, "fp8", "fp8_scaled")):
            problems["has a wrong shape:"].append(f"{name} is {list(found[name].shape)}, not {list(shape)}")
    problems["has unknown keys in the model:"] = [clip(name) for name in found if name not in expected]
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise MossError(f"{where} {problem} {', '.join(names[:_LISTED])}{more}.")


def _shape_fits(info: TensorInfo, shape: tuple[int, ...], packed: bool) -> bool:
    """Whether a stored shape is the model's; a packed format may hold several values per element of the last axis."""
    if info.shape == shape:
        return True
    return (
        packed and len(info.shape) == len(shape) and info.shape[:-1] == shape[:-1] and info.shape[-1] * 2 == shape[-1]
    )
