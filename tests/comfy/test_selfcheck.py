"""The self-check: something that writes to the stream and is not scaled is found before it spoils a picture.

What of the class itself could be otherwise is in test_proof.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comfy_runs import conditioning, fixed, load, rel, report, sample, stock, unload
from moss_fp16_pack.nodes.guard import proof, self_check
from torch.nn.modules.module import register_module_forward_pre_hook

FP16_ERROR = 5e-3  # of a whole run of the golden models, in relative L2

pytestmark = pytest.mark.usefixtures("forgotten")


@contextlib.contextmanager
def counting(model: Any) -> Iterator[list[int]]:
    """The image tokens of every call that reaches a MODEL's embedder, whatever wraps it."""
    embedder, calls = model.model.diffusion_model.video_embedder, []

    def count(module: Any, args: Any) -> None:
        if module is embedder:
            calls.append(args[0].shape[1])

    hook = register_module_forward_pre_hook(count)
    try:
        yield calls
    finally:
        hook.remove()


def adds_to_img(amount: float) -> Any:
    """A block patch of another pack: runs the block, then adds to the stream what it takes for the right amount."""

    def patch(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        return {**out, "img": out["img"] + amount}

    return patch


def control_map(amount: float) -> torch.Tensor:
    return torch.full((1, 3, 4, 4), amount)


def test_a_proof_is_two_small_calls_once(foreign: None) -> None:
    prompt = conditioning("hot")
    model = fixed(stock("hot", "fp16"))
    with counting(model) as calls:
        sample(model, prompt, steps=3)
        assert calls == [12, 12, 24, 24, 24]  # a strip of 6 x 2, then the 6 x 4 of the run
        assert report(model)["self_check"] == {
            "result": "passed", "difference": 0.0, "bound": proof.BOUND, "detail": None,
            "compared": "a strip of the latent (6 x 2 of 6 x 4)",
        }  # fmt: skip
        assert report(model)["model_calls"] == 3
        calls.clear()
        sample(model, prompt, steps=3)
        assert len(calls) == 3
        assert report(model)["self_check"]["result"] == "remembered"
        assert report(model)["self_check"]["difference"] == 0.0

    other = fixed(stock("warm", "fp16"), node_id="2")  # another file of the same class
    with counting(other) as calls:
        sample(other, conditioning("warm"), steps=2)
        assert len(calls) == 2


def test_our_own_forward_is_proven_for_each_size(foreign: None) -> None:
    """A class may let positions depend on the latent's size; the fold on the class's own forward does not care."""
    for options, proofs in (({"fix": "fp32_residual"}, 3), ({"fix": "online", "c": 1 / 16}, 1)):
        model, asked = fixed(stock("hot", "fp16"), **options), []
        for size in ((6, 4), (16, 12), (6, 4), (5, 7)):
            sample(model, conditioning("hot"), steps=1, size=size)
            asked.append(report(model)["self_check"]["result"])
        assert asked.count("passed") == proofs, asked


def test_nothing_is_to_prove_of_the_built_in_class(foreign: None) -> None:
    for options in ({}, {"fix": "fp32_residual"}, {"fix": "online", "c": 1 / 16, "s_ffn": 1 / 4}):
        model = fixed(load("hot", "fp16"), **options)
        with counting(model) as calls:
            sample(model, conditioning("hot"), steps=2)
        assert len(calls) == 2
        assert report(model)["self_check"]["result"] == "nothing to prove"


def test_it_can_be_left_out_and_the_report_says_so(foreign: None) -> None:
    model = fixed(stock("hot", "fp16"), self_check=False)
    with counting(model) as calls:
        sample(model, conditioning("hot"), steps=2)
    assert len(calls) == 2
    assert report(model)["self_check"]["result"] == "off"


def test_the_class_as_it_is_needs_no_proof(foreign: None) -> None:
    model = fixed(stock("cool", "fp16"), fix="none", guard="off")
    with counting(model) as calls:
        sample(model, conditioning("cool"), steps=2)
    assert len(calls) == 2
    assert report(model)["self_check"] is None


def test_a_control_map_is_found(foreign: None, notices: list[dict[str, Any]]) -> None:
    """The managed forward cannot run a control map, so the fallback is fp32 throughout."""
    prompt = conditioning("hot", moss_control_map=control_map(3.0))
    unfixed = sample(stock("hot", "fp32"), prompt)
    assert rel(unfixed, sample(stock("hot", "fp32"), conditioning("hot"))) > 0.05  # the map matters

    model = fixed(stock("hot", "fp16"))
    out = sample(model, prompt)
    found = report(model)
    assert rel(out, unfixed) < FP16_ERROR
    assert found["self_check"]["result"] == "failed"
    assert found["self_check"]["difference"] > 10 * proof.BOUND
    assert found["self_check"]["compared"].startswith("a strip")  # 4 x 4 is not tied to 6 x 4
    assert "control_map" in found["self_check"]["detail"]
    assert found["compute_dtype"] == "fp32" and found["mode"] == "none"
    assert any("control_map" in sentence for sentence in found["warnings"])
    assert [n["kind"] for n in notices] == ["self_check"]
    assert "control_map" in notices[0]["text"]


def test_a_failed_combination_is_never_remembered_as_good(foreign: None) -> None:
    prompt = conditioning("hot", moss_control_map=control_map(3.0))
    model = fixed(stock("hot", "fp16"))
    first = sample(model, prompt)
    assert torch.equal(sample(model, prompt), first)
    assert report(model)["self_check"]["result"] == "failed"
    plain = sample(model, conditioning("hot"))
    assert report(model)["self_check"]["result"] == "passed"  # what it carried did not stick to the model
    assert report(model)["mode"] == "online"
    assert rel(plain, sample(stock("hot", "fp32"), conditioning("hot"))) < FP16_ERROR


def test_a_control_map_on_one_side_of_the_guidance_is_found(foreign: None) -> None:
    """The side without the map runs first and passes; the other side must be checked all the same."""
    positive, negative = conditioning("hot", moss_control_map=control_map(3.0)), conditioning("hot", "case1")
    for a, b in ((positive, negative), (negative, positive)):
        unfixed = sample(stock("hot", "fp32"), a, negative=b, cfg=3.0)
        model = fixed(stock("hot", "fp16"))
        out = sample(model, a, negative=b, cfg=3.0)
        assert report(model)["self_check"]["result"] == "failed"
        assert rel(out, unfixed) < 3 * FP16_ERROR  # guidance of 3 amplifies
        self_check.forget_all()


def test_a_control_map_that_starts_later_is_found(foreign: None) -> None:
    """A timestep range brings the control map in after the first steps passed."""
    late = conditioning("hot", moss_control_map=control_map(3.0), start_percent=0.5)
    prompt = conditioning("hot", end_percent=0.5) + late
    unfixed = sample(stock("hot", "fp32"), prompt, steps=4)
    model = fixed(stock("hot", "fp16"))
    out = sample(model, prompt, steps=4)
    assert report(model)["self_check"]["result"] == "failed"
    assert rel(out, unfixed) < FP16_ERROR


@pytest.mark.parametrize("make", [stock, load], ids=["native", "builtin"])
def test_a_block_patch_that_adds_to_the_stream(make: Any, foreign: None, notices: list[dict[str, Any]]) -> None:
    """The class's own forward runs it at its own scale; of the built-in class the one with an fp32 stream."""
    prompt = conditioning("hot")

    def patched(model: Any) -> Any:
        model = model.clone()
        model.set_model_patch_replace(adds_to_img(500.0), "dit", "single_block", 1)
        return model

    unfixed = sample(patched(make("hot", "fp32")), prompt)
    assert rel(unfixed, sample(make("hot", "fp32"), prompt)) > 0.02
    model = patched(fixed(make("hot", "fp16")))
    out = sample(model, prompt)
    found = report(model)
    assert found["self_check"]["result"] == "failed"
    mode = ("none", "fp32", "native") if make is stock else ("fp32_residual", "fp16", "builtin")
    assert (found["mode"], found["compute_dtype"], found["engine"]) == mode and found["stream_dtype"] == "fp32"
    assert "single_block" in found["self_check"]["detail"]
    assert rel(out, unfixed) < FP16_ERROR
    assert notices[0]["kind"] == "self_check"


def test_a_patch_that_was_harmless_at_first(foreign: None) -> None:
    """The same patch at strength 0 passes; at its working strength it is another combination."""
    prompt = conditioning("hot")
    for amount, result in ((0.0, "passed"), (500.0, "failed"), (0.0, "remembered")):
        model = fixed(stock("hot", "fp16")).clone()
        model.set_model_patch_replace(adds_to_img(amount), "dit", "single_block", 1)
        sample(model, prompt, steps=1)
        assert report(model)["self_check"]["result"] == result, amount


def test_a_harmless_patch_passes(foreign: None) -> None:
    model = fixed(stock("hot", "fp16")).clone()
    model.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "single_block", 1)
    sample(model, conditioning("hot"), steps=1)
    assert report(model)["self_check"]["result"] == "passed"


