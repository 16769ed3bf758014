"""Sentences that tell a user to do something, and what happens when it is done."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import comfy.cli_args
import comfy.sd
import pytest
import torch
from comfy_extras.nodes_flux import FluxKVCache
from comfy_runs import conditioning, fixed, load, report, sample, stock
from moss_fp16_pack.fold.dtypes import apply_rules, parse_rules
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.fold.measure.probe import BlockPeaks, Peaks, ProbeResult, ProbeSettings, advice
from moss_fp16_pack.fold.report.messages import TEXTS
from moss_fp16_pack.fold.scaling.factors import Factors
from moss_fp16_pack.nodes.conditioning import MossFP16LoadConditioning, MossFP16SaveConditioning
from moss_fp16_pack.nodes.fix import MossFP16Fix
from moss_fp16_pack.nodes.loader import MossFP16Loader
from moss_fp16_pack.nodes.model.moss import arch_of
from repo import ROOT

from nodes import ConditioningCombine

SETTING = re.compile(r"\b(engine|fix|guard|unfold|compute_dtype) = (\w+)(?: or (\w+)\b(?! = ))?")


def with_patch(model: Any) -> Any:
    """A node whose patches our forward cannot run."""
    return FluxKVCache.execute(model).result[0]


def without(model: Any) -> Any:
    return model


def advised(run: Callable[[], Any]) -> str:
    with pytest.raises(MossError) as caught:
        run()
    return str(caught.value)


def refused(model: Any) -> str:
    return advised(lambda: sample(with_patch(model), conditioning("cool"), steps=1))


def works(model: Any) -> bool:
    return bool(sample(model, conditioning("cool"), steps=1).isfinite().all())


def options_of(node: Any) -> dict[str, list[str]]:
    """The choices of a node's lists by input."""
    return {one.id: list(one.options) for one in node.define_schema().inputs if hasattr(one, "options")}


def test_engine_auto_works_where_native_was_asked_for_without_a_class() -> None:
    assert "use engine = auto" in advised(lambda: load("cool", "fp16", engine="native"))
    assert works(load("cool", "fp16", engine="auto"))


def test_the_built_in_class_where_comfyui_has_none() -> None:
    """It used to say engine = native, and the Loader then engine = auto: a circle."""
    model = fixed(load("cool", "fp16", engine="auto"), fix="online")
    said = refused(model)
    assert "engine" not in said and said.split(". ")[1].startswith("Take the node that adds it out")
    assert works(without(model))


def test_the_built_in_class_where_comfyui_has_one(foreign: None) -> None:
    assert "Load the file with engine = native" in refused(fixed(load("cool", "fp16"), fix="online"))
    assert works(with_patch(fixed(load("cool", "fp16", engine="native"), fix="online")))


@pytest.mark.parametrize("options", [{"fix": "fp32_residual"}, {"fix": "online", "clamp": True}])
def test_the_engine_that_a_refusal_names_works(options: dict[str, Any], foreign: None) -> None:
    assert "Use engine = native, which needs fix = online" in refused(fixed(stock("cool", "fp16"), **options))
    assert works(with_patch(fixed(stock("cool", "fp16"), fix="online", engine="native")))
    said = advised(lambda: fixed(stock("cool", "fp16"), engine="native", **options))
    assert said.endswith("Use engine = auto.")
    assert works(fixed(stock("cool", "fp16"), engine="auto", **options))


def test_taking_the_multi_gpu_node_out_works_as_the_refusal_says() -> None:
    spread = load("cool", "fp16")
    spread.set_additional_models("multigpu", [load("cool", "fp16")])
    assert advised(lambda: fixed(spread)).endswith("take the multi-GPU node out.")
    spread.remove_additional_models("multigpu")
    assert works(fixed(spread))


def test_a_conditioning_of_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a ComfyUI that has the text encoder is told to use it; on any other a saved conditioning does it."""
    model, other = fixed(load("cool", "fp16")), [[torch.zeros(1, 3, 64), {}]]
    said = advised(lambda: sample(model, other, steps=1))
    assert "Load one that Save MOSS Conditioning wrote" in said and "CLIP Loader" not in said
    shown = MossFP16SaveConditioning.execute(conditioning("cool"), "moss_conditioning/advice").ui["moss_fp16_files"]
    (loaded,) = MossFP16LoadConditioning.execute(f"[output] {shown[0]['filename']}").result
    assert sample(model, loaded, steps=1).isfinite().all()
    monkeypatch.setattr(comfy.sd.CLIPType, "MOSS_IMAGE", 99, raising=False)
    assert "CLIP Loader, type moss_image" in advised(lambda: sample(model, other, steps=1))


def test_saving_conditionings_that_were_combined() -> None:
    one, two = conditioning("cool"), conditioning("cool", "case1")
    (both,) = ConditioningCombine().combine(one, two)
    said = advised(lambda: MossFP16SaveConditioning.execute(both, "moss_conditioning/both"))
    assert "save each before they are combined" in said
    for each in (one, two):
        assert MossFP16SaveConditioning.execute(each, "moss_conditioning/each").ui["moss_fp16_files"]


def test_parameter_dtypes_without_effect(foreign: None) -> None:
    rules = parse_rules("layers.*.norm1.weight = fp16")
    assert "engine = managed in MOSS FP16 Fix" in TEXTS["param_dtypes_unused"][1]
    model = fixed(stock("cool", "fp16"), engine="managed", fix="online", rules=rules)
    assert works(model) and not [m for m in report(model)["messages"] if m["key"] == "param_dtypes_unused"]


def test_what_the_probe_says_can_be_typed() -> None:
    model = load("cool")
    names = [name for name, _ in model.model.diffusion_model.named_parameters()]
    arch = arch_of(model.model.diffusion_model)
    far_out = BlockPeaks("layer.0", *[1e6] * 5)
    peaks = Peaks(1.0, 1.0, (far_out,), (far_out,))
    said = " ".join(advice(ProbeResult(Factors(), peaks, ProbeSettings(), arch, ())))
    patterns = re.findall(r"\((\S+) = fp32\)", said)
    assert len(patterns) == 3
    for pattern in patterns:
        applied = apply_rules(parse_rules(f"{pattern} = fp32"), names, lambda _: torch.float16)
        assert applied.parameters, pattern
    assert hasattr(comfy.cli_args.args, "use_pytorch_cross_attention") and "--use-pytorch-cross-attention" in said


def test_every_setting_that_is_named_is_one_of_the_nodes() -> None:
    """engine = managed is the Fix node's, engine = builtin the Loader's: no sentence names one that neither has."""
    offered: dict[str, set[str]] = {}
    for node in (MossFP16Loader, MossFP16Fix):
        for name, choices in options_of(node).items():
            offered.setdefault(name, set()).update(choices)
    said = {str(file): file.read_text("utf-8") for file in (ROOT / "web" / "docs").rglob("*.md")}
    for file in [*(ROOT / "nodes").rglob("*.py"), *(ROOT / "fold").rglob("*.py")]:
        tree = ast.parse(file.read_text("utf-8"))
        said[str(file)] = "\n".join(
            part.value for part in ast.walk(tree) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )
    found = [(where, match) for where, text in said.items() for match in SETTING.finditer(text)]
    assert len(found) > 20
    for where, match in found:
        assert match[2] in offered[match[1]], f"{where}: {match[0]}"
        assert match[3] is None or any(match[3] in choices for choices in offered.values()), f"{where}: {match[0]}"
