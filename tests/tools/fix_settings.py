"""The Fix node's settings that the proof is held to, in tests/comfy and in the bench: each way to compute a call."""

from __future__ import annotations

from typing import Any

#: name -> the Fix node's inputs
SETTINGS: dict[str, dict[str, Any]] = {
    "online": {"fix": "online", "c": 1 / 16},
    "online 1/256": {"fix": "online", "c": 1 / 256},
    "managed": {"fix": "online", "c": 1 / 16, "engine": "managed"},
    "fp32_residual": {"fix": "fp32_residual"},
    "per block": {"fix": "online", "c": [1 / 16, 1 / 32, 1 / 32, 1 / 64]},
    "s": {"fix": "online", "c": 1 / 16, "s_attn": 1 / 2, "s_ffn": 1 / 64},
    "clamp": {"fix": "online", "c": 1 / 16, "clamp": True},
}
#: Those on the class's own forward; the others are on ours.
FOLDS = ("online", "online 1/256")
