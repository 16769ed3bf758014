"""A MOSS-Image class of ComfyUI's own that calls its modules otherwise: one entry of `CLASSES`, and all of it works."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_runs import conditioning, fixed, rel, report, sample, stock, unload
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.fold.names import OFFICIAL
from moss_fp16_pack.nodes.model import moss
from repo import load_module

FOREIGN = Path(__file__).parent / "foreign_pack"
#: Attribute in the class's source -> its other name, and the entry that says so.
ATTRIBUTES = {
    "video_embedder": "image_in", "shared_block_modulation": "modulation", "final_norm_video": "norm_out",
    "layers": "stack", "o": "to_out", "ffn_down": "down", "norm1": "norm_a",
}  # fmt: skip
ENTRY = OFFICIAL.renamed(
    {
        "video_embedder": "image_in",
        "shared_block_modulation": "modulation",
        "final_norm_video": "norm_out",
        "layers": "stack",
        "layers.*.proj.o": "proj.to_out",
        "layers.*.proj.ffn_down": "proj.down",
        "layers.*.norm1": "norm_a",
        "text_embedder.blocks.*.ffn_down": "down",
        "text_embedder.blocks.*.norm1": "norm_a",
    }
)


@pytest.fixture
def renamed(tmp_path: Path) -> Iterator[None]:
    """The foreign class with other attribute names; files keep the official keys, as ComfyUI converts them."""
    folder, name = tmp_path / "pack", "renamed.foreign_moss_pack"
    folder.mkdir()
    source = (FOREIGN / "model.py").read_text()
    for old, new in ATTRIBUTES.items():
        source = re.sub(rf"(?<=\.){old}\b", new, source)
    (folder / "model.py").write_text(source)
    (folder / "__init__.py").write_text((FOREIGN / "__init__.py").read_text())
    pack: Any = load_module(name, folder)
    convert = pack.ForeignMossConfig.process_unet_state_dict

    def converted(self: Any, weights: dict[str, Any]) -> dict[str, Any]:
        def other(key: str) -> str:
            return ".".join(ATTRIBUTES.get(part, part) for part in key.split("."))

        return {other(key): weight for key, weight in convert(self, weights).items()}

    pack.ForeignMossConfig.process_unet_state_dict = converted
    pack.register()
    yield
    pack.register.undo()
    del sys.modules[name], sys.modules[f"{name}.model"]
    with torch.inference_mode():
        unload()


OPTIONS: dict[str, dict[str, Any]] = {
    "native": {"fix": "online", "c": 1 / 16},
    "managed": {"fix": "fp32_residual"},
    "s": {"fix": "online", "c": 1 / 16, "s_ffn": 1 / 4},
}


def runs() -> dict[str, tuple[torch.Tensor, Any]]:
    """Latent and peaks of one sampling run per set of options."""
    found = {}
    for name, options in OPTIONS.items():
        model = fixed(stock("hot", "fp16"), **options)
        latent = sample(model, conditioning("hot"), steps=2)
        found[name] = latent, [(block["name"], block["max_abs"]) for block in report(model)["blocks"]]
        assert report(model)["rescues"] == [] and (report(model)["self_check"] or {}).get("result") != "failed"
    return found


@pytest.fixture
def official() -> dict[str, tuple[torch.Tensor, Any]]:
    """The same runs of the class as it is."""
    from comfy_runs import foreign_pack

    pack = foreign_pack()
    pack.register()
    found = runs()
    pack.register.undo()
    with torch.inference_mode():
        unload()
    return found


def test_an_entry_in_classes_is_all_that_a_renamed_class_needs(
    official: dict[str, tuple[torch.Tensor, Any]], renamed: None, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moss, "CLASSES", (OFFICIAL, ENTRY))
    found = runs()
    assert moss.arch_of(stock("hot", "fp16").model.diffusion_model).names == ENTRY
    for name, (latent, peaks) in official.items():
        assert rel(found[name][0], latent) == 0.0, name
        assert found[name][1] == peaks, name


def test_a_renamed_class_without_an_entry_is_not_taken_for_moss_image(renamed: None) -> None:
    with pytest.raises(MossError, match="needs a MOSS-Image MODEL"):
        fixed(stock("hot", "fp16"))