def with_control(model: Any) -> Any:
    torch.manual_seed(3)
    model.model.diffusion_model.add_control(2)
    return model


def test_a_known_control_projection_is_scaled(foreign: None) -> None:
    """A projection under a known name is folded like the embedders: nothing is refused, nothing is lost."""
    prompt = conditioning("hot", moss_control_hint=torch.full((1, 2, 6, 4), 40.0))
    unfixed = sample(with_control(stock("hot", "fp32")), prompt)
    assert rel(unfixed, sample(stock("hot", "fp32"), conditioning("hot"))) > 0.02
    folded = fixed(with_control(stock("hot", "fp32")), fix="online", c=1 / 16)
    assert torch.equal(sample(folded, prompt), unfixed)
    found = report(folded)["self_check"]
    assert (found["result"], found["difference"]) == ("passed", 0.0)
    assert found["compared"] == "the whole call (6 x 4)"  # the hint has the latent's size

    half = fixed(with_control(stock("hot", "fp16")))
    assert rel(sample(half, prompt), unfixed) < FP16_ERROR
    assert report(half)["mode"] == "online"


def test_a_fold_kept_in_the_weights_is_checked_too(foreign: None) -> None:
    """A folded file at work as stored: its embedders are scaled, a control map is not. The fold is taken out again."""
    prompt = conditioning("hot", moss_control_map=control_map(3.0))
    unfixed = sample(stock("hot", "fp32"), prompt)
    for dtype, bound in (("fp32", 2e-3), ("fp16", FP16_ERROR)):
        model = fixed(stock("hot_fp16fix", dtype))
        out = sample(model, prompt)
        found = report(model)
        assert found["self_check"]["result"] == "failed"
        assert rel(out, unfixed) < bound
        unload()


