"""Files as people have them: saved by ComfyUI's own node, without rope.bands, with a note of another program inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from comfy_extras.nodes_model_merging import ModelSave
from comfy_runs import conditioning, load, sample
from moss_fp16_pack.fold.checkpoint.reader import open_checkpoint
from moss_fp16_pack.nodes.loading.load import load_moss
from raw_files import golden, save
from repo import DATA

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


WITHOUT_ROPE = {key: value for key, value in golden("hot").items() if key != "rope.bands"}
FILES: dict[str, dict[str, Any]] = {
    "rope.bands left out": WITHOUT_ROPE,
    "a marker in it": golden("hot") | {"iteration": torch.tensor(70000)},
    "under a prefix": {f"model.diffusion_model.{key}": value for key, value in golden("hot").items()},
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", FILES)
def test_a_sound_file_raises_no_alarm(case: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It loads as the golden file does, and nothing in the log is more than a note."""
    file = save(tmp_path / "hot.safetensors", FILES[case])
    expected = sample(load("hot", dtype), conditioning("hot"))
    with caplog.at_level("INFO"):
        model = load_moss(str(file), dtype, True, "builtin")
    assert [record.getMessage() for record in caplog.records if record.levelname not in ("INFO", "DEBUG")] == []
    assert torch.equal(sample(model, conditioning("hot")), expected)


@pytest.mark.parametrize("name", [path.stem for path in sorted(DATA.glob("*.safetensors")) if "_io" not in path.stem])
def test_no_golden_file_raises_an_alarm(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        load(name, "fp32")
    assert [record.getMessage() for record in caplog.records if record.levelname not in ("INFO", "DEBUG")] == []
