"""The proof through a real server: a class of ComfyUI's own that is built otherwise, its report and its toast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comfy_server import ComfyServer
from repo import DATA, ROOT, find_comfyui
from safetensors.torch import load_file, save_file

NAMES = ("cool", "hot")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ComfyServer, Callable[[str], None]]]:
    """A server with such a class, and what says how it is built from the next load on."""
    comfyui = find_comfyui()
    assert comfyui is not None
    folder = tmp_path_factory.mktemp("foreign")
    how = folder / "class.txt"
    how.write_text("", "utf-8")
    packs = {"foreign_moss": ROOT / "tests" / "comfy" / "foreign_pack"}
    running = ComfyServer(comfyui, folder / "base", packs=packs)
    for name in NAMES:
        context = load_file(DATA / f"{name}_io.safetensors")["case0.context"].contiguous()
        save_file({"context": context}, running.base / "input" / f"{name}.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSS_FOREIGN_CLASS", str(how))
        with running:
            yield running, lambda fields: how.write_text(fields, "utf-8") and None


def job(name: str, seed: int, **fix: Any) -> dict[str, Any]:
    """Loader -> KSampler -> Report on a golden model, three steps at cfg 3."""
    loader = {"model_name": f"{name}.safetensors", "compute_dtype": "fp16", "fix": "auto", "guard": "rescue", **fix}
    sampler = {"seed": seed, "steps": 3, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {"model": ["1", 0], "positive": ["3", 0], "negative": ["3", 0], "latent_image": ["4", 0]}
    return {
        "1": {"class_type": "MossFP16Loader", "inputs": loader},
        "3": {"class_type": "MossFP16LoadConditioning", "inputs": {"file": f"{name}.safetensors"}},
        "4": {"class_type": "EmptyFlux2LatentImage", "inputs": {"width": 96, "height": 64, "batch_size": 1}},
        "5": {"class_type": "KSampler", "inputs": {**sampler, **links}},
        "6": {"class_type": "MossFP16Report", "inputs": {"model": ["1", 0], "passthrough": ["5", 0]}},
    }


@pytest.mark.parametrize(
    ("fields", "settings", "name"),
    [
        # each is loaded anew: the inputs differ
        ("writer=0.5", {}, "hot"),
        ("writer=0.02", {"fix": "online", "c": "1/8"}, "cool"),
        ("rope=0.5", {"fix": "online", "s_ffn": "1/4"}, "cool"),
    ],
)
def test_a_class_built_otherwise_runs_without_the_fix_and_says_so(
    built: Any, fields: str, settings: dict[str, str], name: str
) -> None:
    server, choose = built
    choose(fields)
    with server.events() as events:
        entry = server.run(job(name, 1, **settings))
        toasts = events.of("moss_fp16.notice")
    (report,) = entry["outputs"]["6"]["moss_fp16_report"]
    assert report["self_check"]["result"] == "failed" and report["self_check"]["difference"] > 1e-4
    assert report["mode"] == "none" and report["engine"] == "native" and report["compute_dtype"] == "fp32"
    (said,) = [said for said in report["messages"] if said["key"] == "self_check_failed"]
    assert [toast["kind"] for toast in toasts] == ["self_check"]
    assert "built otherwise" in said["text"] and toasts[0]["text"] == said["text"]


def test_what_is_asked_for_by_hand_is_an_error_before_the_first_step(built: Any) -> None:
    server, choose = built
    choose("rope=0.5")
    with pytest.raises(Exception, match="built otherwise than the fix knows"):
        server.run(job("cool", 2, fix="fp32_residual"))
    entry = server.run(job("cool", 3, fix="fp32_residual", accept_unproven=True))
    (report,) = entry["outputs"]["6"]["moss_fp16_report"]
    assert report["self_check"]["result"] == "accepted" and report["mode"] == "fp32_residual"
