"""Which dtype is used where: names, and the rule for stored parameters."""

from __future__ import annotations

import torch

from .errors import MossError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: Conditioning and head: small, and half of the rounding error if they were not fp32.
FP32_MODULES = (
    "rope.",
    "time_embedding.",
    "shared_block_modulation.",
    "video_head_modulation.",
    "final_norm_video.",
    "final_linear_video.",
)


def parse_dtype(name: str) -> torch.dtype:
    """fp32, fp16 or bf16."""
    if name not in DTYPES:
        raise MossError(f"The dtype is one of {', '.join(DTYPES)}, not {name!r}.")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype | None) -> str:
    """The short name, for people: "fp16"."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch.")) if dtype is not None else "unknown"


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parameter `name` (bare key) is kept when the model computes in `dtype`."""
    return torch.float32 if name.startswith(FP32_MODULES) or "norm" in name else dtype
