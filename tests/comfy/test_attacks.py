"""Attempts at a wrong picture, a stuck patch or a traceback by what other packs and users really do."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import comfy.hooks
import pytest
import torch
from comfy_runs import conditioning, fixed, kernels_of_a_compiler, load, rel, report, sample, stock
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.nodes import apply
from moss_fp16_pack.nodes.model.moss import is_manageable
from moss_fp16_pack.nodes.panel import publish
from server import PromptServer

MODELS = {"builtin": load, "foreign": stock}
FP16_ERROR = 5e-3


pytestmark = pytest.mark.usefixtures("foreign", "forgotten")


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


# ---- caches that answer for the model ---------------------------------------------------------------------------


def by_sigma(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """A step cache at its worst: the first answer at a sigma is the answer."""
    options = next(a for a in (*args, *kwargs.values()) if isinstance(a, dict) and "sigmas" in a)
    cache = options["test_cache"]
    key = (float(options["sigmas"][0]), tuple(map(str, options["uuids"])))
    if key not in cache:
        cache[key] = executor(*args, **kwargs).clone()
    return cache[key].clone()


def cached(model: Any) -> Any:
    model = model.clone()
    model.add_wrapper_with_key("diffusion_model", "test_cache", by_sigma)
    # what survives the deep copies of model_options, as the holders of real caches do
    model.model_options["transformer_options"]["test_cache"] = Holder()
    return model


class Holder(dict[Any, Any]):
    """A dict that ComfyUI's copies of plain dicts leave alone."""

    def __deepcopy__(self, memo: Any) -> Holder:
        return self

    def copy(self) -> Holder:
        return self


@pytest.mark.parametrize("name", ["hot", "burst"])
def test_a_cache_cannot_pass_off_the_bad_result(make: Any, name: str) -> None:
    prompt = conditioning(name)
    reference = sample(make(name, "fp32"), prompt)
    model = cached(fixed(make(name, "fp16"), fix="none"))
    out = sample(model, prompt)
    assert rel(out, reference) < FP16_ERROR
    assert report(model)["rescues"]


