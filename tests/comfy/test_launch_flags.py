"""compute_dtype = auto goes by what ComfyUI was started with, as its own loader does."""

from __future__ import annotations

from collections import Counter

import comfy.cli_args
import pytest
import torch
from comfy_runs import conditioning, load, rel, sample
from moss_fp16_pack.nodes.model.moss import compute_dtype_of

FLAGS = {
    "fp32_unet": (torch.float32, torch.float32),
    "fp64_unet": (torch.float32, torch.float32),  # no float64 anywhere
    "bf16_unet": (torch.bfloat16, torch.bfloat16),
    "fp16_unet": (torch.float16, torch.float16),
    "force_fp16": (torch.float16, torch.float16),
    "force_fp32": (torch.float32, torch.float32),
    "fp8_e4m3fn_unet": (torch.float8_e4m3fn, torch.float32),
    "fp8_e5m2_unet": (torch.float8_e5m2, torch.float32),
}


@pytest.mark.parametrize("engine", ["builtin", "native"])
@pytest.mark.parametrize("flag", FLAGS)
def test_auto_honours_the_flag(flag: str, engine: str, foreign: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.cli_args.args, flag, True)
    model = load("cool", "auto", engine=engine)
    stored, computed = FLAGS[flag]
    sizes = Counter[torch.dtype]()
    for weight in model.model.diffusion_model.parameters():
        sizes[weight.dtype] += weight.numel()
    assert sizes.most_common(1)[0][0] == stored
    assert compute_dtype_of(model) == computed
    out = sample(model, conditioning("cool"))
    assert rel(out, sample(load("cool", "fp32"), conditioning("cool"))) < (0.5 if "fp8" in flag else 0.05)
    assert compute_dtype_of(load("cool", "bf16", engine=engine)) == torch.bfloat16  # what is chosen counts


def test_every_such_flag_of_this_comfyui_is_known() -> None:
    flags = {name for name in vars(comfy.cli_args.args) if name.endswith("_unet")}
    assert flags - {"fp8_e8m0fnu_unet"} <= FLAGS.keys()
