"""Adapters whose keys are one fused `proj.qkv` per block: on the built-in class they do what q, k and v keys do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.lora
import comfy.sd
import folder_paths
import pytest
import torch
from comfy_extras.nodes_lora_debug import LoraLoaderBypassModelOnly
from comfy_extras.nodes_lora_extract import LORAType, calc_lora_model
from comfy_extras.nodes_model_merging import ModelMergeSimple, ModelSave, ModelSubtract
from comfy_runs import conditioning, fixed, load, rel, report, sample, stock, unload
from moss_fp16_pack.nodes.engines.adapters import FoldedPatches
from safetensors.torch import load_file, save_file
from torch import Tensor

from nodes import LoraLoader, LoraLoaderModelOnly

D, DEPTH, RANK = 64, 4, 2
WHOLE = "diffusion_model.layers.{}.proj.qkv"
PARTS = [f"diffusion_model.layers.{{}}.proj.{letter}" for letter in "qkv"]
ONE_ROUNDING = 2**-23

Adapter = dict[str, Tensor]

#: kind -> the tensors of a fused adapter by ending, and which of them have the rows of the weight
KINDS: dict[str, tuple[Callable[[Callable[..., Tensor]], Adapter], set[str]]] = {
    "lora": (
        lambda new: {"lora_up.weight": new(3 * D, RANK), "lora_down.weight": new(RANK, D), "alpha": torch.tensor(1.0)},
        {"lora_up.weight"},
    ),
    "lora_ab": (
        lambda new: {"lora_B.weight": new(3 * D, RANK), "lora_A.weight": new(RANK, D)},
        {"lora_B.weight"},
    ),
    "dora": (
        lambda new: {
            "lora_up.weight": new(3 * D, RANK),
            "lora_down.weight": new(RANK, D),
            "dora_scale": 1 + new(3 * D, 1),
        },
        {"lora_up.weight", "dora_scale"},
    ),
    "lokr": (lambda new: {"lokr_w1": new(6, 2), "lokr_w2": new(32, 32)}, {"lokr_w1"}),
    "lokr_factored": (
        lambda new: {
            "lokr_w1": new(6, 2),
            "lokr_w2_a": new(32, RANK),
            "lokr_w2_b": new(RANK, 32),
            "alpha": torch.tensor(1.0),
        },
        {"lokr_w1"},
    ),
    "lokr_dora": (
        lambda new: {"lokr_w1": new(6, 2), "lokr_w2": new(32, 32), "dora_scale": 1 + new(3 * D, 1)},
        {"lokr_w1", "dora_scale"},
    ),
    "loha": (
        lambda new: {
            "hada_w1_a": new(3 * D, RANK),
            "hada_w1_b": new(RANK, D),
            "hada_w2_a": new(3 * D, RANK),
            "hada_w2_b": new(RANK, D),
            "alpha": torch.tensor(1.0),
        },
        {"hada_w1_a", "hada_w2_a"},
    ),
    "glora": (
        lambda new: {
            "a1.weight": new(D, RANK),
            "a2.weight": new(RANK, D),
            "b1.weight": new(3 * D, RANK),
            "b2.weight": new(RANK, D),
        },
        {"b1.weight"},
    ),
    "oft": (lambda new: {"oft_blocks": new(12, 16, 16)}, {"oft_blocks"}),
    "diff": (lambda new: {"diff": new(3 * D, D)}, {"diff"}),
    "set": (lambda new: {"set_weight": new(3 * D, D)}, {"set_weight"}),
}


def pair(kind: str, seed: int = 0) -> tuple[Adapter, Adapter]:
    """An adapter file with fused keys on every block, and the same one with q, k and v keys."""
    numbers = torch.Generator().manual_seed(seed)
    fused: Adapter = {}
    apart: Adapter = {}
    make, with_rows = KINDS[kind]
    for layer in range(DEPTH):
        for ending, tensor in make(lambda *shape: torch.randn(*shape, generator=numbers) * 0.4).items():
            fused[f"{WHOLE.format(layer)}.{ending}"] = tensor
            parts = tensor.chunk(3) if ending in with_rows else (tensor,) * 3
            apart |= {f"{p.format(layer)}.{ending}": t.clone() for p, t in zip(PARTS, parts, strict=True)}
    return fused, apart


def with_adapter(model: Any, file: Adapter, strength: float = 1.0) -> Any:
    """As LoraLoaderModelOnly does it."""
    return comfy.sd.load_lora_for_models(model, None, dict(file), strength, 0)[0]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or rel(a, b) <= ONE_ROUNDING


def weights(model: Any) -> dict[str, Tensor]:
    """The weights of a MODEL as they are now, patched if it is loaded."""
    return {key: value.clone() for key, value in model.model.state_dict().items()}


FILES = {"unfolded": ("hot", True), "auto": ("hot_fp16fix", True), "keep": ("hot_fp16fix_s", False)}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_with_fused_keys_give_the_same_as_with_split_keys(kind: str, file: str) -> None:
    """Before and after the fix, without one, at two strengths, on top of an adapter with split keys."""
    name, unfold = FILES[file]
    prompt, plain = conditioning("hot"), load(name, "fp32", unfold=unfold)
    fused, apart = pair(kind)
    other = pair("lora", seed=1)[1]
    loaded = fixed(plain)
    bare, start = sample(plain, prompt, steps=1), weights(plain)
    for strength in (0.3, 1.5):
        both = with_adapter(with_adapter(plain, apart, strength), other, 0.7)
        expected, patched = sample(both, prompt, steps=1), weights(plain)
        assert rel(expected, bare) > 1e-4
        for model in (
            with_adapter(with_adapter(plain, fused, strength), other, 0.7),
            fixed(with_adapter(with_adapter(plain, fused, strength), other, 0.7)),
            with_adapter(with_adapter(loaded, fused, strength), other, 0.7),
            with_adapter(fixed(with_adapter(plain, fused, strength)), other, 0.7),
        ):
            out = sample(model, prompt, steps=1)
            assert all(torch.equal(a, patched[key]) or rel(a, patched[key]) < 1e-6 for key, a in weights(plain).items())
            # unfolded or kept, a fixed MODEL runs with other eps than the bare file, so only its weights compare there
            assert same(out, expected) or (file == "keep" and rel(out, expected) < 2e-4)
    assert torch.equal(sample(plain, prompt, steps=1), bare)
    assert all(torch.equal(value, start[key]) for key, value in weights(plain).items())


@pytest.mark.parametrize("name", ["hot", "hot_fused_qkv"])
def test_every_spelling_that_split_keys_have(name: str) -> None:
    """Whatever ComfyUI makes of the name of q it makes of the fused name, and the file's own layout does not matter."""
    model = load(name, "fp32")
    spellings = comfy.lora.model_lora_keys_unet(model.model, {})
    q, whole = (f"diffusion_model.layers.2.proj.{leaf}.weight" for leaf in ("q", "qkv"))
    of_q = {spelling for spelling, key in spellings.items() if key == q}
    of_whole = {spelling for spelling, key in spellings.items() if key == whole}
    assert len(of_q) >= 2 and of_whole == {spelling.removesuffix("q") + "qkv" for spelling in of_q}
    fused, apart = pair("lora")
    prompt = conditioning("hot")
    expected = sample(with_adapter(model, apart), prompt, steps=1)
    for spelling in of_whole:
        stem = spelling.replace("2", "{}")
        file = {
            f"{stem.format(layer)}.{key.removeprefix(WHOLE.format(layer) + '.')}": tensor
            for layer in range(DEPTH)
            for key, tensor in fused.items()
            if key.startswith(WHOLE.format(layer))
        }
        assert torch.equal(sample(with_adapter(model, file), prompt, steps=1), expected), spelling