def test_a_cache_cannot_pass_the_self_check(make: Any) -> None:
    prompt = conditioning("hot")
    model = fixed(make("hot", "fp16"))

    def patch(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        return {**out, "img": out["img"] + 500.0}

    model = cached(model)
    model.set_model_patch_replace(patch, "dit", "single_block", 1)
    sample(model, prompt, steps=1)
    assert report(model)["self_check"]["result"] == "failed"


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_easycache_over_the_fix_gives_the_cached_run_in_range(make: Any, dtype: str) -> None:
    from comfy_extras.nodes_easycache import EasyCacheNode

    def easy(model: Any) -> Any:
        return EasyCacheNode.execute(model, reuse_threshold=0.4, start_percent=0.0, end_percent=1.0, verbose=False)[0]

    prompt = conditioning("hot")
    reference = sample(easy(make("hot", "fp32")), prompt, steps=6)
    if dtype == "fp32":
        assert torch.equal(sample(easy(fixed(make("hot", "fp32"), fix="online", c=1 / 16)), prompt, steps=6), reference)
    else:
        out = sample(easy(fixed(make("hot", "fp16"), fix="none")), prompt, steps=6)
        assert out.isfinite().all()
        assert rel(out, sample(make("hot", "fp32"), prompt, steps=6)) < 0.2  # a cache's own error


# ---- hooks ------------------------------------------------------------------------------------------------------


ADAPTED = {"video_embedder": (64, 128), "layers.1.proj.o": (64, 64)}


def hooked(model: Any, prompt: list[Any], paths: Iterable[str] = ADAPTED) -> list[Any]:
    """The prompt with a LoRA that is switched on by a hook."""
    numbers = torch.Generator().manual_seed(0)
    lora = {}
    for path in paths:
        rows, columns = ADAPTED[path]
        lora[f"diffusion_model.{path}.lora_up.weight"] = torch.randn(rows, 2, generator=numbers)
        lora[f"diffusion_model.{path}.lora_down.weight"] = torch.randn(2, columns, generator=numbers) * 0.1
    hooks = comfy.hooks.create_hook_lora(lora, 1.0, 0.0)
    return [[prompt[0][0], {**prompt[0][1], "hooks": hooks}]]


def test_a_hooks_lora_gives_the_same_bits_with_the_fix(make: Any) -> None:
    prompt = conditioning("hot")
    plain = make("hot", "fp32")
    bare = sample(plain, prompt, steps=2)
    expected = sample(plain, hooked(plain, prompt), negative=prompt, cfg=2.0, steps=2)
    model = fixed(plain, fix="online", c=1 / 16)
    assert torch.equal(sample(model, hooked(model, prompt), negative=prompt, cfg=2.0, steps=2), expected)
    assert torch.equal(sample(plain, prompt, steps=2), bare)


def test_a_lora_of_a_hook_on_a_kept_fold_is_refused() -> None:
    prompt = conditioning("hot")
    model = fixed(load("hot_fp16fix", "fp32", unfold=False))
    with pytest.raises(MossError, match="of a hook adds to video_embedder"):
        sample(model, hooked(model, prompt), steps=1)
    # where the fold scales nothing, a hook may add, and adds what it adds to the unfolded weights
    plain, paths = load("hot", "fp32"), ["layers.1.proj.o"]
    bare, wanted = (sample(plain, one, steps=1) for one in (prompt, hooked(plain, prompt, paths)))
    found = sample(model, hooked(model, prompt, paths), steps=1)
    assert rel(found, wanted) < rel(wanted, bare) / 5  # measured: 1.5e-6 and 2.3e-5


# ---- inputs made for another model ------------------------------------------------------------------------------


def test_what_was_made_for_another_model_is_named() -> None:
    for options in ({}, {"fix": "fp32_residual"}):
        for make in (load, stock):
            if make is stock and not options:
                continue  # the class's own forward
            model = fixed(make("cool", "fp16"), **options)
            with pytest.raises(MossError, match=r"conditioning is \[1, 77, 768\].*text encoder"):
                sample(model, [[torch.zeros(1, 77, 768), {}]], steps=1)
            mask = torch.tensor([[1, 1, 0]])
            with pytest.raises(MossError, match="attention_mask"):
                sample(model, conditioning("cool", attention_mask=mask), steps=1)
    model = load("cool", "fp32")
    with pytest.raises(MossError, match=r"latent is \[1, 16, 6, 4\].*FLUX\.2"):
        model.model.diffusion_model(torch.zeros(1, 16, 6, 4), torch.ones(1), torch.zeros(1, 3, 48))


def test_what_the_managed_path_cannot_run_is_named() -> None:
    model = fixed(stock("cool", "fp16"), fix="fp32_residual")
    with pytest.raises(MossError, match=r"control_map.*engine = native"):
        sample(model, conditioning("cool", moss_control_map=torch.ones(1, 1, 2, 2)), steps=1)
    patched = model.clone()
    patched.set_model_attn1_patch(lambda q, k, v, extra: (q, k, v))
    with pytest.raises(MossError, match="attn1_patch"):
        sample(patched, conditioning("cool"), steps=1)
    # nothing stuck
    sample(model, conditioning("cool"), steps=1)


def test_a_class_without_our_modules_is_rescued_in_fp32_on_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the modules our forward needs, the native path still runs and the ladder ends in fp32."""
    prompt = conditioning("hot")
    reference = sample(stock("hot", "fp32"), prompt)
    lacking = stock("hot", "fp32").model.diffusion_model
    assert is_manageable(lacking)
    del lacking.layers[1].proj.ffn_up_gate
    assert not is_manageable(lacking)

    model = stock("hot", "fp16")
    monkeypatch.setattr(apply, "is_manageable", lambda _: False)  # this class runs, but our forward must not
    with pytest.raises(MossError, match="built otherwise"):
        fixed(model, fix="fp32_residual")
    out = sample(rescued := fixed(model, fix="none"), prompt)
    assert rel(out, reference) < FP16_ERROR
    assert report(rescued)["engine"] == "native"


# ---- the server around it ---------------------------------------------------------------------------------------


def test_a_server_that_is_going_down_ends_no_run(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    queue = SimpleNamespace(currently_running={})
    monkeypatch.setattr(PromptServer, "instance", SimpleNamespace(send_sync=fail, prompt_queue=queue), raising=False)
    model = fixed(make("cool", "fp16"), fix="none")
    sample(model, conditioning("cool"), steps=2)
    assert report(model)["state"] == "done"


@pytest.mark.parametrize(
    "extra",
    [None, {}, [], "x", {"extra_pnginfo": None}, {"extra_pnginfo": []}, {"extra_pnginfo": {"workflow": []}},
     {"extra_pnginfo": {"workflow": {"id": 5}}}, {"extra_pnginfo": {"workflow": {"id": ["x"]}}}],
)  # fmt: skip
def test_extra_data_of_any_shape_gives_no_workflow_id_and_no_error(extra: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = SimpleNamespace(currently_running={0: (0, "p", {}, extra, [])})
    monkeypatch.setattr(PromptServer, "instance", SimpleNamespace(prompt_queue=queue), raising=False)
    monkeypatch.setattr(publish, "get_executing_context", lambda: SimpleNamespace(prompt_id="p", node_id="1"))
    assert publish.where_now() == ("p", None)


def test_a_report_that_cannot_be_read_hides_no_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that failed fails again when its counters are read: the first error is the one to see."""
    model = fixed(make("cool", "fp16"))

    def broken(*_: Any) -> None:
        monkeypatch.setattr(publish, "finish", lambda *_: (_ for _ in ()).throw(RuntimeError("second")))
        raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="first"):
        sample(model, conditioning("cool"), steps=2, callback=broken)
    monkeypatch.undo()
    sample(model, conditioning("cool"), steps=1)
    assert report(model)["state"] == "done"


# ---- a rescue in compiled code ----------------------------------------------------------------------------------


def test_a_rescue_under_torch_compile(make: Any) -> None:
    """The rung changes under a compiled model: it is compiled anew, not run as before."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    torch._dynamo.reset()
    prompt = conditioning("burst")
    with kernels_of_a_compiler():
        expected = sample(fixed(make("burst", "fp16"), fix="none"), prompt, steps=2)
    model = fixed(make("burst", "fp16"), fix="none").clone()
    set_torch_compile_wrapper(model, backend="eager")
    for _ in range(2):
        assert torch.equal(sample(model, prompt, steps=2), expected)
        assert len(report(model)["rescues"]) == 1
