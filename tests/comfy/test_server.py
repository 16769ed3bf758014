"""The pack in a real ComfyUI, over HTTP: what an API user sees."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import english_locale
import pytest
import torch
from comfy_server import ComfyServer, load_client
from moss_fp16_pack.fold.cli import main
from repo import DATA
from safetensors.torch import load_file

Prompt = dict[str, Any]

NODES = (
    "MossFP16Loader",
    "MossFP16Fix",
    "MossFP16Report",
    "MossFP16Probe",
    "MossFP16Export",
    "MossFP16Compare",
    "MossFP16LoadConditioning",
    "MossFP16SaveConditioning",
)
LOADER_DEFAULTS = {"compute_dtype": "fp16", "fix": "none", "guard": "off"}
STEPS, SIZE, SEED = 3, 96, 7
COUNT = itertools.count()


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def with_defaults(server: ComfyServer, kind: str, **inputs: Any) -> dict[str, Any]:
    """A node with every unnamed input at the default that /object_info states."""
    schema = server.client.call("GET", f"/object_info/{kind}")[kind]["input"]
    for name, (spec, *options) in schema.get("required", {}).items():
        default = (options[0] if options else {}).get("default", spec[0] if isinstance(spec, list) and spec else None)
        if name not in inputs and default is not None:
            inputs[name] = default
    return node(kind, **inputs)


def job(
    server: ComfyServer,
    model: str,
    *,
    loader: Prompt | None = None,
    fix: Prompt | None = None,
    steps: int = STEPS,
    size: int = SIZE,
) -> Prompt:
    """Loader -> (Fix, where its inputs are given) -> KSampler -> Report -> SaveLatent on one golden model."""
    loading = {"model_name": f"{model}.safetensors", **LOADER_DEFAULTS, **(loader or {})}
    prompt = {
        "1": with_defaults(server, "MossFP16Loader", **loading),
        "3": node("MossFP16LoadConditioning", file=f"{model}_case0.safetensors"),
        "4": node("EmptyFlux2LatentImage", width=size, height=size, batch_size=1),
        "5": node(
            "KSampler",
            model=["1" if fix is None else "2", 0], positive=["3", 0], negative=["3", 0], latent_image=["4", 0],
            seed=SEED, steps=steps, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0,
        ),
        "6": node("MossFP16Report", model=["1" if fix is None else "2", 0], passthrough=["5", 0]),
        "7": node("SaveLatent", samples=["6", 0], filename_prefix=f"latents/{next(COUNT)}"),
    }  # fmt: skip
    if fix is not None:
        prompt["2"] = with_defaults(server, "MossFP16Fix", model=["1", 0], **fix)
    return prompt


def latent_of(server: ComfyServer, entry: dict[str, Any]) -> torch.Tensor:
    """The latent that a finished job saved."""
    (saved,) = entry["outputs"]["7"]["latents"]
    return load_file(Path(server.base) / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]


def report_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The one report in a finished job's history."""
    (report,) = entry["outputs"]["6"]["moss_fp16_report"]
    return dict(report)


def headless_latent(server: ComfyServer, model: str, factors: dict[str, str], folder: Path) -> torch.Tensor:
    """The same job through `python -m fold sample`, without ComfyUI's sampler."""
    command = ["sample", str(DATA / f"{model}.safetensors"), "--out", str(folder / "latent.safetensors")]
    command += ["--cond", str(server.base / "input" / f"{model}_case0.safetensors"), "--cfg", "1", "--seed", str(SEED)]
    command += ["--steps", str(STEPS), "--width", str(SIZE), "--height", str(SIZE), "--dtype", "fp16"]
    command += ["--mode", "online", "--c", factors["c"], "--s-attn", factors["s_attn"], "--s-ffn", factors["s_ffn"]]
    assert main(command) == 0
    return load_file(folder / "latent.safetensors")["latent"]


def test_pack_loads_without_a_complaint(server: ComfyServer) -> None:
    log = server.log()
    assert "IMPORT FAILED" not in log
    about_us = [
        line for line in log.splitlines() if any(word in line for word in ("MOSS", "comfy_entrypoint", "pyproject"))
    ]
    assert not [line for line in about_us if "WARNING" in line or "ERROR" in line], about_us
    assert "Traceback" not in log


