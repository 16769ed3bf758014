"""What other packs do to a MODEL besides conditionings and block patches: modules replaced, forwards patched, hooks."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import comfy.model_management
import pytest
import torch
from comfy.model_patcher import PatcherInjection
from comfy_runs import conditioning, fixed, load, rel, report, sample, stock
from moss_fp16_pack.fold.dtypes import parse_rules
from moss_fp16_pack.fold.errors import MossError
from torch import Tensor, nn

FOLD = {"fix": "online", "c": 1 / 16}
FP16_ERROR = 5e-3
RULES = parse_rules("layers.*.proj.o.weight = fp32")

pytestmark = pytest.mark.usefixtures("foreign", "forgotten")


class Instead(nn.Module):
    """A module in the place of another, with that one's attributes and something on top of its result."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.change(self.inner(*args, **kwargs))


def patched(model: Any, name: str, patch: Any) -> Any:
    model = model.clone()
    model.add_object_patch(f"diffusion_model.{name}", patch)
    return model


def writer_replaced(model: Any) -> Any:
    return patched(model, "video_embedder", Instead(model.model.diffusion_model.video_embedder, lambda y: y + 0.5))


def gates_replaced(model: Any) -> Any:
    name = "shared_block_modulation"
    return patched(model, name, Instead(getattr(model.model.diffusion_model, name), lambda y: y * 1.25))


def block_replaced(model: Any) -> Any:
    return patched(model, "layers.1", Instead(model.model.diffusion_model.layers[1], lambda y: y * 0.75))


def block_copied(model: Any) -> Any:
    return patched(model, "layers.1", copy.deepcopy(model.model.diffusion_model.layers[1]))


def block_compiled(model: Any) -> Any:
    torch._dynamo.reset()
    return patched(model, "layers.1", torch.compile(model.model.diffusion_model.layers[1], backend="eager"))


def block_patched(model: Any) -> Any:
    inner = model.get_model_object("diffusion_model.layers.1.forward")
    return patched(model, "layers.1.forward", lambda *a, **k: inner(*a, **k) * 0.75)


