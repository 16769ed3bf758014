"""MOSS-Image in fp16 for ComfyUI: the entry that ComfyUI imports.

Outside ComfyUI (test collection, packaging) this imports nothing of it. Where the pack is installed twice, the copy
that ComfyUI imports second has nothing to offer: two of a kind would share routes and a page, and neither would work.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

#: Under this name the copy at work is known to any other one in the process; its `__file__` is that copy's folder.
_COPY_AT_WORK = "comfyui_moss_fp16_copy_at_work"
_HERE = str(Path(__file__).parent)


def _copy_at_work() -> str | None:
    """The folder of another copy of this pack that ComfyUI has loaded already."""
    other = sys.modules.get(_COPY_AT_WORK)
    return None if other is None or other.__file__ == _HERE else other.__file__


WEB_DIRECTORY = "./web" if _copy_at_work() is None else None

if find_spec("comfy_api") is not None and __package__:

    async def comfy_entrypoint() -> Any:
        """ComfyUI's V3 entry point."""
        if (other := _copy_at_work()) is not None:
            from comfy_api.latest import ComfyExtension

            class StandsBack(ComfyExtension):
                """The second copy's extension: no nodes, no routes."""

                async def get_node_list(self) -> list[Any]:
                    return []

            logging.getLogger(__name__).error(
                "ComfyUI-MOSS-FP16 is installed twice: in %s and in %s. The first one works and the second one stands "
                "back. Remove one of the two folders and restart ComfyUI.",
                other,
                _HERE,
            )
            return StandsBack()
        from .nodes import MossFP16Extension

        note = sys.modules.setdefault(_COPY_AT_WORK, ModuleType(_COPY_AT_WORK))
        note.__file__ = _HERE  # only now: a copy that could not be imported is no reason to stand back
        return MossFP16Extension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"] if "comfy_entrypoint" in globals() else ["WEB_DIRECTORY"]