def test_comfyuis_lora_nodes_take_fused_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, apart = pair("lora_ab")
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "loras", ([str(tmp_path)], {".safetensors"}))
    save_file(fused, tmp_path / "fused.safetensors")
    save_file({k: v.contiguous() for k, v in apart.items()}, tmp_path / "apart.safetensors")
    prompt, plain = conditioning("hot"), load("hot", "fp32")
    expected = sample(LoraLoaderModelOnly().load_lora_model_only(plain, "apart.safetensors", 0.8)[0], prompt, steps=2)
    one = LoraLoaderModelOnly().load_lora_model_only(plain, "fused.safetensors", 0.8)[0]
    other = LoraLoader().load_lora(fixed(plain, fix="online", c=1 / 16), None, "fused.safetensors", 0.8, 0.8)[0]
    assert torch.equal(sample(one, prompt, steps=2), expected)
    assert torch.equal(sample(other, prompt, steps=2), expected)
    bypass = [
        LoraLoaderBypassModelOnly().load_lora_model_only(plain, f"{layout}.safetensors", 0.8)[0]
        for layout in ("apart", "fused")
    ]
    outputs = [sample(model, prompt, steps=2) for model in bypass]
    assert rel(*outputs) < 1e-5 and rel(outputs[1], expected) < 1e-5


