"""The compare node on a real ComfyUI."""

from __future__ import annotations

import json
from typing import Any

import torch
from comfy_runs import conditioning, fixed, load
from moss_fp16_pack.nodes.compare import MossFP16Compare


def compare(reference: Any, other: Any, name: str = "hot", **options: Any) -> tuple[str, dict[str, Any], torch.Tensor]:
    prompt = conditioning(name)
    inputs = {"steps": 3, "cfg": 3.0, "seed": 5, **options}
    latent = {"samples": torch.zeros(1, 128, 6, 4)}
    with torch.inference_mode():
        lines, text, chart = MossFP16Compare.execute(
            reference, other, prompt, conditioning(name, "case2"), latent, **inputs
        ).args
    return lines, json.loads(text), chart


def test_a_model_with_itself_is_exactly_nothing() -> None:
    model = fixed(load("hot", "fp16"), fix="online", c=1 / 16)
    lines, found, chart = compare(model, model)
    overall = found["overall"]
    assert overall["cond"]["model_output_max_abs_diff"] == overall["guided"]["relative_l2"] == 0.0
    assert overall["guided"]["cosine"] == 1.0
    assert overall["log_prob_mean_abs_diff"] == overall["ratio_abs_minus_1"] == 0.0
    assert found["guidance_scale"] == 3.0 and len(found["steps"]) == 3 and "scale 3" in lines
    assert chart.shape[-1] == 3 and chart.min() < 0.5 < chart.max()


def test_the_fold_in_fp16_against_fp32() -> None:
    reference = load("hot", "fp32")
    _, folded, _ = compare(reference, fixed(load("hot", "fp16"), fix="online", c=1 / 16))
    assert 1e-6 < folded["overall"]["cond"]["relative_l2"] < 4e-3
    _, exact, _ = compare(reference, fixed(reference, fix="online", c=1 / 16), cfg=1.0)
    assert exact["overall"]["cond"]["relative_l2"] == 0.0 and exact["overall"]["guided"] is None
    lines, broken, chart = compare(reference, fixed(load("hot", "fp16"), fix="none", guard="off"))
    assert broken["overall"]["cond"]["relative_l2"] is None and " - " in lines
    assert torch.isfinite(chart).all()
