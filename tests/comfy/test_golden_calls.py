"""Single model calls inside ComfyUI held to the golden vectors: the built-in class, and a foreign one natively."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import pytest
import torch
from comfy_runs import fixed, load, rel, stock
from repo import DATA
from safetensors.torch import load_file

MODELS = ("cool", "warm", "hot")


def velocity(model: Any, name: str, case: dict[str, Any]) -> torch.Tensor:
    """One call of the loaded MODEL at the case's inputs, as the sampler's machinery makes it."""
    io = load_file(DATA / f"{name}_io.safetensors")
    x, context = io[f"{case['case']}.latent"], io[f"{case['case']}.context"]
    sigma = torch.full((x.shape[0],), case["sigma"])
    comfy.model_management.load_models_gpu([model])
    with torch.inference_mode():
        x0 = model.model.apply_model(x, sigma, c_crossattn=context, transformer_options={})
    return (x - x0) / case["sigma"]


def cases(golden: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [case for case in golden["cases"] if case["model"] == name]


def wanted(name: str, case: dict[str, Any]) -> torch.Tensor:
    return load_file(DATA / f"{name}_io.safetensors")[f"{case['case']}.none"]


@pytest.mark.parametrize("name", [*MODELS, "burst"])
def test_fp32_equals_the_golden_velocity(golden: dict[str, Any], foreign: None, name: str) -> None:
    builtin, own = load(name, "fp32"), stock(name, "fp32")
    folded = fixed(own, fix="online", c=1 / 16, guard="off", self_check=False)
    for case in cases(golden, name):
        # x0 = x - sigma v carries x's rounding into v, the more the smaller sigma is
        bound = 2e-6 + 1e-7 / case["sigma"]
        assert rel(velocity(builtin, name, case), wanted(name, case)) < bound
        plain = velocity(own, name, case)
        assert rel(plain, wanted(name, case)) < bound
        assert torch.equal(velocity(folded, name, case), plain)


@pytest.mark.parametrize("name", MODELS)
def test_fp16_stays_below_half_of_the_bf16_error(golden: dict[str, Any], foreign: None, name: str) -> None:
    options: dict[str, Any] = {"fix": "online", "c": 1 / 16, "guard": "off", "self_check": False}
    native = fixed(stock(name, "fp16"), **options)
    builtin = fixed(load(name, "fp16"), **options)
    for case in cases(golden, name):
        figures = case["fp16"]
        half = figures["bf16_none"]["rel"] / 2
        rounding = 3e-8 / case["sigma"]
        assert rel(velocity(native, name, case), wanted(name, case)) < half + rounding
        error = rel(velocity(builtin, name, case), wanted(name, case))
        assert error < min(half, 3 * figures["online"]["rel"]) + rounding