@pytest.mark.parametrize("kind", ["lora", "lokr", "loha"])
def test_fused_keys_in_bypass_mode_give_the_same_as_split_keys(kind: str) -> None:
    """The adapter wraps what stands for the fused matrix; nothing is left there when it is gone."""
    prompt, plain = conditioning("hot"), load("hot", "fp32")

    def bypass(model: Any, file: Adapter) -> Any:
        return comfy.sd.load_bypass_lora_for_models(model, None, dict(file), 0.7, 0)[0]

    fused, apart = pair(kind)
    bare = sample(plain, prompt, steps=2)
    expected = sample(bypass(plain, apart), prompt, steps=2)
    assert rel(expected, bare) > 1e-5
    for model in (bypass(plain, fused), bypass(fixed(plain, fix="online", c=1 / 16), fused)):
        assert rel(sample(model, prompt, steps=2), expected) < 1e-6
    assert torch.equal(sample(plain, prompt, steps=2), bare)
    assert all(layer.proj.qkv.idle for layer in plain.model.diffusion_model.layers)


@pytest.mark.parametrize("kind", ["lora", "loha", "diff"])
def test_fused_keys_of_a_hook_give_the_same_as_split_keys(kind: str) -> None:
    """Adapters that ComfyUI registers for a conditioning, twice in a row."""
    fused, apart = pair(kind)
    prompt, plain = conditioning("hot"), load("hot", "fp32")

    def hooked(file: Adapter) -> list[Any]:
        hooks = comfy.hooks.create_hook_lora(dict(file), 0.6, 0.0)
        return [[tensor, {**extra, "hooks": hooks}] for tensor, extra in prompt]

    bare = sample(plain, prompt, steps=1)
    expected = sample(plain.clone(), hooked(apart), steps=1)
    assert rel(expected, bare) > 1e-5
    model = fixed(plain, fix="online", c=1 / 16)
    for _ in range(2):
        assert torch.equal(sample(plain.clone(), hooked(fused), steps=1), expected)
        assert torch.equal(sample(model, hooked(fused), steps=1), expected)
    assert torch.equal(sample(plain, prompt, steps=1), bare)


