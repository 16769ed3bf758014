"""The pack installed twice: one loud line at start, one working copy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from comfy_server import ComfyServer
from repo import DATA, PACK_NAME, ROOT, find_comfyui
from safetensors.torch import load_file, save_file


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


PROMPT = {
    "1": node(
        "MossFP16Loader", model_name="hot.safetensors", compute_dtype="fp16", fix="auto", guard="rescue"
    ),
    "2": node("MossFP16LoadConditioning", file="hot_case0.safetensors"),
    "3": node("EmptyFlux2LatentImage", width=96, height=96, batch_size=1),
    "4": node(
        "KSampler",
        model=["1", 0], positive=["2", 0], negative=["2", 0], latent_image=["3", 0],
        seed=7, steps=2, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0,
    ),
    "5": node("MossFP16Report", model=["1", 0], passthrough=["4", 0]),
}  # fmt: skip


def copied(folder: Path) -> Path:
    """The parts of the pack that ComfyUI uses, copied."""
    shutil.copytree(ROOT / "fold", folder / "fold", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("nodes", "web", "locales"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    for name in ("__init__.py", "pyproject.toml"):
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("second", [f"{PACK_NAME}-main", "aa_first"])
def test_one_of_two_copies_works(tmp_path: Path, second: str) -> None:
    comfyui = find_comfyui()
    assert comfyui is not None
    packs = {second: copied(tmp_path / "copy")}
    with ComfyServer(comfyui, tmp_path / "base", packs=packs) as server:
        lines = [line for line in server.log().splitlines() if "installed twice" in line]
        assert len(lines) == 1 and "stands back" in lines[0] and "Remove one of the two" in lines[0]
        assert str(server.base / "custom_nodes" / second) in lines[0]
        assert str(server.base / "custom_nodes" / PACK_NAME) in lines[0]
        assert "IMPORT FAILED" not in server.log() and "Traceback" not in server.log()
        pages = [path for path in server.client.call("GET", "/extensions") if path.endswith("/panel.js")]
        assert len(pages) == 1, "the page would load the panel twice"
        context = load_file(DATA / "hot_io.safetensors")["case0.context"]
        save_file({"context": context}, server.base / "input" / "hot_case0.safetensors")
        (report,) = server.run(PROMPT)["outputs"]["5"]["moss_fp16_report"]
        assert report["mode"] == "online" and report["model_calls"] == 2
        assert server.client.call("GET", "/moss_fp16/reports")["1"]["state"] == "done"
