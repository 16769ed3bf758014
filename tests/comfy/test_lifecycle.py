"""Whatever is done with a fixed MODEL, the MODEL it was made from stays what it was, bit for bit and attribute by
attribute; and the fixed one computes the same function in every kind of run ComfyUI knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.samplers
import folder_paths
import pytest
import torch
from comfy_runs import conditioning, fixed, kernels_of_a_compiler, load, marks, rel, report, sample, stock, unload
from moss_fp16_pack.fold.scaling.record import FoldRecord, StoredFold
from moss_fp16_pack.nodes.guard import self_check
from moss_fp16_pack.nodes.inputs import read_options
from moss_fp16_pack.nodes.model.stored_fold import stored_fold_of
from moss_fp16_pack.nodes.state import CallState, fix_of
from safetensors.torch import load_file

CLASSES = {"builtin": load, "foreign": stock}
FP16_ERROR = 5e-3
SLG = {"double_layers": "", "single_layers": "1", "start_percent": 0.0, "end_percent": 1.0}


pytestmark = pytest.mark.usefixtures("foreign")


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.model.state_dict().items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, NaN for NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


class Untouched:
    """A stock MODEL, what it gave at first, and the proof that it still does."""

    def __init__(self, make: Callable[..., Any], name: str = "hot", dtype: str = "fp32") -> None:
        self.make, self.name = make, name
        self.model, self.prompt = make(name, dtype), conditioning(name)
        self.first = sample(self.model, self.prompt, steps=2)
        self.marks, self.weights = marks(self.model), weights(self.model)

    def fixed(self, **options: Any) -> Any:
        return fixed(self.model, **({"fix": "online", "c": 1 / 16} | options))

    def check(self) -> None:
        assert same(sample(self.model, self.prompt, steps=2), self.first)
        now = marks(self.model)
        assert {k: v for k, v in now.items() if k not in self.marks} == {}
        assert {k: v for k, v in self.marks.items() if now.get(k, "missing") != v} == {}
        after = self.model.model.state_dict()
        assert list(after) == list(self.weights)
        assert all(torch.equal(after[k], v) for k, v in self.weights.items())


@pytest.fixture(params=CLASSES)
def base_model(request: pytest.FixtureRequest) -> Untouched:
    return Untouched(CLASSES[request.param])


@pytest.fixture(params=CLASSES)
def half_model(request: pytest.FixtureRequest) -> Untouched:
    return Untouched(CLASSES[request.param], dtype="fp16")


# ---- several fixes on one model ---------------------------------------------------------------------------------


def test_fixes_with_other_settings_alternate_on_one_module_without_a_trace(half_model: Untouched) -> None:
    """Different settings, native and managed, on one loaded module: each run is its own."""
    models = {
        "plain": half_model.fixed(node_id="1"),
        "smaller": half_model.fixed(node_id="2", c=1 / 256),
        "wide": half_model.fixed(node_id="3", fix="fp32_residual", c=1.0),
        "with s": half_model.fixed(node_id="4", s_ffn=1 / 64),
        "rescued": half_model.fixed(node_id="5", fix="none"),
        "full": fixed(half_model.model, node_id="6", dtype="fp32", fix="none"),
    }
    first = {key: sample(model, half_model.prompt, steps=2) for key, model in models.items()}
    for key in ("smaller", "plain", "rescued", "wide", "full", "with s", "plain", "rescued", "rescued", "full", "wide"):
        assert torch.equal(sample(models[key], half_model.prompt, steps=2), first[key]), key
        assert report(models[key])["node_id"] == str(list(models).index(key) + 1)
        if key in ("rescued", "full"):
            half_model.check()
    half_model.check()


def test_the_last_fix_counts(half_model: Untouched) -> None:
    """A Fix on top of a Fix replaces it, over LoRA-like clones and whatever path either takes."""
    settings: list[dict[str, Any]] = [
        {},
        {"fix": "fp32_residual", "c": 1.0},
        {"s_ffn": 1 / 64},
        {"fix": "none", "guard": "off"},
        {"counters": False, "guard": "off"},
        {"dtype": "fp32"},
    ]
    for first in settings:
        under = half_model.fixed(node_id="1", **first)
        for second in settings:
            if first.get("dtype") and not second.get("dtype"):
                continue  # what it computes in is the MODEL's, not the fix's
            alone = half_model.fixed(node_id="2", **second)
            on_top = fixed(under.clone(), node_id="2", **({"fix": "online", "c": 1 / 16} | second))
            a, b = sample(alone, half_model.prompt, steps=1), sample(on_top, half_model.prompt, steps=1)
            assert same(a, b), (first, second)
            assert alone.object_patches.keys() == on_top.object_patches.keys()
            assert report(on_top)["node_id"] == "2"
    half_model.check()


def test_ten_prompts_on_two_fixes_leave_nothing_to_one_another(half_model: Untouched) -> None:
    fast, wide = half_model.fixed(), half_model.fixed(fix="fp32_residual", c=1.0, node_id="2")
    prompts = [conditioning("hot", case) for case in ("case0", "case1")]
    expected = {(i, j): sample(m, p, steps=1) for i, m in enumerate((fast, wide)) for j, p in enumerate(prompts)}
    for turn in range(10):
        i, j = (turn * 7) % 2, (turn // 2) % 2
        assert torch.equal(sample((fast, wide)[i], prompts[j], steps=1), expected[(i, j)])
        if turn % 3 == 0:
            half_model.check()
    half_model.check()


def test_unload_reload_and_another_model_between(half_model: Untouched) -> None:
    other = Untouched(half_model.make, "cool", "fp16")
    model = half_model.fixed(fix="none")  # ends on another rung than it began
    first = sample(model, half_model.prompt, steps=2)
    unload()
    half_model.check()
    assert torch.equal(sample(model, half_model.prompt, steps=2), first)
    other.check()
    assert torch.equal(sample(model, half_model.prompt, steps=2), first)
    unload()
    other.check()
    half_model.check()


@pytest.mark.parametrize("memory", [1, 200_000], ids=["novram", "lowvram"])
def test_fixed_models_give_the_same_bits_when_partly_loaded(
    half_model: Untouched, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that stay where they are and are cast at every call, as --novram and --lowvram do."""
    models = [half_model.fixed(), half_model.fixed(fix="fp32_residual", c=1.0), half_model.fixed(fix="none")]
    expected = [sample(model, half_model.prompt, steps=2) for model in models]
    unload()
    original = mm.LoadedModel.model_load
    monkeypatch.setattr(mm.LoadedModel, "model_load", lambda self, *a, **k: original(self, memory))
    for model, out in zip(models, expected, strict=True):
        assert torch.equal(sample(model, half_model.prompt, steps=2), out)
        assert model.model.model_lowvram
    # the module's own flags tell of the partial load, so only the result counts here
    assert same(sample(half_model.model, half_model.prompt, steps=2), half_model.first)
    monkeypatch.undo()
    unload()
    half_model.check()


