"""Where things are: this repository, its virtual environment and a ComfyUI to test with. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

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


def load_module(name: str, path: Path) -> ModuleType:
    """Import a file, or the package in a folder, under a name of its own; nothing of it needs to be on sys.path."""
    folder = path.is_dir()
    spec = importlib.util.spec_from_file_location(
        name, path / "__init__.py" if folder else path, submodule_search_locations=[str(path)] if folder else None
    )
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