def hooked(path: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """A forward hook that is there while the MODEL is loaded."""

    def apply(model: Any) -> Any:
        model, placed = model.clone(), []

        def inject(patcher: Any) -> None:
            module = patcher.model.diffusion_model.get_submodule(path)
            placed.append(module.register_forward_hook(lambda _module, _args, out: change(out)))

        def eject(_patcher: Any) -> None:
            while placed:
                placed.pop().remove()

        model.set_injections("hook", [PatcherInjection(inject, eject)])
        return model

    return apply


writer_hooked = hooked("video_embedder", lambda y: y + 0.5)
block_hooked = hooked("layers.1", lambda y: y * 0.75)

CHANGES = {
    change.__name__: change
    for change in (writer_replaced, gates_replaced, block_replaced, block_copied, block_compiled, block_patched)
} | {"writer_hooked": writer_hooked, "block_hooked": block_hooked}


def state(model: Any) -> dict[str, Any]:
    """What a patch could leave on the modules."""
    return {
        path: (
            type(module),
            getattr(module.forward, "__func__", module.forward),
            getattr(module.forward, "__self__", None) is module,
            getattr(module, "eps", None),
        )
        for path, module in model.model.diffusion_model.named_modules()
    }


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("change", [name for name in CHANGES if name != "block_compiled"])  # compiling takes long
def test_the_fold_stands_outside_of_what_other_packs_put_on_modules(change: str, order: str) -> None:
    apply, prompt = CHANGES[change], conditioning("hot")
    plain = stock("hot", "fp32")
    before, bare = state(plain), sample(plain, prompt)
    reference = sample(apply(stock("hot", "fp32")), prompt)
    model = apply(fixed(plain, **FOLD)) if order == "first" else fixed(apply(plain), **FOLD)
    for _ in range(2):  # the second run is on what the first one left
        assert rel(sample(model, prompt), reference) < 1e-7
        assert report(model)["self_check"]["difference"] in (0.0, None)
    assert torch.equal(sample(plain, prompt), bare)
    assert state(plain) == before


def model_compiled(model: Any) -> Any:
    model = model.clone()
    model.add_object_patch("diffusion_model", torch.compile(model.model.diffusion_model, backend="eager"))
    return model


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("options", [FOLD, {"fix": "fp32_residual"}], ids=["online", "fp32_residual"])
@pytest.mark.parametrize("apply", [writer_replaced, block_copied, model_compiled])
def test_a_load_without_a_run_leaves_nothing(apply: Any, options: dict[str, Any], order: str) -> None:
    """As when the MODEL is saved: it is loaded, patches and all, and taken down again."""
    plain, prompt = stock("hot", "fp32"), conditioning("hot")
    before, bare = state(plain), sample(plain, prompt)
    model = apply(fixed(plain, **options)) if order == "first" else fixed(apply(plain), **options)
    comfy.model_management.load_models_gpu([model])
    assert torch.equal(sample(plain, prompt), bare)
    assert state(plain) == before


def test_the_fold_holds_on_a_block_patched_and_then_replaced() -> None:
    plain, prompt = stock("hot", "fp32"), conditioning("hot")
    before = state(plain)
    reference = sample(block_replaced(block_patched(stock("hot", "fp32"))), prompt)
    assert rel(sample(fixed(block_replaced(block_patched(plain)), **FOLD), prompt), reference) < 1e-7
    sample(plain, prompt)
    assert state(plain) == before


def test_what_another_pack_took_off_again_is_let_go() -> None:
    model, prompt = fixed(stock("hot", "fp32"), **FOLD), conditioning("hot")
    changed = writer_replaced(model)
    gone = weakref.ref(changed.object_patches["diffusion_model.video_embedder"])
    sample(changed, prompt)
    del changed
    sample(model, prompt)
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("change", "order"),
    [
        *(
            (f"block_{how}", order)
            for how in ("replaced", "copied", "patched", "hooked")
            for order in ("first", "last")
        ),
        ("block_compiled", "first"),
    ],
)
def test_the_guard_sees_every_run(change: str, order: str) -> None:
    apply, prompt = CHANGES[change], conditioning("hot")
    reference = sample(apply(stock("hot", "fp32")), prompt)
    plain = stock("hot", "fp16")
    model = apply(fixed(plain, fix="none")) if order == "first" else fixed(apply(plain), fix="none")
    for _ in range(2):
        assert rel(sample(model, prompt), reference) < FP16_ERROR
        assert len(report(model)["rescues"]) == 1


@pytest.mark.parametrize("change", ["block_replaced", "block_patched", "block_hooked"])
def test_the_managed_path_names_what_it_would_lose(change: str) -> None:
    apply, prompt = CHANGES[change], conditioning("hot")
    wide, clamped = fixed(stock("hot", "fp16"), fix="fp32_residual"), fixed(apply(stock("hot", "fp16")), clamp=True)
    for model in (apply(wide), clamped):
        with pytest.raises(MossError, match=r"changed layers\.1, .*engine = native"):
            sample(model, prompt, steps=1)


@pytest.mark.parametrize("change", ["block_copied", "block_compiled", "writer_replaced", "writer_hooked"])
def test_the_managed_path_runs_what_it_can(change: str) -> None:
    apply, prompt = CHANGES[change], conditioning("hot")
    reference = sample(apply(stock("hot", "fp32")), prompt)
    model = fixed(apply(stock("hot", "fp32")), fix="fp32_residual")
    assert rel(sample(model, prompt), reference) < 1e-6


def test_a_rescue_that_would_lose_a_change_stays_on_the_models_own_forward() -> None:
    prompt = conditioning("burst")
    reference = sample(block_patched(stock("burst", "fp32")), prompt)
    model = block_patched(fixed(stock("burst", "fp16"), fix="none"))
    assert rel(sample(model, prompt), reference) < FP16_ERROR
    assert report(model)["engine"] == "native"


