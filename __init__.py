"""MOSS-Image in fp16 for ComfyUI: the entry that ComfyUI imports.

Outside ComfyUI (test collection, packaging) this imports nothing of it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

WEB_DIRECTORY = "./web"

if find_spec("comfy_api") is not None and __package__:

    async def comfy_entrypoint() -> Any:
        """ComfyUI's V3 entry point."""
        from .nodes import MossFP16Extension

        return MossFP16Extension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"] if "comfy_entrypoint" in globals() else ["WEB_DIRECTORY"]
