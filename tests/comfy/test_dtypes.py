"""The user's dtypes on a MODEL: inputs at the boundary, single parameters."""

from __future__ import annotations

import pytest
import torch
from comfy_runs import conditioning, fixed, load, rel, report, sample, stock
from moss_fp16_pack.fold.dtypes import InputPolicy, parse_rules
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.nodes.loading.load import load_moss
from repo import DATA

O_IN_FP32 = "layers.*.proj.o.weight = fp32"


def test_latents_are_rounded_at_the_boundary() -> None:
    prompt, model = conditioning("cool"), load("cool", "fp32")
    plain = sample(model, prompt, steps=1)
    rounded = fixed(model, fix="none", inputs=InputPolicy(latents="bf16"))
    out = sample(rounded, prompt, steps=1)
    assert 1e-5 < rel(out, plain) < 2e-2
    assert report(rounded)["input_dtypes"]["latents"] == "bf16"
    same = fixed(model, fix="none", inputs=InputPolicy("passthrough", "default", "fp32"))
    assert torch.equal(sample(same, prompt, steps=1), plain)


def test_a_parameter_rule_is_stored_and_computed_in_its_dtype() -> None:
    prompt = conditioning("cool")
    model = load_moss(str(DATA / "cool.safetensors"), "fp16", True, "builtin", O_IN_FP32)
    assert model.model.diffusion_model.layers[0].proj.o.weight.dtype == torch.float32
    assert model.model.diffusion_model.layers[0].proj.q.weight.dtype == torch.float16
    wide = fixed(model, fix="none", rules=parse_rules(O_IN_FP32))
    plain = fixed(load("cool", "fp16"), fix="none")
    out, before = sample(wide, prompt, steps=1), sample(plain, prompt, steps=1)
    assert rel(out, before) < 1e-2
    coarse = fixed(load("cool", "fp16"), fix="none", rules=parse_rules(O_IN_FP32.replace("fp32", "bf16")))
    assert 1e-4 < rel(sample(coarse, prompt, steps=1), before) < 5e-2  # fp32 may round to what fp16 gives; bf16 cannot
    assert report(wide)["param_dtypes"] == {"layers.*.proj.o.weight": {"dtype": "fp32", "matched": 4, "changed": 4}}
    again = fixed(wide, fix="none")  # a second Fix without the rule takes it off
    assert not report_names(again)


def report_names(model: object) -> list[str]:
    return [name for name in model.object_patches if name.endswith("proj.o.forward")]  # type: ignore[attr-defined]


def test_a_rule_on_a_foreign_class(foreign: None) -> None:
    prompt, model = conditioning("cool"), stock("cool", "fp16")
    before = sample(model, prompt, steps=1)
    wide = fixed(model, fix="none", rules=parse_rules(O_IN_FP32))
    assert rel(sample(wide, prompt, steps=1), before) > 0
    assert report(wide)["engine"] == "native" and not any("no effect" in w for w in report(wide)["warnings"])
    assert torch.equal(sample(model, prompt, steps=1), before)


def test_a_module_that_is_never_called_is_named(foreign: None) -> None:
    prompt, model = conditioning("cool"), stock("cool", "fp16")
    block = model.model.diffusion_model.layers[0]
    fused = fixed(model, fix="none", rules=parse_rules("layers.0.proj.o.weight = fp32"))
    # a class that fuses o into a kernel of its own, as ComfyUI does on int8 files
    fused.add_object_patch("diffusion_model.layers.0.forward", lambda x, *a, **k: x)
    sample(fused, prompt, steps=1)
    assert any("layers.0.proj.o had no effect" in w for w in report(fused)["warnings"])
    assert block.proj.o.weight.dtype == torch.float16


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(MossError, match=r"layers\.0\.proj\.o"):
        fixed(load("cool", "fp16"), fix="none", rules=parse_rules("layers.0.proj.out.weight = fp32"))
