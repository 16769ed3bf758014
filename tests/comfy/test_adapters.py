"""Adapters of every kind on every kind of layer: the fixed MODEL computes what the unfixed one does, bit for bit."""

from __future__ import annotations

from typing import Any

import comfy.sd
import pytest
import torch
from adapter_files import KINDS, PREFIX, adapter, with_adapter
from comfy_runs import conditioning, fixed, load, rel, report, sample, stock, unload
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.fold.scaling.weights import rescale, row_scale
from moss_fp16_pack.nodes.engines.adapters import FoldedPatches, RowScale
from moss_fp16_pack.nodes.model.stored_fold import stored_fold_of
from moss_fp16_pack.nodes.state import KEY, fix_of

CLASSES = {"builtin": load, "foreign": stock}


pytestmark = pytest.mark.usefixtures("foreign")


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_unfolded_weights_give_the_same_bits_before_and_after_the_fix(make: Any, kind: str) -> None:
    """Online: weights are never scaled, so adapters have nothing to notice."""
    prompt, plain = conditioning("hot"), make("hot", "fp32")
    file = adapter(kind, plain)
    bare = sample(plain, prompt, steps=2)
    for strength in (0.3, 1.5):
        expected = sample(with_adapter(plain, file, strength), prompt, steps=2)
        assert rel(expected, bare) > 1e-3
        before = fixed(with_adapter(plain, file, strength), fix="online", c=1 / 16)
        after = with_adapter(fixed(plain, fix="online", c=1 / 16), file, strength)
        for model in (before, after):
            assert torch.equal(sample(model, prompt, steps=2), expected)
            assert report(model)["mode"] == "online" and report(model)["rescues"] == []
    assert torch.equal(sample(plain, prompt, steps=2), bare)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_the_managed_path_with_s_give_the_same_bits_as_without_the_fix(kind: str) -> None:
    """s acts on the inputs of o and ffn_down, so adapters there are as exact."""
    prompt, plain = conditioning("hot"), load("hot", "fp32")
    file = adapter(kind, plain)
    expected = sample(with_adapter(plain, file, 1.5), prompt, steps=2)
    model = with_adapter(fixed(plain, fix="online", c=1 / 16, s_attn=1 / 2, s_ffn=1 / 4), file, 1.5)
    assert torch.equal(sample(model, prompt, steps=2), expected)


@pytest.mark.parametrize("name", ["hot_fp16fix", "hot_fp16fix_s"])
def test_adapters_on_a_file_unfolded_at_load_give_the_same_bits_as_without_the_fix(name: str) -> None:
    prompt, plain = conditioning("hot"), load(name, "fp32", unfold=True)
    for kind in KINDS:
        file = adapter(kind, plain)
        expected = sample(with_adapter(plain, file, 0.3), prompt, steps=1)
        for model in (fixed(with_adapter(plain, file, 0.3)), with_adapter(fixed(plain), file, 0.3)):
            assert torch.equal(sample(model, prompt, steps=1), expected), kind
            assert report(model)["mode"] == "online"


def loaded_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights as patched for the run that just ended."""
    return {k.removeprefix(PREFIX): v.clone() for k, v in model.model.state_dict().items() if k.startswith(PREFIX)}


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("name", ["hot_fp16fix", "hot_fp16fix_s"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_a_kept_fold_patch_the_weights_to_the_fold_of_the_patched_ones(
    make: Any, kind: str, name: str
) -> None:
    """The patched weights are the fold of the unfolded model's patched weights, to the bit."""
    prompt = conditioning("hot")
    kept = load(name, "fp32", unfold=False) if make is load else stock(name, "fp32")
    file, second = adapter(kind, kept), adapter("lora", kept, seed=1)
    unfolded = load(name, "fp32", unfold=True)
    record = stored_fold_of(kept).record
    assert record is not None
    if make is stock:
        pairs = file  # the foreign class has fused qkv: compare with its own unfolded twin
        reference_model = unfolded_twin(kept, record)
    else:
        pairs, reference_model = file, unfolded
    adapted = with_adapter(with_adapter(reference_model, pairs, 0.3), second, 1.5)
    sample(adapted, prompt, steps=1)
    expected = loaded_weights(reference_model)
    # The same function over the weights without the fold: a kept fold runs with the eps of a runtime that knows none.
    expected_out = sample(fixed(adapted, fix="online", factors=record.factors, eps="stock"), prompt, steps=2)
    bare = sample(fixed(kept), prompt, steps=2)

    for order in ("adapters first", "fix first", "fix between"):
        if order == "adapters first":
            model = fixed(with_adapter(with_adapter(kept, file, 0.3), second, 1.5))
        elif order == "fix first":
            model = with_adapter(with_adapter(fixed(kept), file, 0.3), second, 1.5)
        else:
            model = with_adapter(fixed(with_adapter(kept, file, 0.3)), second, 1.5)
        out = sample(model, prompt, steps=2)
        arch = fix_of(model).arch  # type: ignore[union-attr]
        found = loaded_weights(model)
        for key, weight in expected.items():
            if key != "rope.bands":
                assert torch.equal(found[key], rescale(weight, multiply=row_scale(key, arch, record.factors))), (
                    order,
                    key,
                )
        assert rel(out, expected_out) < 2e-6, order
        assert report(model)["mode"] == "weights"
        assert torch.equal(sample(fixed(kept), prompt, steps=2), bare)  # nothing stuck


