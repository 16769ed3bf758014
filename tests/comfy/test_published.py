"""The archive as the registry hands it out, in a real ComfyUI: nothing in it needs what was left out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from comfy_server import ComfyServer
from registry import published_files
from repo import DATA, PACK_NAME, ROOT, find_comfyui, load_module
from safetensors.torch import load_file, save_file

SETTINGS = ("MossFP16Loader.model_name=hot.safetensors", "KSampler.steps=2", "EmptyFlux2LatentImage.width=64",
            "EmptyFlux2LatentImage.height=64")  # fmt: skip


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published files, copied to where nothing else lies."""
    folder = tmp_path_factory.mktemp("published") / PACK_NAME
    for name in published_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def client(pack: Path) -> Any:
    """The client script among them."""
    return load_module("published_client", pack / "example_workflows" / "api" / "queue_prompt.py")


def test_a_run_from_the_published_files(pack: Path, client: Any, tmp_path: Path) -> None:
    comfyui, context = find_comfyui(), load_file(DATA / "hot_io.safetensors")["case0.context"].contiguous()
    assert comfyui is not None
    server = ComfyServer(comfyui, tmp_path, pack=pack, models=[DATA / "hot.safetensors"])
    for name in ("moss_positive", "moss_negative"):
        save_file({"context": context}, server.base / "input" / f"{name}.safetensors")
    with server:
        nodes = server.client.call("GET", "/object_info")
        assert sum(node.startswith("MossFP16") for node in nodes) == 8
        assert f"/extensions/{PACK_NAME}/panel.js" in server.client.call("GET", "/extensions")
        assert server.client.call("GET", "/workflow_templates")[PACK_NAME]
        assert server.client.call("GET", "/i18n")["zh"]["nodeDefs"]["MossFP16Loader"]
        prompt = client.load_workflow(pack / "example_workflows" / "api" / "moss_fp16_headless.json")
        for setting in SETTINGS:
            client.apply_setting(prompt, setting)
        (report,) = client.reports(server.run(prompt))
        assert report["mode"] == "online" and report["summary"]["non_finite"] == 0


def test_the_command_line_from_the_published_files(pack: Path) -> None:
    command = [sys.executable, "-m", "fold", "inspect", str(DATA / "hot.safetensors"), "--json"]
    done = subprocess.run(command, cwd=pack, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["arch"]["dim"] == 64