@pytest.mark.parametrize("kind", ["lora", "lokr", "dora", "diff"])
def test_fused_keys_give_the_same_bits_when_partly_loaded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--lowvram and --novram apply the patches at every call instead of once."""
    import comfy.model_management as mm

    prompt, plain = conditioning("hot"), load("hot", "fp32")
    fused, _ = pair(kind)
    model = with_adapter(fixed(plain, fix="online", c=1 / 16), fused, 0.8)
    expected = sample(model, prompt, steps=1)
    unload()
    original = mm.LoadedModel.model_load
    monkeypatch.setattr(mm.LoadedModel, "model_load", lambda self, *a, **k: original(self, 1))
    assert torch.equal(sample(model, prompt, steps=1), expected)
    assert model.model.lowvram_patch_counter > 0
    # what ComfyUI does to bring the adapter's own tensors over before a call
    for key in model.patches:
        for patch in model.patches[key]:
            size = [0]
            comfy.lora.prefetch_prepared_value(patch[1], size, None, None, False)
            assert size[0] > 0


def test_a_model_with_fused_keys_is_saved_and_merged_with_each_weight_once() -> None:
    """Names are only names: what is saved, counted, merged and extracted has each weight once, with the adapter in."""
    fused, apart = pair("lora")
    plain, other = load("hot", "fp32"), load("warm", "fp32")
    prompt = conditioning("hot")

    def saved(model: Any) -> Adapter:
        ModelSave().save(model, "diffusion_models/fused_keys")
        (path,) = Path(folder_paths.get_output_directory(), "diffusion_models").glob("fused_keys*")
        found = load_file(path)
        path.unlink()
        return found

    expected = saved(with_adapter(plain, apart, 0.8))
    assert expected.keys() == saved(plain).keys()
    assert not any(".proj.qkv." in key for key in expected)
    found = saved(with_adapter(fixed(plain), fused, 0.8))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())

    for one, two in ((fused, {}), ({}, fused)):
        merged = ModelMergeSimple().merge(with_adapter(plain, one, 0.8), with_adapter(other, two, 0.8), 0.3)[0]
        known = [apart if file else {} for file in (one, two)]
        model = ModelMergeSimple().merge(with_adapter(plain, known[0], 0.8), with_adapter(other, known[1], 0.8), 0.3)[0]
        assert torch.equal(sample(merged, prompt, steps=1), sample(model, prompt, steps=1))
        late = with_adapter(merged, pair("lokr")[0], 0.5)
        split = with_adapter(model, pair("lokr")[1], 0.5)
        assert same(sample(late, prompt, steps=1), sample(split, prompt, steps=1))

    difference = ModelSubtract().merge(with_adapter(plain, fused, 0.8), plain, 1.0)[0]
    prefix = "diffusion_model."
    extracted = calc_lora_model(difference, RANK, prefix, prefix, {}, LORAType.FULL_DIFF, bias_diff=True)
    assert {f"{p.format(0)}.diff" for p in PARTS} <= extracted.keys()
    assert f"{WHOLE.format(0)}.diff" not in extracted


def test_the_names_cost_nothing() -> None:
    """Sizes, patch tables and the network's own state dict are those of the weights there are."""
    import comfy.model_management as mm

    model = load("hot", "fp32")
    whole = WHOLE.format(0) + ".weight"
    own = model.model.diffusion_model.state_dict()
    counted = [*own.values(), *model.model.model_sampling.state_dict().values()]
    assert mm.module_size(model.model) == sum(tensor.nbytes for tensor in counted)
    assert not any(key.startswith("layers.") and ".qkv." in key for key in own)
    names = model.model.state_dict()
    assert whole in names and whole in names.keys() and whole not in list(names)  # noqa: SIM118
    assert torch.equal(names[whole], torch.cat([names[f"{p.format(0)}.weight"] for p in PARTS]))
    with pytest.raises(KeyError):
        names["diffusion_model.layers.0.proj.nothing.weight"]
    assert whole not in model.get_key_patches() and whole not in model.get_key_patches("diffusion_model.")
    assert not any(".qkv." in key for key in model.model_state_dict("model_sampling"))
    patched = with_adapter(model, pair("loha")[0])
    assert not any(".qkv." in key for key in patched.patches)
    assert len(patched.patches) == 3 * DEPTH and not model.patches
    again = patched.clone().clone()
    assert {key: len(found) for key, found in again.patches.items()} == dict.fromkeys(patched.patches, 1)


def test_a_clone_that_comfyui_makes_of_another_class() -> None:
    """torch.compile's node asks for a patcher without dynamic VRAM loading, which is a plain one."""
    from comfy.model_patcher import ModelPatcher, ModelPatcherDynamic
    from moss_fp16_pack.nodes.loading.qkv_patcher import BothLayouts, take_both_layouts

    class Dynamic(ModelPatcher):
        def is_dynamic(self) -> bool:
            return True

    model, (fused, apart), prompt = load("hot", "fp32"), pair("lora"), conditioning("hot")
    expected = sample(with_adapter(model, apart), prompt, steps=1)
    model.__class__ = Dynamic
    take_both_layouts(model)
    assert isinstance(model, Dynamic) and isinstance(model.clone(), Dynamic)
    plain = model.clone(disable_dynamic=True)
    assert type(plain) is BothLayouts and not plain.is_dynamic() and plain.model is not model.model
    assert torch.equal(sample(with_adapter(plain, fused), prompt, steps=1), expected)
    model.__class__ = ModelPatcherDynamic
    take_both_layouts(model)
    assert isinstance(model, ModelPatcherDynamic) and isinstance(model, BothLayouts)
    model.__class__ = BothLayouts  # it was never loaded as a dynamic one, so it cannot go as one


@pytest.mark.usefixtures("foreign")
def test_a_model_with_fused_weights_merged_in() -> None:
    """ComfyUI merges by key, so those of another layout would have been left out."""
    plain, prompt, (fused, apart) = load("hot", "fp32"), conditioning("hot"), pair("lora")
    split = ModelMergeSimple().merge(plain, with_adapter(load("warm", "fp32"), apart), 0.3)[0]
    whole = ModelMergeSimple().merge(plain, with_adapter(stock("warm", "fp32"), fused), 0.3)[0]
    expected = sample(split, prompt, steps=1)
    assert rel(sample(ModelMergeSimple().merge(plain, load("warm", "fp32"), 0.3)[0], prompt, steps=1), expected) > 1e-4
    assert same(sample(whole, prompt, steps=1), expected)


