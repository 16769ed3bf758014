"""Our lists of models show what ComfyUI's own lists show for the same folders, once each, and all of it loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import folder_paths
import pytest
from moss_fp16_pack.fold.checkpoint.reader import open_checkpoint
from moss_fp16_pack.nodes.loading.files import hf_folders, model_names, model_path
from repo import DATA

import nodes

HOT = DATA / "hot.safetensors"
NAMES = ("UPPER.SAFETENSORS", "short.sft", "Mixed.SafeTensors", "sub/inner.safetensors", "no.ckpt", "no.txt")


@pytest.fixture
def folders(base: Path, tmp_path: Path) -> Iterator[Path]:
    """Files of every spelling in three folders, and HF folders at several depths in two of them."""
    made: list[Path] = []

    def link(place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(HOT)
        made.append(place)

    for kind in ("diffusion_models", "checkpoints"):
        for name in NAMES:
            link(base / "models" / kind / name)
    diffusers, second = base / "models" / "diffusers", tmp_path / "second"
    for root, name in ((diffusers, "flat"), (diffusers, "org/deep"), (second, "flat"), (second, "other")):
        link(root / name / "transformer" / "diffusion_pytorch_model.safetensors")
        (root / name / "model_index.json").write_text("{}", "utf-8")
    (diffusers / "loop").symlink_to(diffusers, target_is_directory=True)
    folder_paths.add_model_folder_path("diffusers", str(second))
    folder_paths.filename_list_cache.clear()
    yield second
    (diffusers / "loop").unlink()
    for place in made:
        place.unlink()
    for index in diffusers.rglob("model_index.json"):
        index.unlink()
    folder_paths.folder_names_and_paths["diffusers"][0].remove(str(second))
    folder_paths.filename_list_cache.clear()


def test_the_lists_show_what_comfyuis_show(folders: Path) -> None:
    names = model_names()
    assert len(names) == len(set(names))
    for kind, mark in (("diffusion_models", ""), ("checkpoints", "checkpoints/")):
        theirs = {name for name in folder_paths.get_filename_list(kind) if not name.endswith(".ckpt")}
        assert {mark + name for name in theirs} <= set(names)
        assert {mark + name for name in NAMES[:4]} <= set(names)
    assert not any(name.endswith((".ckpt", ".txt")) for name in names)


def test_hf_folders_at_any_depth_once_each(folders: Path) -> None:
    assert list(hf_folders()) == ["flat", "org/deep", "other"]
    (theirs,) = nodes.DiffusersLoader.INPUT_TYPES()["required"]["model_path"]
    assert set(hf_folders()) <= set(theirs)


def test_all_of_the_list_opens(folders: Path) -> None:
    for name in model_names():
        with open_checkpoint(model_path(name)) as checkpoint:
            assert checkpoint.arch.depth == 4, name
