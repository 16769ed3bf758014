"""What broke other packs, by their public bug reports, tried on ours: wrappers, regions, sizes, dtypes, lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.sd
import folder_paths
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_model_advanced import ModelComputeDtype
from comfy_runs import conditioning, fixed, load, rel, report, sample, stock
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.nodes.conditioning import MossFP16LoadConditioning, conditioning_files
from moss_fp16_pack.nodes.loading.files import model_names

import nodes

ENGINES = ("builtin", "native", "managed")
FP16_ERROR = 5e-3


def made(engine: str, dtype: str = "fp16", **options: Any) -> Any:
    """`hot` under the fix, by our own class or over one of ComfyUI's."""
    model = load("hot", dtype) if engine == "builtin" else stock("hot", dtype)
    return fixed(model, engine="managed" if engine == "managed" else "auto", **({"fix": "online"} | options))


def guided(model: Any, positive: Any = None, **options: Any) -> torch.Tensor:
    options = {"negative": conditioning("hot", "case1"), "cfg": 3.0} | options
    return sample(model, positive or conditioning("hot"), **options)


def all_by_name(executor: Any, *args: Any, **named: Any) -> Any:
    names = ("x", "timesteps", "context", "control", "transformer_options")
    return executor(**dict(zip(names, args, strict=False)), **named)


def with_options_by_name(
    executor: Any, x: Any, timesteps: Any, context: Any, control: Any, transformer_options: Any, **named: Any
) -> Any:
    return executor(x, timesteps, context, control=control, transformer_options=transformer_options, **named)


@pytest.mark.parametrize("wrapper", [all_by_name, with_options_by_name])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrapper_may_give_the_options_by_name(engine: str, wrapper: Callable[..., Any], foreign: None) -> None:
    """They used to get lost on their way into our forward, and with them every block patch."""
    seen: list[int] = []

    def patch(args: Any, extra: Any) -> Any:
        seen.append(1)
        return extra["original_block"](args)

    model = made(engine)
    model.set_model_patch_replace(patch, "dit", "single_block", 1)
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "wrapper", wrapper)
    assert torch.equal(guided(model), guided(made(engine)))
    assert seen


def areas() -> list[Any]:
    left = nodes.ConditioningSetArea().append(conditioning("hot"), 64, 64, 0, 0, 1.0)[0]
    right = nodes.ConditioningSetArea().append(conditioning("hot", "case2"), 64, 64, 0, 32, 1.0)[0]
    return list(nodes.ConditioningCombine().combine(left, right)[0])


def masks() -> list[Any]:
    mask = torch.zeros(1, 96, 112)
    mask[..., :50] = 1
    left = nodes.ConditioningSetMask().append(conditioning("hot"), mask, "default", 1.0)[0]
    right = nodes.ConditioningSetMask().append(conditioning("hot", "case2"), 1 - mask, "mask bounds", 0.7)[0]
    return list(nodes.ConditioningCombine().combine(left, right)[0])


@pytest.mark.parametrize("prompt", [areas, masks])
@pytest.mark.parametrize("engine", ENGINES)
def test_regions_on_odd_sizes(engine: str, prompt: Callable[[], Any], foreign: None) -> None:
    plain = load("hot", "fp32") if engine == "builtin" else stock("hot", "fp32")
    expected = guided(plain, prompt(), size=(6, 7))
    assert rel(guided(made(engine), prompt(), size=(6, 7)), expected) < FP16_ERROR


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_of_one_size_is_left_for_the_next(engine: str, foreign: None) -> None:
    model = made(engine)
    first = guided(model, size=(6, 4))
    guided(model, size=(8, 5), steps=2)
    assert torch.equal(guided(model, size=(6, 4)), first)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_node_after_the_fix_sets_fp16(engine: str, foreign: None) -> None:
    """The fix saw bf16, which needs none; then the model computes in fp16 after all."""
    (model,) = ModelComputeDtype().patch(made(engine, "bf16", fix="auto"), "fp16")
    assert rel(sample(model, conditioning("hot")), sample(stock("hot", "fp32"), conditioning("hot"))) < FP16_ERROR
    assert report(model)["compute_dtype"] == "fp16" and len(report(model)["rescues"]) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_of_a_kernel_in_bf16_is_rescued(engine: str, foreign: None) -> None:
    def broken_in_bf16(args: Any, extra: Any) -> Any:
        out = extra["original_block"](args)
        return {**out, "img": out["img"] * float("nan")} if out["img"].dtype == torch.bfloat16 else out

    model = made(engine, "bf16", fix="auto")
    model.set_model_patch_replace(broken_in_bf16, "dit", "single_block", 1)
    assert sample(model, conditioning("hot"), steps=2).isfinite().all()
    assert report(model)["outcome"] == "rescued"


def test_the_flag_for_fp16_gets_the_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.cli_args.args, "fp16_unet", True)
    model = fixed(load("hot", "auto"), fix="auto")
    assert guided(model).isfinite().all()
    assert (report(model)["mode"], report(model)["compute_dtype"]) == ("online", "fp16")


@pytest.mark.parametrize("engine", ["builtin", "native"])
def test_lora_on_weights_stored_in_fp8(engine: str, foreign: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    lora: dict[str, torch.Tensor] = {}
    for layer in range(4):
        lora[f"diffusion_model.layers.{layer}.proj.o.lora_A.weight"] = torch.randn(2, 64) * 0.3
        lora[f"diffusion_model.layers.{layer}.proj.o.lora_B.weight"] = torch.randn(64, 2) * 0.3
    prompt, plain = conditioning("cool"), load("cool", "fp32", engine=engine)
    expected = sample(comfy.sd.load_lora_for_models(plain, None, lora, 1.0, 0)[0], prompt)
    monkeypatch.setattr(comfy.cli_args.args, "fp8_e4m3fn_unet", True)
    model = fixed(load("cool", "auto", engine=engine), fix="auto")
    found = sample(comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0)[0], prompt)
    assert rel(found, expected) < 0.1 < rel(found, sample(model, prompt))


def test_folders_that_are_not_there_end_no_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    roots = folder_paths.folder_names_and_paths["diffusers"][0]
    monkeypatch.setitem(
        folder_paths.folder_names_and_paths, "diffusers", ([*roots, str(tmp_path / "gone")], {"folder"})
    )
    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path / "gone"))
    assert model_names() and isinstance(conditioning_files(), list)
    assert MossFP16LoadConditioning.define_schema()


@pytest.mark.parametrize("chosen", [None, "", " ", "[output] "])
def test_nothing_chosen_is_a_sentence(chosen: Any) -> None:
    with pytest.raises(MossError, match="No conditioning file is chosen"):
        MossFP16LoadConditioning.execute(chosen)