def test_a_kept_fold_has_one_table() -> None:
    """The fold's scaling and the names work together on every clone, and taking the fix off leaves the names."""
    kept = load("hot_fp16fix", "fp32", unfold=False)
    fused, _ = pair("lora")
    video = {
        "diffusion_model.video_embedder.lora_up.weight": torch.ones(D, RANK),
        "diffusion_model.video_embedder.lora_down.weight": torch.ones(RANK, 128),
    }
    model = with_adapter(with_adapter(fixed(kept), fused | video, 0.3).clone(), fused, 0.3)
    assert isinstance(model.patches, FoldedPatches)
    assert len(model.patches[PARTS[1].format(2) + ".weight"]) == 2
    assert len(model.patches["diffusion_model.video_embedder.weight"]) == 3
    again = with_adapter(fixed(model), fused, 0.3)
    assert len(again.patches[PARTS[1].format(2) + ".weight"]) == 3
    assert len(again.patches["diffusion_model.video_embedder.weight"]) == 3
    assert not any(".qkv." in key for key in again.patches)


def test_what_fits_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """As stock: a line for an unknown key. Kinds that mix the rows of q, k and v are not loaded either."""
    prompt, plain = conditioning("hot"), load("hot", "fp32")
    bare = sample(plain, prompt, steps=1)
    numbers = torch.Generator().manual_seed(0)
    up, down = torch.randn(3 * D, RANK, generator=numbers), torch.randn(RANK, D, generator=numbers)
    unknown = {
        "diffusion_model.layers.9.proj.qkv.lora_up.weight": up,
        "diffusion_model.layers.9.proj.qkv.lora_down.weight": down,
    }
    mixing: dict[str, Adapter] = {
        "lora": {"lora_up.weight": up, "lora_down.weight": down, "dora_scale": torch.ones(1, D)},
        "oft": {"oft_blocks": torch.randn(2, 96, 96, generator=numbers)},
        "boft": {"oft_blocks": torch.randn(1, 12, 16, 16, generator=numbers)},
    }
    with caplog.at_level(logging.WARNING):
        assert torch.equal(sample(with_adapter(plain, unknown), prompt, steps=1), bare)
        assert "lora key not loaded: diffusion_model.layers.9.proj.qkv.lora_up.weight" in caplog.text
        for kind, tensors in mixing.items():
            caplog.clear()
            file = {f"{WHOLE.format(1)}.{ending}": tensor for ending, tensor in tensors.items()}
            assert torch.equal(sample(with_adapter(plain, file), prompt, steps=1), bare)
            assert f"NOT LOADED {WHOLE.format(1)}.weight" in caplog.text, kind
        caplog.clear()
        wrong = {f"{WHOLE.format(1)}.diff": torch.ones(3 * D + 3, D)}
        assert torch.equal(sample(with_adapter(plain, wrong), prompt, steps=1), bare)
        assert "SHAPE MISMATCH" in caplog.text


def test_fused_and_split_keys_give_the_same_weights_in_fp16() -> None:
    """Stored and computed in fp16, fixed: fused and split keys still give the same weights."""
    fused, apart = pair("lora")
    model, prompt = fixed(load("hot", "fp16")), conditioning("hot")
    expected = sample(with_adapter(model, apart), prompt)
    assert torch.equal(sample(with_adapter(model, fused), prompt), expected)
    fused, apart = pair("loha")
    out, expected = (sample(with_adapter(model, file), prompt) for file in (fused, apart))
    assert rel(out, expected) < 2e-3


@pytest.mark.usefixtures("foreign")
def test_fused_keys_on_a_class_of_comfyuis_own_are_left_to_comfyui(caplog: pytest.LogCaptureFixture) -> None:
    """It is left as it is: fused keys fit one with fused weights, split keys do not, and the fix changes neither."""
    prompt, plain = conditioning("hot"), stock("hot", "fp32")
    fused, apart = pair("lora")
    bare = sample(plain, prompt, steps=1)
    expected = sample(with_adapter(plain, fused), prompt, steps=1)
    assert rel(expected, bare) > 1e-3
    online: dict[str, Any] = {"fix": "online", "c": 1 / 16}
    for model in (with_adapter(fixed(plain, **online), fused), fixed(with_adapter(plain, fused), **online)):
        assert torch.equal(sample(model, prompt, steps=1), expected)
        assert report(model)["rescues"] == []
    with caplog.at_level(logging.WARNING):
        assert torch.equal(sample(with_adapter(fixed(plain, **online), apart), prompt, steps=1), bare)
    assert caplog.text.count("lora key not loaded") == len(apart)