@pytest.mark.parametrize("name", NODES)
def test_node_is_listed_with_texts(server: ComfyServer, name: str) -> None:
    info = server.client.call("GET", f"/object_info/{name}")[name]
    assert info["category"] == "MOSS/FP16"
    assert info["display_name"] and info["description"]
    for group in ("required", "optional"):
        for key, spec in info["input"].get(group, {}).items():
            assert len(spec) > 1 and spec[1].get("tooltip"), f"{name}.{key} has no tooltip"
    assert all(info["output_tooltips"]), f"an output of {name} has no tooltip"


def test_the_locales_have_every_text_of_every_node(server: ComfyServer) -> None:
    """The English one is what the nodes say; the Chinese one has the same texts, translated."""
    english = english_locale.node_defs(server.client.call("GET", "/object_info"))
    assert json.loads((english_locale.ENGLISH / "nodeDefs.json").read_text("utf-8")) == english
    chinese = json.loads((english_locale.ENGLISH.parent / "zh" / "nodeDefs.json").read_text("utf-8"))
    wanted, found = flat(english), flat(chinese)
    assert found.keys() == wanted.keys()
    names = (".name", ".display_name")  # an input such as c is called c
    untranslated = [key for key in wanted if found[key] == wanted[key] and not key.endswith(names)]
    assert untranslated == []


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested table of texts by dotted key."""
    found: dict[str, str] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize("word", ["nan", "black image", "overflow"])
def test_the_nodes_that_help_are_found_by_what_went_wrong(server: ComfyServer, word: str) -> None:
    info = server.client.call("GET", "/object_info")
    found = {name for name, node in info.items() if word in (node.get("search_aliases") or [])}
    assert found >= {"MossFP16Loader", "MossFP16Fix", "MossFP16Report"}


@pytest.mark.parametrize("model", ["hot", "burst"])
@pytest.mark.parametrize("where", ["loader", "fix"])
def test_fp16_run_with_the_fix_is_the_headless_run(
    server: ComfyServer, golden: dict[str, Any], model: str, where: str, tmp_path: Path
) -> None:
    factors = {name: str(value) for name, value in golden["factors"][model].items()}
    options = {"fix": "online", "guard": "off", **factors}
    if where == "loader":
        entry = server.run(job(server, model, loader=options))
    else:
        entry = server.run(job(server, model, fix=options))
    report = report_of(entry)
    latent, headless = latent_of(server, entry), headless_latent(server, model, factors, tmp_path)
    assert torch.isfinite(latent).all()
    assert float((latent - headless).norm() / headless.norm()) < 1e-3
    assert report["schema"] == "moss_fp16.report/1"
    assert report["mode"] == "online" and report["compute_dtype"] == "fp16"
    assert report["model_calls"] == 3
    assert report["summary"]["saturated"] == 0 and report["summary"]["non_finite"] == 0


def test_without_the_fix_the_same_run_overflows_and_says_so(server: ComfyServer) -> None:
    entry = server.run(job(server, "hot"))
    summary = report_of(entry)["summary"]
    assert summary["non_finite"] + summary["saturated"] > 0


def test_rescue_saves_a_run_that_was_not_fixed(server: ComfyServer) -> None:
    entry = server.run(job(server, "hot", loader={"guard": "rescue"}))
    assert torch.isfinite(latent_of(server, entry)).all()
    assert report_of(entry)["rescues"]


def test_an_interrupt_leaves_nothing_behind(server: ComfyServer) -> None:
    # The plain MODEL and the fixed one are clones over the same module, held in the server's cache between prompts.
    plain = job(server, "warm", loader={"compute_dtype": "fp32"})
    before = latent_of(server, server.run(plain))

    long = job(server, "warm", loader={"compute_dtype": "fp32"}, fix={"fix": "online"}, steps=2000, size=256)
    with server.events() as events:
        prompt_id = server.queue(long)
        events.wait_for("progress", prompt_id=prompt_id)
        server.interrupt()
        status = server.wait(prompt_id)["status"]
    assert not status["completed"]
    assert "execution_interrupted" in [kind for kind, _ in status["messages"]]

    # Above 0.9999 ComfyUI takes denoise for 1: the same run, but the sampler is not served from the cache.
    again = job(server, "warm", loader={"compute_dtype": "fp32"})
    again["5"]["inputs"]["denoise"] = 0.99995
    after = server.run(again)
    assert torch.equal(latent_of(server, after), before)


def kept_reports(server: ComfyServer, workflow_id: str) -> dict[str, Any]:
    return dict(server.client.call("GET", f"/moss_fp16/reports?workflow_id={workflow_id}"))


def test_an_interrupted_run_keeps_its_numbers_at_source_and_report(server: ComfyServer) -> None:
    prompt = job(server, "warm", loader={"compute_dtype": "fp32"}, fix={"fix": "online"}, steps=2000, size=256)
    with server.events() as events:
        prompt_id = server.queue(prompt, "interrupted-1")
        events.wait_for("progress", prompt_id=prompt_id)
        server.interrupt()
        server.wait(prompt_id)
        told = [event["node_id"] for event in events.of("moss_fp16.report") if event["state"] == "interrupted"]
    assert told == ["2", "6"]
    found = kept_reports(server, "interrupted-1")
    assert found["6"]["state"] == found["2"]["state"] == "interrupted"
    assert found["6"]["report"] == found["2"]["report"]
    report = found["6"]["report"]
    assert 0 < report["step"] < report["total_steps"] == 2000 and report["summary"]["peak"] > 0
    assert report["verdict"]["text"] == f"Interrupted at step {report['step']} of 2000"
    assert not [m for m in report["messages"] if m["key"] == "black_image"]


def test_a_run_from_the_cache_has_its_report_under_the_workflow_that_asked(server: ComfyServer) -> None:
    prompt = job(server, "hot", loader={"fix": "online"})
    server.wait(server.queue(prompt, "first-1"))
    server.wait(server.queue(prompt, "second-2"))
    first, second = kept_reports(server, "first-1"), kept_reports(server, "second-2")
    assert set(first) == set(second) == {"1", "6"}
    assert not first["6"]["report"]["cached"]
    for name in ("1", "6"):
        assert second[name]["report"] == first[name]["report"] | {"cached": True}
        assert second[name]["workflow_id"] == "second-2"


def refusal_of(server: ComfyServer, prompt: Prompt) -> str:
    """The server's answer to a prompt that it refuses."""
    data = json.dumps({"prompt": prompt}).encode()
    request = urllib.request.Request(f"{server.url}/prompt", data, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 400
    return str(refused.value.read(), "utf-8")


BAD_VALUES = {
    ("loader", "c"): ("abc", "c must be numbers like 0.0625 or 1/16, but it has 'abc'"),
    ("fix", "c"): ("0", "c must be a finite number above 0, but it is 0"),
    ("fix", "s_attn"): ("1,2", "per-block lists must have the same number of values"),
    ("loader", "s_ffn"): ("-1", "s_ffn must be a finite number above 0"),
    ("fix", "param_dtypes"): ("norm fp32", "A parameter dtype is a line like"),
}


@pytest.mark.parametrize("where", BAD_VALUES, ids="-".join)
def test_a_bad_value_is_refused_when_queued_and_its_input_named(server: ComfyServer, where: tuple[str, str]) -> None:
    node_kind, name = where
    value, said = BAD_VALUES[where]
    given = {"fix": "online", name: value} | ({"s_ffn": "1,2,3"} if name == "s_attn" else {})
    prompt = job(server, "hot", **{node_kind: given})  # type: ignore[arg-type]
    text = refusal_of(server, prompt)
    assert json.loads(text)["node_errors"].keys() == {"1" if node_kind == "loader" else "2"}
    (errors,) = (found["errors"] for found in json.loads(text)["node_errors"].values())
    assert name in [error["extra_info"]["input_name"] for error in errors]
    assert all(said in error["details"] for error in errors)
    told = load_client().refusal(400, text, "/prompt")
    assert told.startswith("The server refused the workflow: ") and told.count(said) == 1


def test_a_value_that_comes_over_a_link_is_not_refused_when_queued(server: ComfyServer) -> None:
    prompt = job(server, "hot", loader={"fix": "online"})
    prompt["8"] = node("PrimitiveString", value="1/32")
    prompt["1"]["inputs"]["c"] = ["8", 0]
    assert report_of(server.run(prompt))["factors"]["c"] == 1 / 32


def test_a_bad_value_over_a_link_is_one_sentence(server: ComfyServer) -> None:
    prompt = job(server, "hot", loader={"fix": "online"})
    prompt["8"] = node("PrimitiveString", value="abc")
    prompt["1"]["inputs"]["c"] = ["8", 0]
    with pytest.raises(RuntimeError, match=r"MossFP16Loader\) failed: c must be numbers like 0.0625 or 1/16"):
        server.run(prompt)
