"""Where things are: this repository, its virtual environment and a ComfyUI to test with. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACK_NAME = "ComfyUI-MOSS-FP16"
DATA = ROOT / "tests" / "data"
OWN_COMFYUI = ".comfyui"  # the one that dev.py gets when there is no other
NO_COMFYUI = "no ComfyUI at $COMFYUI_DIR, around this pack (custom_nodes), at ~/comfy/ComfyUI or in .comfyui"


def is_comfyui(folder: Path) -> bool:
    """Whether a folder holds ComfyUI's source."""
    return (folder / "main.py").is_file() and (folder / "comfy" / "cli_args.py").is_file()


def find_comfyui() -> Path | None:
    """The ComfyUI to test with: $COMFYUI_DIR, the one this pack is installed in, ~/comfy/ComfyUI, or .comfyui here.

    Raises FileNotFoundError when $COMFYUI_DIR names a folder that holds none: another one would not be what was meant.
    """
    if given := os.environ.get("COMFYUI_DIR"):
        if not is_comfyui(Path(given).expanduser()):
            raise FileNotFoundError(f"$COMFYUI_DIR is {given}, which holds no ComfyUI (main.py and comfy/cli_args.py).")
        return Path(given).expanduser().resolve()
    places = []
    # A pack that is linked into custom_nodes resolves to its real place, so look at the unresolved path as well.
    for here in (ROOT, Path(__file__).absolute().parents[2]):
        if here.parent.name == "custom_nodes":
            places.append(here.parent.parent)
    places += [Path.home() / "comfy" / "ComfyUI", ROOT / OWN_COMFYUI]
    return next((place.resolve() for place in places if is_comfyui(place)), None)
