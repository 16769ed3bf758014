"""Whether this ComfyUI has a MOSS-Image class of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import comfy.model_detection

log = logging.getLogger(__name__)


def native_config(weights: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> Any | None:
    """ComfyUI's model config for MOSS-Image weights under their bare names; None where it has no class for them."""
    try:
        return comfy.model_detection.model_config_from_unet(dict(weights), "", metadata=dict(metadata or {}))
    except Exception as error:  # detection of other models may stumble over our keys
        log.debug("ComfyUI's model detection failed on MOSS-Image keys: %s", error)
        return None
