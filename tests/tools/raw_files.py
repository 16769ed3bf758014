"""Safetensors files made by hand: damaged ones, and golden ones with a few tensors changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from repo import DATA
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def raw_file(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write ``header`` (JSON-able, text or bytes) and ``data``; ``length``: what the file claims of its header."""
    if not isinstance(header, str | bytes):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return file


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def golden(name: str) -> dict[str, Tensor]:
    """All tensors of a golden file."""
    return load_file(DATA / f"{name}.safetensors")


def golden_metadata(name: str) -> dict[str, str]:
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        return dict(file.metadata() or {})


def save(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata)
    return file


def shard(folder: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    """Write ``tensors`` as an HF folder of two shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    half = len(names) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), start=1):
        shard_name = f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        save(folder / shard_name, {name: tensors[name] for name in part}, metadata)
        weight_map |= dict.fromkeys(part, shard_name)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def quantized(kind: str) -> dict[str, Tensor]:
    """The cool model with the matrices of its blocks quantized (by shape only; the numbers mean nothing)."""
    tensors = golden("cool")
    for name in [key for key in tensors if ".proj." in key and key.startswith("layers.")]:
        rows, columns = tensors[name].shape
        module = name.removesuffix(".weight")
        match kind:
            case "int8":
                tensors[name] = torch.ones(rows, columns, dtype=torch.int8)
                tensors[f"{module}.weight_scale"] = torch.ones(rows, 1)
                tensors[f"{module}.comfy_quant"] = torch.zeros(20, dtype=torch.uint8)
            case "fp8_scaled":
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                tensors[f"{module}.scale_weight"] = torch.ones(())
            case "nvfp4":
                tensors[name] = torch.ones(rows, columns // 2, dtype=torch.uint8)
                tensors[f"{module}.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
                tensors[f"{module}.weight_scale_2"] = torch.ones(())
            case "fp8":
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    return tensors