def unfolded_twin(kept: Any, record: Any) -> Any:
    """The foreign MODEL of a folded file with the fold taken out of its weights."""
    from moss_fp16_pack.fold.scaling.weights import unfold_tensor
    from moss_fp16_pack.nodes.model.moss import arch_of

    twin = comfy.sd.load_diffusion_model(str(kept.cached_patcher_init[1][0]), {"dtype": torch.float32})
    twin.set_model_compute_dtype(torch.float32)
    tree = twin.model.diffusion_model
    with torch.no_grad():
        for name, weight in tree.named_parameters():
            weight.copy_(unfold_tensor(name, weight, arch_of(tree), record.factors))
    twin.cached_patcher_init = None  # the file says "folded", and that is no longer true
    return twin


def test_the_table_of_patches_stays_clean() -> None:
    """Clones of clones hold each adapter once, a second fix takes the scaling off, and the stock MODEL has none."""
    kept = load("hot_fp16fix", "fp32", unfold=False)
    file = adapter("lora", kept)
    model = fixed(kept)
    for _ in range(4):
        model = with_adapter(model, file, 0.3).clone()
    key = PREFIX + "video_embedder.weight"
    assert isinstance(model.patches, FoldedPatches)
    assert len(model.patches.get(key, [])) == 4
    assert len(model.patches[key]) == 12
    again = fixed(model)
    assert len(again.patches.get(key, [])) == 4
    assert type(kept.patches) is dict and not kept.patches
    assert KEY not in kept.callbacks.get("on_clone", {})
    plain = PREFIX + "layers.1.proj.q.weight"
    assert not any(isinstance(patch[1], RowScale) for patch in model.patches[plain])


def test_a_merge_of_two_kept_folds() -> None:
    """Merging is left to ComfyUI: two files that carry the same fold merge into one that carries it."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    prompt = conditioning("hot")
    one, other = load("hot_fp16fix", "fp32", unfold=False), load("warm_fp16fix", "fp32", unfold=False)
    expected = sample(fixed(ModelMergeSimple().merge(one, other, 0.5)[0]), prompt, steps=2)
    out = sample(ModelMergeSimple().merge(fixed(one), fixed(other), 0.5)[0], prompt, steps=2)
    assert torch.equal(out, expected)
    plain = [load(name, "fp32", unfold=True) for name in ("hot_fp16fix", "warm_fp16fix")]
    assert rel(expected, sample(ModelMergeSimple().merge(*plain, 0.5)[0], prompt, steps=2)) < 1e-3


def test_saving_a_kept_fold_with_an_adapter() -> None:
    """What is saved is the fold of the patched weights, whether it was sampled before or not."""
    from pathlib import Path

    import folder_paths
    from comfy_extras.nodes_model_merging import ModelSave
    from safetensors.torch import load_file

    kept, unfolded = load("hot_fp16fix", "fp32", unfold=False), load("hot_fp16fix", "fp32", unfold=True)
    file = adapter("lora", kept)
    sample(with_adapter(unfolded, file, 0.3), conditioning("hot"), steps=1)
    expected = loaded_weights(unfolded)
    record = stored_fold_of(kept).record
    model = with_adapter(fixed(kept), file, 0.3)
    ModelSave().save(model, "diffusion_models/kept_test")
    (saved,) = Path(folder_paths.get_output_directory(), "diffusion_models").glob("kept_test*")
    found = load_file(saved)
    saved.unlink()
    arch = fix_of(model).arch  # type: ignore[union-attr]
    assert record is not None
    for key, weight in expected.items():
        if key != "rope.bands":
            folded = rescale(weight, multiply=row_scale(key, arch, record.factors))
            assert torch.equal(found[f"model.diffusion_model.{key}"].float(), folded), key


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("kind", ["lora", "lokr", "loha"])
def test_adapters_in_bypass_mode_give_the_same_bits_as_without_the_fix(make: Any, kind: str) -> None:
    """An adapter that adds to a module's output stands outside its forward; the factor goes on last all the same."""
    prompt, plain = conditioning("hot"), make("hot", "fp32")
    file = adapter(kind, plain)

    def bypass(model: Any) -> Any:
        return comfy.sd.load_bypass_lora_for_models(model, None, dict(file), 0.7, 0)[0]

    bare = sample(plain, prompt, steps=2)
    expected = sample(bypass(plain), prompt, steps=2)
    assert rel(expected, bare) > 1e-3
    for model in (bypass(fixed(plain, fix="online", c=1 / 16)), fixed(bypass(plain), fix="online", c=1 / 16)):
        assert torch.equal(sample(model, prompt, steps=2), expected)
        assert report(model)["self_check"]["result"] in ("passed", "remembered")
    assert torch.equal(sample(plain, prompt, steps=2), bare)


