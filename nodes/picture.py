"""A drawn chart as ComfyUI's IMAGE."""

from __future__ import annotations

from typing import Any

import torch


def image_of(chart: Any) -> torch.Tensor:
    """uint8 [H, W, 3] -> IMAGE [1, H, W, 3] fp32 in 0..1."""
    return torch.tensor(chart).float().div(255.0)[None]