@pytest.mark.parametrize("make", [load, stock])
def test_a_forward_put_past_the_fix(make: Any) -> None:
    """A pack that calls the class's forward, not the one it found: what hangs on ours is lost, which has to be said."""

    def past(model: Any) -> Any:
        tree = model.model.diffusion_model
        return patched(model, "forward", lambda *a, **k: type(tree).forward(tree, *a, **k))

    prompt = conditioning("burst")
    with pytest.raises(MossError, match="past it"):
        sample(past(fixed(make("burst", "fp16"), fix="fp32_residual")), prompt)
    reference = sample(make("burst", "fp32"), prompt)
    assert rel(sample(fixed(past(make("burst", "fp16")), fix="none"), prompt), reference) < FP16_ERROR
    if make is stock:
        model = past(fixed(make("burst", "fp16"), fix="none"))
        assert rel(sample(model, prompt), reference) < FP16_ERROR
        assert report(model)["engine"] == "native"


def test_a_module_that_lacks_what_is_patched() -> None:
    class Bare(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args[0]

    with pytest.raises(MossError, match=r"a Bare in the place of diffusion_model\.layers\.1, and it has no norm1"):
        fixed(patched(stock("hot", "fp32"), "layers.1", Bare()), **FOLD)


def test_padding_that_is_not_finite_is_no_fault_of_the_prompt() -> None:
    """What pads a text does not reach the model, so a call with it can be rescued."""
    prompt = conditioning("hot")
    tokens = prompt[0][0].shape[1]
    padded = torch.cat((prompt[0][0], torch.full((1, 2, prompt[0][0].shape[2]), float("nan"))), dim=1)
    mask = torch.cat((torch.ones(1, tokens), torch.zeros(1, 2)), dim=1)
    model = fixed(load("hot", "fp16"), fix="none")
    out = sample(model, [[padded, {"attention_mask": mask}]], steps=1)
    assert rel(out, sample(load("hot", "fp32"), prompt, steps=1)) < FP16_ERROR
    assert len(report(model)["rescues"]) == 1


# ---- clones on a module of their own ------------------------------------------------------------------------------


def darker(model: Any) -> Any:
    """A MODEL that can be told from one fresh from the file."""
    with torch.no_grad():
        model.model.diffusion_model.video_embedder.weight.mul_(0.75)
    return model


@pytest.mark.parametrize(
    "options", [FOLD, {"fix": "fp32_residual"}, FOLD | {"rules": RULES}], ids=["fold", "wide", "own"]
)
@pytest.mark.parametrize("make", [load, stock])
def test_the_fix_goes_along_to_a_clone_on_a_module_loaded_anew(make: Any, options: dict[str, Any]) -> None:
    """What torch.compile and LoRA hooks get under dynamic VRAM: the fix has to go along."""
    prompt = conditioning("hot")
    reference = sample(darker(make("hot", "fp32")), prompt)
    first, anew = make("hot", "fp32"), darker(make("hot", "fp32"))
    bare = sample(first, prompt)
    model = fixed(first, **options)
    for _ in range(2):  # the second time that module is loaded, with the first clone's patches on it
        clone = model.clone(model_override=anew.get_clone_model_override())
        assert rel(sample(clone, prompt), reference) < 1e-6
        found = report(clone)
        assert all(block["max_abs"] > 0 for block in found["blocks"]) and found["warnings"] == []
    assert torch.equal(sample(anew, prompt), reference)
    assert torch.equal(sample(first, prompt), bare)


def test_a_clone_on_a_module_loaded_anew_is_rescued() -> None:
    prompt = conditioning("burst")
    reference = sample(stock("burst", "fp32"), prompt)
    model = fixed(stock("burst", "fp16"), fix="none")
    clone = model.clone(model_override=stock("burst", "fp16").get_clone_model_override())
    assert rel(sample(clone, prompt), reference) < FP16_ERROR