def test_bypass_mode_on_a_kept_fold_is_refused() -> None:
    kept = load("hot_fp16fix", "fp32", unfold=False)
    file = adapter("lora", kept)
    model = comfy.sd.load_bypass_lora_for_models(fixed(kept), None, dict(file), 0.7, 0)[0]
    with pytest.raises(MossError, match=r"bypass mode adds to video_embedder.*unfold = auto"):
        sample(model, conditioning("hot"), steps=1)
    inside = {k: v for k, v in file.items() if ".proj.q." in k}
    model = comfy.sd.load_bypass_lora_for_models(fixed(kept), None, inside, 0.7, 0)[0]
    sample(model, conditioning("hot"), steps=1)


def test_an_object_patch_of_another_pack_on_a_writer_is_scaled_with_it() -> None:
    """Something wraps the embedder after the fix and adds to its output at the stream's own scale."""
    prompt = conditioning("hot")
    for make in CLASSES.values():
        plain = make("hot", "fp32")

        def add(model: Any) -> Any:
            model = model.clone()
            name = "diffusion_model.video_embedder.forward"
            inner = model.get_model_object(name)
            model.add_object_patch(name, lambda x: inner(x) + 100.0)
            return model

        expected = sample(add(plain), prompt, steps=2)
        for model in (add(fixed(plain, fix="online", c=1 / 16)), fixed(add(plain), fix="online", c=1 / 16)):
            assert torch.equal(sample(model, prompt, steps=2), expected)


def test_a_lora_in_fp16_with_the_fix_stays_near_fp32(golden: dict[str, Any]) -> None:
    """The same in fp16, where LoRA and fold meet in practice."""
    prompt = conditioning("hot")
    for make in CLASSES.values():
        file = adapter("lora", make("hot", "fp32"))
        reference = sample(with_adapter(make("hot", "fp32"), file, 1.0), prompt)
        out = sample(with_adapter(fixed(make("hot", "fp16")), file, 1.0), prompt)
        assert rel(out, reference) < 6e-3


def test_adapters_on_a_kept_fold_give_the_same_bits_when_partly_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """--lowvram and --novram apply the patches at every call instead of once."""
    import comfy.model_management as mm

    prompt, kept = conditioning("hot"), load("hot_fp16fix_s", "fp32", unfold=False)
    models = {kind: with_adapter(fixed(kept), adapter(kind, kept), 0.3) for kind in ("lora", "dora", "diff")}
    expected = {kind: sample(model, prompt, steps=1) for kind, model in models.items()}
    unload()
    original = mm.LoadedModel.model_load
    monkeypatch.setattr(mm.LoadedModel, "model_load", lambda self, *a, **k: original(self, 1))
    for kind, model in models.items():
        assert torch.equal(sample(model, prompt, steps=1), expected[kind]), kind
        assert model.model.lowvram_patch_counter > 0


@pytest.mark.parametrize("kind", ["lora", "diff"])
def test_adapters_with_split_keys_land_on_a_fused_file(kind: str) -> None:
    """The built-in class has q, k and v apart whatever the file has, so adapters for them land on both layouts."""
    prompt, plain = conditioning("hot"), load("hot", "fp32")
    file = adapter(kind, plain)
    assert any(".proj.q." in key for key in file)
    expected = sample(with_adapter(plain, file), prompt, steps=2)
    assert rel(expected, sample(plain, prompt, steps=2)) > 1e-3
    assert torch.equal(sample(with_adapter(load("hot_fused_qkv", "fp32"), file), prompt, steps=2), expected)