@pytest.mark.parametrize("eps", ["exact", "stock"])
@pytest.mark.parametrize("c", [1 / 2, 1 / 16, 1 / 256, 1 / 4096])
def test_small_factors_and_stock_eps_raise_no_false_alarm(foreign: None, c: float, eps: str) -> None:
    """Small factors bring subnormals, stock eps another function: neither is an unknown writer."""
    model = fixed(stock("cool", "fp16"), fix="online", c=c, eps=eps, guard="off")
    sample(model, conditioning("cool"), steps=1)
    assert report(model)["self_check"]["result"] == "passed"


def test_a_call_out_of_range_accuses_nobody(foreign: None) -> None:
    """A proof is computed in fp32, so what overflows in fp16 has no part in it; a broken latent proves nothing."""
    for guard in ("off", "report"):
        self_check.forget_all()
        model = fixed(stock("burst", "fp16"), fix="online", c=1 / 2, guard=guard)
        sample(model, conditioning("burst"), steps=1)
        assert report(model)["self_check"]["result"] == "passed"
    self_check.forget_all()
    latent = torch.full((1, 128, 6, 4), float("nan"))
    model = fixed(stock("cool", "fp16"))
    sample(model, conditioning("cool"), steps=1, latent=latent)
    assert report(model)["self_check"] is None


class CountsItself:
    """A wrapper of another pack with a count of its calls, which looks different each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return executor(*args, **kwargs)


def test_a_wrapper_that_changes_at_every_call_does_not_double_the_run(foreign: None) -> None:
    """Wrappers have no part in a proof; with them the call at c and c/2 must agree, a few times in a run."""
    model = fixed(stock("hot", "fp16"))
    model.add_wrapper_with_key("diffusion_model", "test_other", CountsItself())
    with counting(model) as calls:
        sample(model, conditioning("hot"), steps=12)
    assert len(calls) == 12 + 2 + self_check.MOST - 1  # the proof is one of the checks
    assert report(model)["self_check"]["result"] == "passed"


def test_a_wrapper_that_adds_to_the_stream_is_found(foreign: None) -> None:
    """By a block patch of its own, of which nobody else in the call knows."""

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        options = next(a for a in (*args, *kwargs.values()) if isinstance(a, dict) and "sigmas" in a)
        options.setdefault("patches_replace", {}).setdefault("dit", {})[("single_block", 1)] = adds_to_img(500.0)
        return executor(*args, **kwargs)

    model = fixed(stock("hot", "fp16"))
    model.add_wrapper_with_key("diffusion_model", "test_adds", wrapper)
    sample(model, conditioning("hot"), steps=1)
    found = report(model)
    assert found["self_check"]["result"] == "failed" and found["compute_dtype"] == "fp32"


def test_a_factor_that_cannot_be_halved_is_not_checked_by_halves(foreign: None) -> None:
    """At c / 2 fp16 loses one bit more, and below 2^-24 there is no factor."""
    model = fixed(stock("cool", "fp16"), fix="online", c=2.0**-24, engine="native")
    model.add_wrapper("diffusion_model", lambda run, *args, **kwargs: run(*args, **kwargs))
    sample(model, conditioning("cool"), steps=1)
    assert report(model)["outcome"] == "unknown"
