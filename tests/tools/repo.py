"""Where things are: this repository, its virtual environment and a ComfyUI that the user has. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACK_NAME = "ComfyUI-MOSS-FP16"
DATA = ROOT / "tests" / "data"
NO_COMFYUI = "no ComfyUI at $COMFYUI_DIR, around this pack (custom_nodes) or at ~/comfy/ComfyUI"


def find_comfyui() -> Path | None:
    """The ComfyUI to test with: $COMFYUI_DIR, else the one this pack is installed in, else comfy-cli's usual place."""
    places = [Path(os.environ["COMFYUI_DIR"]).expanduser()] if os.environ.get("COMFYUI_DIR") else []
    # A pack that is linked into custom_nodes resolves to its real place, so look at the unresolved path as well.
    for here in (ROOT, Path(__file__).absolute().parents[2]):
        if here.parent.name == "custom_nodes":
            places.append(here.parent.parent)
    places.append(Path.home() / "comfy" / "ComfyUI")
    for place in places:
        if (place / "main.py").is_file() and (place / "comfy" / "cli_args.py").is_file():
            return place.resolve()
    return None
