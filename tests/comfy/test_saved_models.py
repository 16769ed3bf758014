"""A MODEL saved by ComfyUI's own node, with all that it writes into the file, is loaded again."""

from __future__ import annotations

from pathlib import Path

import folder_paths
import pytest
import torch
from comfy_extras.nodes_model_merging import ModelSave
from comfy_runs import conditioning, load, sample
from moss_fp16_pack.fold.checkpoint.reader import open_checkpoint
from moss_fp16_pack.nodes.loading.load import load_moss

MEGABYTES = 5


@pytest.mark.parametrize("metadata", ["workflow", "none"])
def test_a_saved_model_is_loaded_again(metadata: str) -> None:
    model, prompt = load("hot", "fp32"), conditioning("hot")
    # as the page sends it: nodes, links and a note with more text than any header used to hold
    note = "the same prompt once more \U0001f642 " * (MEGABYTES * 2**20 // 30)
    extra = {"workflow": {"nodes": [{"id": 1, "type": "Note", "widgets_values": [note]}]}}
    if metadata == "workflow":
        ModelSave().save(model, f"diffusion_models/saved_{metadata}", prompt={"1": {}}, extra_pnginfo=extra)
    else:
        ModelSave().save(model, f"diffusion_models/saved_{metadata}")
    (file,) = Path(folder_paths.get_output_directory()).glob(f"diffusion_models/saved_{metadata}*")
    try:
        with open_checkpoint(file) as checkpoint:
            assert (len(checkpoint.metadata.get("workflow", "")) > MEGABYTES * 2**20) == (metadata == "workflow")
        again = load_moss(str(file), "fp32", True, "auto")
        assert torch.equal(sample(again, prompt), sample(model, prompt))
    finally:
        file.unlink()
