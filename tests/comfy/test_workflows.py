"""The example workflows: each UI file and its API twin are the same job, and a real ComfyUI takes them.

After a change of a node's inputs, `python tests/tools/refresh_workflows.py` brings them up to date.
"""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import refresh_workflows
import torch
from comfy_server import ComfyServer, load_client
from refresh_workflows import EXAMPLES, TWINS, Json, Schema, is_widget
from safetensors.torch import load_file, save_file

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.json"))
MUTED = 2  # a node's mode in a UI workflow
#: inputs whose choices are the user's own files, or newer than the ComfyUI of these tests
FREE_CHOICES = {"model_name", "clip_name", "vae_name", "file", "type"}


@pytest.fixture(scope="module")
def schemas(server: ComfyServer) -> dict[str, Schema]:
    """Per node class, its inputs in order: (name, type, options)."""
    return refresh_workflows.schemas(server)


def load(name: str) -> tuple[Json, Json]:
    """(UI workflow, API workflow)."""
    ui = json.loads((EXAMPLES / f"{name}.json").read_text("utf-8"))
    return ui, json.loads((EXAMPLES / "api" / f"{TWINS[name]}.json").read_text("utf-8"))


def to_api(ui: Json, schemas: dict[str, Schema]) -> Json:
    """What the page would send for a UI workflow (no subgraphs or reroutes here)."""
    links = {link[0]: [str(link[1]), link[2]] for link in ui["links"]}
    prompt = {}
    for node in ui["nodes"]:
        if node["type"] == "MarkdownNote" or node["mode"] == MUTED:
            continue
        sockets = {socket["name"]: socket["link"] for socket in node["inputs"]}
        values, inputs = list(node["widgets_values"]), {}
        for name, kind, options in schemas[node["type"]]:
            if is_widget(kind, options):
                assert values, f"{node['type']} has no value for {name}: run tests/tools/refresh_workflows.py"
                inputs[name] = values.pop(0)
                if options.get("control_after_generate"):
                    values.pop(0)
            elif sockets.get(name) is not None:
                inputs[name] = links[sockets[name]]
        assert not values, f"{node['type']} has values left over: {values}"
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def test_both_examples_are_there() -> None:
    assert sorted(TWINS) == NAMES
    assert sorted(path.stem for path in (EXAMPLES / "api").glob("*.json")) == sorted(TWINS.values())


@pytest.mark.parametrize("name", NAMES)
def test_ui_workflow_is_the_api_workflow(name: str, schemas: dict[str, Schema]) -> None:
    ui, api = load(name)
    converted = to_api(ui, schemas)
    assert converted.keys() == api.keys()
    for key, node in api.items():
        assert converted[key] == {"class_type": node["class_type"], "inputs": node["inputs"]}, key


@pytest.mark.parametrize("name", NAMES)
def test_ui_links_and_groups_hold_together(name: str) -> None:
    ui, _ = load(name)
    nodes = {node["id"]: node for node in ui["nodes"]}
    assert len(nodes) == len(ui["nodes"]) and ui["last_node_id"] == max(nodes)
    for link, origin, out, target, into, kind in ui["links"]:
        assert link in nodes[origin]["outputs"][out]["links"]
        assert nodes[target]["inputs"][into]["link"] == link
        assert kind in (nodes[origin]["outputs"][out]["type"], nodes[target]["inputs"][into]["type"])
    for node in ui["nodes"]:
        left, top = node["pos"]
        inside = [g for g in ui["groups"] if covers(g["bounding"], left, top, *node["size"])]
        assert len(inside) == 1 or node["type"] == "MarkdownNote", node["type"]


def covers(box: list[float], left: float, top: float, width: float, height: float) -> bool:
    x, y, w, h = box
    return x <= left and y <= top and left + width <= x + w and top + height <= y + h


@pytest.mark.parametrize("name", NAMES)
def test_api_workflow_names_real_inputs_and_choices(name: str, schemas: dict[str, Schema]) -> None:
    for node in load(name)[1].values():
        known = {key: (kind, options) for key, kind, options in schemas[node["class_type"]]}
        for key, value in node["inputs"].items():
            assert key in known, f"{node['class_type']} has no input {key}"
            kind, options = known[key]
            choices = kind if isinstance(kind, list) else options.get("options")
            if choices and key not in FREE_CHOICES:
                assert value in choices, f"{node['class_type']}.{key} = {value}"


def test_headless_workflow_runs(server: ComfyServer) -> None:
    client = load_client()
    for name, seed in (("moss_positive", 0), ("moss_negative", 1)):
        context = torch.randn(1, 4 + seed, 48, generator=torch.Generator().manual_seed(seed))
        save_file({"context": context}, server.base / "input" / f"{name}.safetensors")
    prompt = load("MOSS-Image fp16 - without text encoder")[1]
    for setting in (
        "MossFP16Loader.model_name=hot.safetensors",
        "EmptyFlux2LatentImage.width=64",
        "EmptyFlux2LatentImage.height=96",
        "KSampler.steps=3",
    ):
        client.apply_setting(prompt, setting)
    entry = client.run(server.client, prompt, show=False, timeout=120)
    assert client.failure(entry) is None
    (report,) = client.reports(entry)
    assert report["summary"]["non_finite"] == report["summary"]["saturated"] == 0
    assert "layer.3" in client.format_report(report)
    (saved,) = entry["outputs"]["7"]["latents"]
    latent = load_file(Path(server.base) / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]
    assert latent.shape == (1, 128, 6, 4) and torch.isfinite(latent).all()


def test_templates_are_offered(server: ComfyServer) -> None:
    offered = server.client.call("GET", "/workflow_templates")
    assert sorted(offered["ComfyUI-MOSS-FP16"]) == NAMES
    for name in NAMES:
        picture = f"{server.url}/api/workflow_templates/ComfyUI-MOSS-FP16/{urllib.parse.quote(name)}.jpg"
        with urllib.request.urlopen(picture, timeout=60) as answer:
            assert answer.headers.get_content_type() == "image/jpeg" and answer.read(2) == b"\xff\xd8", name


@pytest.mark.parametrize("name", NAMES)
def test_models_are_named_with_a_folder_and_an_address(name: str) -> None:
    """What the page needs to offer a download of a file that is missing."""
    declared = [model for node in load(name)[0]["nodes"] for model in node["properties"].get("models", [])]
    assert declared
    for model in declared:
        assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(f"/{model['name']}")
        assert model["directory"] in ("diffusion_models", "text_encoders", "vae")
