"""Quantized files, made with ComfyUI's own layouts: the online fold touches no quantized tensor and adds no error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfy_runs import DTYPES, conditioning, fixed, load, rel, report, sample, stock
from moss_fp16_pack.nodes.loading.load import load_moss
from quantized_files import FORMATS, make_file

FP16_ERROR = 8e-3
COARSE = {"nvfp4": 0.6}  # 4 bits on golden models of width 64


pytestmark = pytest.mark.usefixtures("foreign")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As ComfyUI runs every node; a quantized tensor cannot come from outside of it."""
    with torch.inference_mode():
        yield


@pytest.fixture(params=[*FORMATS, "scaled_fp8"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def through_stock(file: Path, dtype: str) -> Any:
    model = comfy.sd.load_diffusion_model(str(file), {})
    model.set_model_compute_dtype(DTYPES[dtype])
    return model


def through_ours(file: Path, dtype: str) -> Any:
    return load_moss(str(file), dtype, True, "builtin")


LOADERS = {"stock": through_stock, "builtin": through_ours}


def stored(model: Any) -> dict[str, torch.Tensor]:
    """Every stored tensor, quantized data and scales as they are."""
    return {k: v.clone() for k, v in model.model.diffusion_model.state_dict().items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For dtypes that torch cannot compare."""
    return tensor.reshape(-1).view(torch.uint8)


def quantized_linears(model: Any) -> int:
    return sum(
        isinstance(getattr(module, "weight", None), QuantizedTensor) for module in model.model.diffusion_model.modules()
    )


@pytest.mark.parametrize("loader", LOADERS)
def test_the_fold_changes_no_quantized_tensor(kind: str, loader: str, tmp_path: Path) -> None:
    source = "hot_fused_qkv" if loader == "stock" else "hot"
    file = make_file(source, kind, tmp_path)
    make, prompt = LOADERS[loader], conditioning("hot")
    plain = make(file, "fp32")
    assert quantized_linears(plain) == 4 * (4 if loader == "stock" else 6)
    before = stored(plain)
    exact = sample(stock("hot", "fp32") if loader == "stock" else load("hot", "fp32"), prompt, steps=2)
    unfixed = sample(plain, prompt, steps=2)
    own_error = rel(unfixed, exact)
    assert 0 < own_error < COARSE.get(kind, 0.15)

    # fp32: the same function
    folded = fixed(plain, fix="online", c=1 / 16)
    out = sample(folded, prompt, steps=2)
    assert torch.equal(out, unfixed)
    assert report(folded)["self_check"]["result"] in ("passed", "remembered", "nothing to prove")
    for options in ({"fix": "fp32_residual"}, {"fix": "online", "c": 1 / 16, "s_attn": 1 / 2, "s_ffn": 1 / 4}):
        managed = fixed(plain, **options)
        assert rel(sample(managed, prompt, steps=2), unfixed) < 1e-5, options
        assert report(managed)["engine"] in ("managed", "builtin")

    # fp16: within the quantized model's own error, and in range
    half = make(file, "fp16")
    started = stored(half)
    model = fixed(half)
    out = sample(model, prompt, steps=2)
    found = report(model)
    assert found["mode"] == "online" and found["compute_dtype"] == "fp16" and found["rescues"] == []
    assert found["summary"]["saturated"] == found["summary"]["non_finite"] == 0
    # in fp16 ComfyUI may take another kernel for these weights, so the same kernels are asked on an fp32 stream, too
    wide = sample(fixed(half, fix="fp32_residual"), prompt, steps=2)
    assert rel(out, wide) < FP16_ERROR
    assert rel(out, exact) < 1.2 * own_error + FP16_ERROR

    for model, kept in ((plain, before), (half, started)):
        after = stored(model)
        assert after.keys() == kept.keys()
        for key, value in kept.items():
            assert after[key].dtype == value.dtype
            assert torch.equal(bits(after[key]), bits(value)), key


@pytest.mark.parametrize("loader", LOADERS)
def test_a_quantized_file_is_rescued(kind: str, loader: str, tmp_path: Path) -> None:
    """The whole ladder over quantized weights, down to fp32."""
    source = "hot_fused_qkv" if loader == "stock" else "burst"
    name = "hot" if loader == "stock" else "burst"
    file = make_file(source, kind, tmp_path)
    make, prompt = LOADERS[loader], conditioning(name)
    wide = fixed(make(file, "fp16"), fix="fp32_residual", s_ffn=1.0 if name == "hot" else 1 / 64)
    expected = sample(wide, prompt, steps=2)
    model = fixed(make(file, "fp16"), fix="none")
    out = sample(model, prompt, steps=2)
    assert len(report(model)["rescues"]) == 1
    assert rel(out, expected) < FP16_ERROR


@pytest.mark.parametrize("kind", ["int8_convrot", "fp8_scaled"])
def test_a_folded_quantized_file_is_unfolded_and_runs_online(kind: str, tmp_path: Path) -> None:
    """A file that carries a fold with s = 1 has no scaled row among the quantized ones, so it unfolds like any."""
    file = make_file("hot_fp16fix", kind, tmp_path)
    prompt = conditioning("hot")
    expected = sample(fixed(through_ours(file, "fp16"), fix="fp32_residual"), prompt, steps=2)
    model = fixed(through_ours(file, "fp16"))
    out = sample(model, prompt, steps=2)
    assert report(model)["mode"] == "online"
    assert rel(out, expected) < FP16_ERROR


@pytest.mark.parametrize("kind", ["int8_convrot", "fp8_scaled"])
def test_a_lora_on_a_quantized_file(kind: str, tmp_path: Path) -> None:
    """ComfyUI requantizes what a LoRA patched; the fold has no part in it."""
    file = make_file("hot", kind, tmp_path)
    numbers = torch.Generator().manual_seed(0)
    lora = {}
    for path, rows, columns in (("layers.1.proj.o", 64, 64), ("layers.2.proj.q", 64, 64), ("video_embedder", 64, 128)):
        lora[f"diffusion_model.{path}.lora_up.weight"] = torch.randn(rows, 2, generator=numbers)
        lora[f"diffusion_model.{path}.lora_down.weight"] = torch.randn(2, columns, generator=numbers) * 0.1
    plain = through_ours(file, "fp32")
    prompt = conditioning("hot")
    expected = sample(comfy.sd.load_lora_for_models(plain, None, dict(lora), 1.0, 0)[0], prompt, steps=2)
    assert rel(expected, sample(plain, prompt, steps=2)) > 1e-3
    model = comfy.sd.load_lora_for_models(fixed(plain, fix="online", c=1 / 16), None, dict(lora), 1.0, 0)[0]
    assert torch.equal(sample(model, prompt, steps=2), expected)


@pytest.mark.parametrize("source", ["hot", "hot_fused_qkv"])
@pytest.mark.parametrize("kind", ["int8_rows", "fp8_scaled"])
def test_adapters_of_either_layout_on_a_quantized_file(kind: str, source: str, tmp_path: Path) -> None:
    """A quantized matrix stays as the file has it, split or fused, and adapters fit with the keys of both layouts."""
    plain, prompt = through_ours(make_file(source, kind, tmp_path), "fp32"), conditioning("hot")
    numbers = torch.Generator().manual_seed(0)
    up, down = torch.randn(3 * 64, 2, generator=numbers), torch.randn(2, 64, generator=numbers) * 0.1
    scale = 1 + torch.rand(3 * 64, 1, generator=numbers)
    outputs = []
    for letters in (["qkv"], ["q", "k", "v"]):
        file: dict[str, torch.Tensor] = {}
        for letter, rows, scales in zip(letters, up.chunk(len(letters)), scale.chunk(len(letters)), strict=True):
            key = f"diffusion_model.layers.2.proj.{letter}"
            file |= {f"{key}.lora_up.weight": rows, f"{key}.lora_down.weight": down, f"{key}.dora_scale": scales}
        model = comfy.sd.load_lora_for_models(fixed(plain, fix="online", c=1 / 16), None, file, 0.5, 0)[0]
        outputs.append(sample(model, prompt, steps=1))
    assert rel(outputs[0], sample(plain, prompt, steps=1)) > 1e-5
    assert torch.equal(*outputs)


def test_bypass_with_keys_of_the_other_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fused keys fit split matrices. Split keys find no module to wrap where the file is fused, which the log says."""
    prompt, numbers = conditioning("hot"), torch.Generator().manual_seed(0)
    up, down = torch.randn(3 * 64, 2, generator=numbers), torch.randn(2, 64, generator=numbers)

    def bypass(model: Any, letters: str | tuple[str]) -> torch.Tensor:
        file = {}
        for letter, rows in zip(letters, up.chunk(len(letters)), strict=True):
            key = f"diffusion_model.layers.2.proj.{letter}"
            file |= {f"{key}.lora_up.weight": rows, f"{key}.lora_down.weight": down}
        return sample(comfy.sd.load_bypass_lora_for_models(model, None, file, 0.5, 0)[0], prompt, steps=1)

    split = through_ours(make_file("hot", "int8_rows", tmp_path), "fp32")
    expected = bypass(split, "qkv")
    assert rel(expected, sample(split, prompt, steps=1)) > 1e-5
    assert rel(bypass(split, ("qkv",)), expected) < 1e-6
    fused = through_ours(make_file("hot_fused_qkv", "int8_rows", tmp_path), "fp32")
    caplog.clear()
    assert torch.equal(bypass(fused, "qkv"), sample(fused, prompt, steps=1))
    assert caplog.text.count("Module not found for key") == 3
