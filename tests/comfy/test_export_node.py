"""The save node on a real ComfyUI: what it writes loads again, through our loader and back to the original."""

from __future__ import annotations

from pathlib import Path

import comfy.model_management
import folder_paths
import pytest
import torch
from comfy_runs import conditioning, fixed, load, rel, report, sample
from moss_fp16_pack.fold.checkpoint.reader import open_checkpoint
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.nodes.export import MossFP16Export
from moss_fp16_pack.nodes.loading.load import load_moss
from safetensors.torch import load_file

from repo import DATA  # isort: skip

FOLD = {"action": "fold", "c": "1/16", "dtype": "fp16", "filename_prefix": "diffusion_models/test"}


def written() -> list[Path]:
    return sorted(Path(folder_paths.get_output_directory()).rglob("*"))


def test_the_golden_export_through_the_node() -> None:
    (path,) = MossFP16Export.execute(model_name="hot.safetensors", s_attn="1/2", s_ffn="1/4", **FOLD).args
    ours, theirs = load_file(path), load_file(DATA / "hot_fp16fix_s.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    prompt = conditioning("hot")
    reference = sample(load("hot", "fp32"), prompt)
    for unfold in (True, False):
        model = fixed(load_moss(path, "fp16", unfold, "builtin"), guard="report")
        assert rel(sample(model, prompt), reference) < 4e-3
        assert report(model)["mode"] == ("online" if unfold else "weights")
        assert report(model)["summary"]["saturated"] == 0


def test_unfold_gives_the_original_back() -> None:
    inputs = {**FOLD, "action": "unfold", "dtype": "keep", "filename_prefix": "diffusion_models/plain"}
    (path,) = MossFP16Export.execute(model_name="hot_fp16fix_bf16.safetensors", **inputs).args
    original = load_file(DATA / "hot.safetensors")
    assert all(torch.equal(tensor, original[name]) for name, tensor in load_file(path).items())
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.record is None


def test_cancel_and_bad_input_leave_nothing() -> None:
    before = written()
    comfy.model_management.interrupt_current_processing(True)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        MossFP16Export.execute(model_name="hot.safetensors", **FOLD)
    for inputs, words in (
        ({"model_name": "../hot.safetensors"}, "not among the models"),
        ({"c": "0"}, "c must be"),
        ({"c": "1/16, 1/8, 1/4, 1/2"}, "cannot be folded|cannot be written"),
        ({"action": "unfold"}, "carries no fold record"),
    ):
        with pytest.raises(MossError, match=words):
            MossFP16Export.execute(**{"model_name": "hot.safetensors", **FOLD, **inputs})
    assert written() == before