# ---- ends in the middle -----------------------------------------------------------------------------------------

ENDINGS: dict[str, Any] = {
    "interrupted": mm.InterruptProcessingException,
    "failed": RuntimeError,
}


def ends_at(step: int, error: type[BaseException]) -> Any:
    def callback(index: int, *_: Any) -> None:
        if index == step:
            raise error()

    return callback


@pytest.mark.parametrize("state", ENDINGS)
@pytest.mark.parametrize("options", [{}, {"fix": "none"}, {"fix": "fp32_residual"}], ids=str)
def test_a_run_that_ends_at_any_step_leaves_the_next_one_whole(
    half_model: Untouched, state: str, options: dict[str, Any]
) -> None:
    model = half_model.fixed(**options)
    whole = sample(model, half_model.prompt, steps=3)
    for step in range(3):
        with pytest.raises(ENDINGS[state]):
            sample(model, half_model.prompt, steps=3, callback=ends_at(step, ENDINGS[state]))
        assert report(model)["state"] == state
        half_model.check()
    assert torch.equal(sample(model, half_model.prompt, steps=3), whole)
    assert report(model)["state"] == "done"


@pytest.mark.parametrize("call", range(6))
def test_a_run_that_ends_inside_any_call_leaves_nothing_behind(half_model: Untouched, call: int) -> None:
    """The first step's own call, the self-check's, the closer look's, the rescue's: inside a block of each."""
    self_check.forget_all()
    model = half_model.fixed(fix="online", c=1 / 2)
    calls: list[int] = []

    def patch(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == call + 1:
            raise mm.InterruptProcessingException()
        return extra["original_block"](args)

    patched = model.clone()
    patched.set_model_patch_replace(patch, "dit", "single_block", 2)
    with pytest.raises(mm.InterruptProcessingException):
        sample(patched, half_model.prompt, steps=4)
    fix = fix_of(model)
    assert fix is not None
    assert fix.run is None and fix.call == CallState(fix.first_rung)
    half_model.check()
    reference = sample(half_model.make("hot", "fp32"), half_model.prompt, steps=2)
    assert rel(sample(model, half_model.prompt, steps=2), reference) < FP16_ERROR


# ---- nodes around it --------------------------------------------------------------------------------------------


def test_a_fixed_model_is_saved_and_merged_with_the_files_own_weights(base_model: Untouched, base: Path) -> None:
    """What is saved from a fixed MODEL are the file's own weights; a merge of fixed ones is the merge of plain ones."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple, ModelSave

    model = base_model.fixed()
    sample(model, base_model.prompt, steps=1)
    ModelSave().save(model, "diffusion_models/saved_test")
    (saved,) = Path(folder_paths.get_output_directory(), "diffusion_models").glob("saved_test*")
    found = load_file(saved)
    saved.unlink()
    own = {k.removeprefix("diffusion_model."): v for k, v in base_model.weights.items() if "diffusion_model." in k}
    kept = {k.removeprefix("model.diffusion_model."): v for k, v in found.items() if k.startswith("model.diffusion")}
    assert kept.keys() == own.keys()
    assert all(torch.equal(kept[k], own[k].to(kept[k].dtype)) for k in own)
    base_model.check()

    other = base_model.make("warm", "fp32")
    merged = ModelMergeSimple().merge(base_model.model, other, 0.75)[0]
    plain = sample(merged, base_model.prompt, steps=2)
    for both in (
        ModelMergeSimple().merge(model, other, 0.75)[0],
        ModelMergeSimple().merge(model, fixed(other, fix="online", c=1 / 16), 0.75)[0],
        fixed(merged, fix="online", c=1 / 16),
    ):
        assert torch.equal(sample(both, base_model.prompt, steps=2), plain)
        base_model.check()
    assert not torch.equal(plain, base_model.first)


@pytest.mark.parametrize("order", ["fix first", "compile first"])
def test_torch_compile_before_and_after_the_fix_computes_the_fold(half_model: Untouched, order: str) -> None:
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    def compiled(model: Any) -> Any:
        model = model.clone()
        set_torch_compile_wrapper(model, backend=backend)
        return model

    with kernels_of_a_compiler():
        expected = sample(half_model.fixed(), half_model.prompt, steps=2)
    if order == "fix first":
        model = compiled(half_model.fixed())
    else:
        model = fixed(compiled(half_model.model), fix="online", c=1 / 16)
    assert torch.equal(sample(model, half_model.prompt, steps=2), expected)
    half_model.check()
    assert graphs
    built = len(graphs)
    for _ in range(3):
        assert torch.equal(sample(model, half_model.prompt, steps=2), expected)
    assert len(graphs) == built, "a second run must not compile again"
    half_model.check()


def test_skip_layer_guidance_before_and_after_the_fix_gives_the_same_bits(base_model: Untouched) -> None:
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT, SkipLayerGuidanceDiTSimple

    negative = conditioning("hot", "case1")
    for node, options in ((SkipLayerGuidanceDiTSimple, {}), (SkipLayerGuidanceDiT, {"scale": 2.0})):
        slg = SLG | {"single_layers": "1, 2"} | options
        plain = sample(node.execute(base_model.model, **slg)[0], base_model.prompt, negative=negative, cfg=3.0)
        before = fixed(node.execute(base_model.model, **slg)[0], fix="online", c=1 / 16)
        after = node.execute(base_model.fixed(), **slg)[0]
        for model in (before, after):
            assert torch.equal(sample(model, base_model.prompt, negative=negative, cfg=3.0), plain)
            base_model.check()
        assert not torch.equal(plain, sample(base_model.model, base_model.prompt, negative=negative, cfg=3.0))


def test_shift_nodes_before_and_after_the_fix_give_the_same_bits(base_model: Untouched) -> None:
    from comfy_extras.nodes_model_advanced import ModelSamplingAuraFlow, ModelSamplingSD3

    for patch in (
        lambda m: ModelSamplingAuraFlow().patch_aura(m, 2.0)[0],
        lambda m: ModelSamplingSD3().patch(m, 2.0)[0],
    ):
        plain = sample(patch(base_model.model), base_model.prompt, steps=2)
        for model in (patch(base_model.fixed()), fixed(patch(base_model.model), fix="online", c=1 / 16)):
            assert torch.equal(sample(model, base_model.prompt, steps=2), plain)
        base_model.check()


@pytest.mark.parametrize("half_model", ["builtin"], indirect=True)
def test_the_timestep_multiplier_of_older_plugins(half_model: Untouched) -> None:
    """SD3's shift node hands out sigma x 1000; the built-in class takes sigma whatever the multiplier is (what another
    class makes of its timestep is its own affair)."""
    from comfy_extras.nodes_model_advanced import ModelSamplingAuraFlow, ModelSamplingSD3

    plain = sample(ModelSamplingAuraFlow().patch_aura(half_model.fixed(), 2.0)[0], half_model.prompt, steps=2)
    thousand = sample(ModelSamplingSD3().patch(half_model.fixed(), 2.0)[0], half_model.prompt, steps=2)
    assert rel(thousand, plain) < FP16_ERROR


# ---- runs of every kind: in fp32 the fold changes no bit ---------------------------------------------------------


def custom_advanced(model: Any, prompt: list[Any]) -> torch.Tensor:
    from comfy_extras.nodes_custom_sampler import CFGGuider, KSamplerSelect, RandomNoise, SamplerCustomAdvanced

    guider = CFGGuider.execute(model, prompt, conditioning("hot", "case1"), 2.0)[0]
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 2)
    with torch.inference_mode():
        out = SamplerCustomAdvanced.execute(
            RandomNoise.execute(5)[0], guider, KSamplerSelect.execute("euler")[0], sigmas,
            {"samples": torch.zeros(1, 128, 6, 4)},
        )  # fmt: skip
    return out[0]["samples"]


def mask() -> torch.Tensor:
    half = torch.zeros(1, 1, 6, 4)
    half[..., :2] = 1.0
    return half


def start_latent() -> torch.Tensor:
    return torch.randn(1, 128, 6, 4, generator=torch.Generator().manual_seed(1))


def areas() -> list[Any]:
    left = conditioning("hot", area=(6, 2, 0, 0), strength=1.0)
    right = conditioning("hot", "case1", area=(6, 2, 0, 2), strength=0.8)
    return left + right + conditioning("hot", "case1", strength=0.3)


def ranges() -> list[Any]:
    return conditioning("hot", end_percent=0.4) + conditioning("hot", "case1", start_percent=0.4)


def unequal() -> list[Any]:
    short = conditioning("hot", "case1")
    short[0][0] = short[0][0][:, :3]
    return short


RUNS: dict[str, Callable[[Any, list[Any]], torch.Tensor]] = {
    **{
        name: lambda m, p, name=name: sample(
            m, p, sampler=name, steps=3, cfg=2.0, negative=conditioning("hot", "case1")
        )
        for name in ("er_sde", "euler_ancestral", "dpmpp_2m", "uni_pc")
    },
    "img2img": lambda m, p: sample(m, p, latent=start_latent(), denoise=0.5),
    "inpaint": lambda m, p: sample(m, p, latent=start_latent(), noise_mask=mask()),
    "batch 4": lambda m, p: sample(m, p, batch=4, cfg=2.0, negative=conditioning("hot", "case1")),
    "areas": lambda m, p: sample(m, areas()),
    "ranges": lambda m, p: sample(m, ranges(), steps=4),
    "unequal lengths": lambda m, p: sample(m, p, negative=unequal(), cfg=2.0),
    "custom advanced": custom_advanced,
    "odd sizes": lambda m, p: sample(m, p, size=(5, 7)),
    "one token": lambda m, p: sample(m, p, size=(1, 1)),
    "kept steps": lambda m, p: sample(m, p, steps=4, start_step=1, last_step=3, force_full_denoise=True),
}


@pytest.mark.parametrize("run", RUNS)
def test_runs_of_every_kind_give_the_same_bits_with_the_fold(base_model: Untouched, run: str) -> None:
    plain = RUNS[run](base_model.model, base_model.prompt)
    folded = base_model.fixed()
    assert torch.equal(RUNS[run](folded, base_model.prompt), plain)
    assert report(folded)["rescues"] == [] and report(folded)["state"] == "done"
    base_model.check()


def test_another_packs_wrapper_may_hand_on_by_name() -> None:
    seen: list[int] = []

    def named(executor: Any, noise: Any, latent: Any, sampler: Any, sigmas: Any, *rest: Any, **more: Any) -> Any:
        return executor(noise, latent, sampler, sigmas, callback=rest[1], disable_pbar=True, seed=rest[3], **more)

    prompt = conditioning("hot")
    wanted = sample(fixed(load("hot", "fp16")), prompt)
    model = load("hot", "fp16")
    model.add_wrapper_with_key("outer_sample", "test_named", named)
    model = fixed(model)
    assert torch.equal(sample(model, prompt, callback=lambda step, *_: seen.append(step)), wanted)
    assert seen == [0, 1, 2] and report(model)["steps"] == 3


@pytest.mark.parametrize(("unfold", "c"), [(True, 1 / 16), (False, 1.0)])
def test_an_s_alone_goes_with_the_files_own_c(unfold: bool, c: float) -> None:
    model = load("hot_fp16fix_s", "fp16", unfold=unfold)
    options = read_options({"s_ffn": "1/4"})
    plan = options.plan(half=True, stored=stored_fold_of(model))
    assert (plan.factors.c, plan.factors.s_ffn) == ((c,), (1 / 4,))
    stored = StoredFold(FoldRecord(1 / 64), unfolded=True)
    assert options.plan(half=True, stored=stored).factors.c == (1 / 64,)
    assert read_options({"s_ffn": "1/4", "c": "1/8"}).plan(half=True, stored=stored).factors.c == (1 / 8,)
