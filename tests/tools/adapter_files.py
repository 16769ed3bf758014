"""Adapter files of every kind, for golden models of any class."""

from __future__ import annotations

from typing import Any

import comfy.sd
import torch
from moss_fp16_pack.nodes.model.stored_fold import stored_fold_of

PREFIX = "diffusion_model."
RANK = 2


def linears(model: Any) -> dict[str, torch.Size]:
    """Every linear of a MODEL by bare path: all kinds of layer, and one block of each kind of block."""
    tree = model.model.diffusion_model
    found = {}
    for path, module in tree.named_modules():
        if isinstance(module, torch.nn.Linear) and ("blocks." not in path or ".0." in path):
            if path.startswith("layers.") and not path.startswith("layers.1."):
                continue
            found[path] = module.weight.shape
    return found


def factor(numbers: torch.Generator, *shape: int, size: float = 0.05) -> torch.Tensor:
    return torch.randn(*shape, generator=numbers) * size


def adapter(kind: str, model: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """An adapter file on all kinds of layer."""
    numbers = torch.Generator().manual_seed(seed)
    file: dict[str, torch.Tensor] = {}
    for path, (rows, columns) in linears(model).items():
        key = PREFIX + path
        match kind:
            case "lora":
                file[f"{key}.lora_up.weight"] = factor(numbers, rows, RANK, size=0.2)
                file[f"{key}.lora_down.weight"] = factor(numbers, RANK, columns, size=0.2)
                file[f"{key}.alpha"] = torch.tensor(1.0)
            case "lora_ab":
                file[f"{key}.lora_B.weight"] = factor(numbers, rows, RANK, size=0.2)
                file[f"{key}.lora_A.weight"] = factor(numbers, RANK, columns, size=0.2)
            case "dora":
                file[f"{key}.lora_up.weight"] = factor(numbers, rows, RANK, size=0.2)
                file[f"{key}.lora_down.weight"] = factor(numbers, RANK, columns, size=0.2)
                weight = model.model.diffusion_model.get_submodule(path).weight.float()
                norms = weight.norm(dim=1, keepdim=True) * (1 + factor(numbers, rows, 1).abs())
                file[f"{key}.dora_scale"] = norms * unfold_of(model, path)
            case "lokr":
                file[f"{key}.lokr_w1"] = factor(numbers, 2, 2, size=0.2)
                file[f"{key}.lokr_w2"] = factor(numbers, rows // 2, columns // 2, size=0.1)
            case "loha":
                for side in ("w1", "w2"):
                    file[f"{key}.hada_{side}_a"] = factor(numbers, rows, RANK, size=0.3)
                    file[f"{key}.hada_{side}_b"] = factor(numbers, RANK, columns, size=0.3)
                file[f"{key}.alpha"] = torch.tensor(1.0)
            case "diff":
                file[f"{key}.diff"] = factor(numbers, rows, columns, size=0.02)
                if model.model.diffusion_model.get_submodule(path).bias is not None:
                    file[f"{key}.diff_b"] = factor(numbers, rows, size=0.02)
    if kind == "diff":
        for norm in ("layers.1.norm1", "layers.1.q_norm", "text_embedder.blocks.0.norm2", "final_norm_video"):
            size = model.model.diffusion_model.get_submodule(norm).weight.shape
            file[f"{PREFIX}{norm}.w_norm"] = factor(numbers, *size)
    return file


def unfold_of(model: Any, path: str) -> torch.Tensor | float:
    """What a folded file's rows must be divided by: adapters are made for the weights without the fold."""
    from moss_fp16_pack.fold.scaling.weights import row_scale
    from moss_fp16_pack.nodes.model.moss import arch_of

    source = stored_fold_of(model)
    if source.record is None or source.unfolded:
        return 1.0
    scale = row_scale(f"{path}.weight", arch_of(model.model.diffusion_model), source.record.factors)
    return 1.0 if scale is None else 1.0 / torch.as_tensor(scale).reshape(-1, 1)


def with_adapter(model: Any, file: dict[str, torch.Tensor], strength: float = 1.0) -> Any:
    """As LoraLoaderModelOnly does it."""
    return comfy.sd.load_lora_for_models(model, None, dict(file), strength, 0)[0]


KINDS = ["lora", "lora_ab", "dora", "lokr", "loha", "diff"]
