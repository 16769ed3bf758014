"""Golden files quantized with ComfyUI's own layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from raw_files import golden, golden_metadata
from safetensors.torch import save_file

#: format -> what quantizes a matrix, and what ComfyUI has to be told of it
FORMATS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "int8": ("int8_tensorwise", {}, {}),
    "int8_rows": ("int8_tensorwise", {"per_channel": True}, {}),
    "int8_convrot": (
        "int8_tensorwise",
        {"per_channel": True, "convrot": True, "convrot_groupsize": 16},
        {"convrot": True, "convrot_groupsize": 16},
    ),
    "fp8_scaled": ("float8_e4m3fn", {"scale": "recalculate"}, {}),
    "nvfp4": ("nvfp4", {"scale": "recalculate"}, {}),
    "mxfp8": ("mxfp8", {}, {}),
}


def quantize(source: str, kind: str, target: Path) -> Path:
    """A golden file with the matrices of its joint blocks quantized."""
    format_name, options, told = FORMATS[kind]
    layout = QUANT_ALGOS[format_name]["comfy_tensor_layout"]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in golden(source).items():
        if name.startswith("layers.") and ".proj." in name:
            quantized = QuantizedTensor.from_float(tensor.float(), layout, **options)
            tensors |= {key: value.contiguous() for key, value in quantized.state_dict(name).items()}
            mark = json.dumps({"format": format_name, **told}).encode()
            tensors[name.removesuffix("weight") + "comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)
        else:
            tensors[name] = tensor
    save_file(tensors, target, golden_metadata(source))
    return target


def old_scaled_fp8(source: str, target: Path) -> Path:
    """The layout of before: `scaled_fp8` marks the file, each matrix has its `scale_weight`."""
    tensors: dict[str, torch.Tensor] = {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    for name, tensor in golden(source).items():
        if name.startswith("layers.") and ".proj." in name:
            scale = tensor.float().abs().max() / 448
            tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "scale_weight"] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, target, golden_metadata(source))
    return target


def make_file(name: str, kind: str, folder: Path) -> Path:
    target = folder / f"{name}_{kind}.safetensors"
    return old_scaled_fp8(name, target) if kind == "scaled_fp8" else quantize(name, kind, target)
