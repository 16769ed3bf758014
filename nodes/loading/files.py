"""The models that our lists offer, and the path of each: what ComfyUI's own lists show for the same folders, once."""

from __future__ import annotations

import os
from pathlib import Path

import folder_paths

from ...fold.checkpoint.header import clip, is_safetensors
from ...fold.checkpoint.reader import INDEX_NAME, SINGLE_NAME, SUBFOLDER
from ...fold.errors import MossError


def model_names() -> list[str]:
    """The list's entries: files of diffusion_models by name, others as their folder's name and theirs."""
    names = [*_files("diffusion_models"), *(f"checkpoints/{name}" for name in _files("checkpoints"))]
    return list(dict.fromkeys([*names, *(f"diffusers/{name}" for name in hf_folders())]))


def model_path(name: str) -> str:
    """The path of a name from the list. Raises MossError for any other name (nothing outside the folders is opened)."""
    folder, _, rest = name.partition("/")
    if folder == "diffusers" and (found := hf_folders().get(rest)):
        return str(found)
    if folder == "checkpoints" and rest in _files("checkpoints"):
        return str(folder_paths.get_full_path_or_raise("checkpoints", rest))
    if name in _files("diffusion_models"):
        return str(folder_paths.get_full_path_or_raise("diffusion_models", name))
    raise MossError(f"{clip(name)} is not among the models of this ComfyUI: press R to refresh the list.")


def _files(kind: str) -> list[str]:
    return [name for name in folder_paths.get_filename_list(kind) if is_safetensors(name)]


def hf_folders() -> dict[str, Path]:
    """Folders below models/diffusers, at any depth, that hold a transformer; the first of each name counts."""
    found: dict[str, Path] = {}
    roots = folder_paths.get_folder_paths("diffusers") if "diffusers" in folder_paths.folder_names_and_paths else []
    for root in map(Path, roots):
        seen: set[str] = set()
        for place, folders, files in os.walk(root, followlinks=True):  # as ComfyUI walks them
            if _is_new(place, seen) and Path(place) != root and _holds_transformer(Path(place), files):
                found.setdefault(Path(place).relative_to(root).as_posix(), Path(place))
                folders.clear()  # its transformer is not another model
            folders[:] = sorted(name for name in folders if _is_new(f"{place}/{name}", seen, keep=False))
    return dict(sorted(found.items()))


def _is_new(place: str, seen: set[str], keep: bool = True) -> bool:
    """Whether a folder has not been looked into: a link to one further up would never end."""
    real = os.path.realpath(place)
    if real in seen:
        return False
    if keep:
        seen.add(real)
    return True


def _holds_transformer(folder: Path, files: list[str]) -> bool:
    marks = (SINGLE_NAME, INDEX_NAME)
    return any(mark in files or (folder / SUBFOLDER / mark).exists() for mark in marks)
