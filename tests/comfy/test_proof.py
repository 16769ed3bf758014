"""The proof: no rung is trusted before it gave what the class itself computes, however that class is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.model_management as mm
import pytest
import torch
from comfy_runs import conditioning, fixed, foreign_pack, load, marks, rel, report, sample, stock, unload
from fix_settings import FOLDS, SETTINGS
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.fold.scaling.plan import StreamPlan
from moss_fp16_pack.nodes.guard import call as model_call
from moss_fp16_pack.nodes.guard import proof, self_check
from moss_fp16_pack.nodes.inputs import FixOptions
from moss_fp16_pack.nodes.state import CallState, Rung, fix_of

BY_HAND = ("managed", "fp32_residual")

#: in what a class differs -> which of the settings do not compute what it does: folds on its own forward, ours, or both
BUILT: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "MOSS-Image": ({}, False, False),
    "in the older style": ({"plain": True}, False, False),
    "a large writer": ({"writer": 0.5}, True, True),
    "a small writer": ({"writer": 0.02}, True, True),
    "a writer that is idle in pure noise": ({"writer": 0.5, "later": True}, True, True),
    "another RoPE centre": ({"rope": 0.5}, False, True),
    "swapped halves of the time embedding": ({"swapped": True}, False, True),
    "a dropped text mask": ({"drops_mask": True}, False, True),
    "another eps": ({"eps": 1e-3}, True, True),
    "a RoPE that depends on the size": ({"stretch": 0.5}, False, True),
}


@pytest.fixture(autouse=True)
def nothing_remembered(forgotten: None) -> Iterator[None]:
    yield
    unload()


@pytest.fixture
def built(request: pytest.FixtureRequest) -> Iterator[str]:
    """ComfyUI with a class of its own that is built like this."""
    pack = foreign_pack()
    pack.register(pack.Built(**BUILT[request.param][0]))
    yield request.param
    pack.register.undo()
    unload()


def padded(name: str) -> list[Any]:
    """A golden prompt with three masked tokens behind it."""
    ((context, _),) = conditioning(name)
    junk = torch.randn(1, 3, context.shape[2], generator=torch.Generator().manual_seed(3))
    mask = torch.cat((torch.ones(1, context.shape[1]), torch.zeros(1, 3)), dim=1)
    return [[torch.cat((context, junk), dim=1), {"attention_mask": mask}]]


def failing(built: str, setting: str) -> bool:
    _, folds, ours = BUILT[built]
    return folds if setting in FOLDS else ours


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("built", BUILT, indirect=True)
def test_every_setting_gives_what_the_class_does_or_refuses(built: str, dtype: str) -> None:
    prompt = padded("cool") if "mask" in built else conditioning("cool")
    run: dict[str, Any] = {"steps": 2, "size": (12, 4)}
    own = sample(stock("cool", "fp32"), prompt, **run)
    bound = 2e-5 if dtype == "fp32" else rel(sample(stock("cool", "bf16"), prompt, **run), own) / 2
    base = stock("cool", dtype)
    for setting, options in SETTINGS.items():
        self_check.forget_all()
        model = fixed(base, **options)
        if failing(built, setting) and setting in BY_HAND:
            with pytest.raises(MossError, match=r"built otherwise .* away from what the class itself computes"):
                sample(model, prompt, **run)
            continue
        assert rel(sample(model, prompt, **run), own) < bound, setting
        found = report(model)
        assert found["self_check"]["result"] == ("failed" if failing(built, setting) else "passed"), setting
        if failing(built, setting):
            # a CPU has no bf16 worth the name
            assert (found["mode"], found["compute_dtype"], found["engine"]) == ("none", "fp32", "native")
            assert "built otherwise" in found["warnings"][-1] and "please send us" in found["warnings"][-1]


def fixed_state(model: Any) -> Any:
    fix = fix_of(model)
    assert fix is not None
    return fix


# ---- what follows from a failed proof ---------------------------------------------------------------------------


@pytest.mark.parametrize("built", ["a large writer"], indirect=True)
def test_on_a_card_with_bf16_the_class_goes_on_in_bf16(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, base = conditioning("hot"), stock("hot", "fp16")
    expected = sample(stock("hot", "bf16"), prompt)
    monkeypatch.setattr(mm, "should_use_bf16", lambda *_, **__: True)
    model = fixed(base)
    out = sample(model, prompt)
    assert report(model)["compute_dtype"] == "bf16" and report(model)["stream_dtype"] == "bf16"
    # weights rounded to fp16 and then to bf16, instead of to bf16 at once
    assert rel(out, expected) < rel(sample(stock("hot", "fp32"), prompt), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("built", ["a large writer"], indirect=True)
def test_a_wider_model_goes_on_as_it_is(built: str, dtype: str) -> None:
    prompt = conditioning("hot")
    model = fixed(stock("hot", dtype), fix="online", c=1 / 16)
    assert torch.equal(sample(model, prompt), sample(stock("hot", dtype), prompt))
    assert report(model)["compute_dtype"] == dtype and report(model)["self_check"]["result"] == "failed"


@pytest.mark.parametrize("built", ["another RoPE centre"], indirect=True)
@pytest.mark.parametrize("setting", BY_HAND)
def test_what_is_asked_for_by_hand_can_be_accepted(built: str, setting: str) -> None:
    prompt, asked = conditioning("hot"), SETTINGS[setting]
    unchecked = sample(fixed(stock("hot", "fp16"), self_check=False, **asked), prompt, steps=2)
    model = fixed(stock("hot", "fp16"), accept_unproven=True, **asked)
    assert torch.equal(sample(model, prompt, steps=2), unchecked)
    found = report(model)
    assert found["self_check"]["result"] == "accepted" and found["self_check"]["difference"] > proof.BOUND
    assert any("accept_unproven" in sentence for sentence in found["warnings"])


@pytest.mark.parametrize("built", ["a large writer"], indirect=True)
def test_a_fold_cannot_be_accepted(built: str) -> None:
    prompt = conditioning("hot")
    model = fixed(stock("hot", "fp16"), accept_unproven=True)
    assert rel(sample(model, prompt), sample(stock("hot", "fp32"), prompt)) < 1e-5
    assert report(model)["self_check"]["result"] == "failed"


@pytest.mark.parametrize("built", ["swapped halves of the time embedding"], indirect=True)
def test_a_rung_whose_proof_failed_does_not_exist_for_the_guard(built: str) -> None:
    """burst needs s, which only our own forward has: where that is not the class's, the call goes to fp32."""
    prompt = conditioning("burst")
    own = sample(stock("burst", "fp32"), prompt)
    model = fixed(stock("burst", "fp16"), fix="none")
    assert rel(sample(model, prompt), own) < 1e-5
    found = report(model)
    assert found["engine"] == "native" and found["compute_dtype"] == "fp32"
    assert found["self_check"]["result"] == "failed" and len(found["rescues"]) == 1


@pytest.mark.parametrize("built", ["MOSS-Image"], indirect=True)
def test_every_rung_that_the_guard_climbs_to_is_proven(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[Rung] = []
    prove = proof.Prover.prove

    def watched(self: proof.Prover, rung: Rung) -> Any:
        proven.append(rung)
        return prove(self, rung)

    monkeypatch.setattr(proof.Prover, "prove", watched)
    model = fixed(stock("burst", "fp16"), fix="none")
    sample(model, conditioning("burst"))
    assert [rung.managed for rung in proven] == [False, True] or proven[-1].managed
    assert report(model)["self_check"]["result"] == "passed" and report(model)["engine"] == "managed"
    assert proven[-1].plan.factors.s_ffn != (1.0,)


# ---- a fold kept in the weights, adapters, weights that are not all loaded ---------------------------------------


@pytest.mark.parametrize("built", ["a large writer"], indirect=True)
def test_a_kept_fold_is_taken_out_at_run_time(built: str) -> None:
    """The file's fold scales the writers it knows; the class's own writer stays at its scale on both sides."""
    prompt = conditioning("hot")
    own = sample(stock("hot", "fp32"), prompt)
    for options in ({}, {"fix": "online", "c": 1 / 16, "s_ffn": 1 / 2}):
        self_check.forget_all()
        model = fixed(stock("hot_fp16fix", "fp16"), **options)
        assert rel(sample(model, prompt), own) < 2e-3  # the file's weights were rounded to fp16 with the fold
        assert report(model)["self_check"]["result"] == "failed"
        unload()


@pytest.mark.parametrize("built", ["MOSS-Image"], indirect=True)
def test_a_kept_fold_is_proven(built: str) -> None:
    for options in ({}, {"eps": "stock"}, {"clamp": True}, {"fix": "fp32_residual"}):
        self_check.forget_all()
        model = fixed(stock("hot_fp16fix_s", "fp16"), **options)
        sample(model, conditioning("hot"), steps=1)
        assert report(model)["self_check"]["result"] == "passed", options


@pytest.mark.parametrize("built", ["MOSS-Image", "another RoPE centre"], indirect=True)
@pytest.mark.parametrize("memory", [1, 200_000], ids=["novram", "lowvram"])
def test_partly_loaded_with_a_lora(built: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from adapter_files import adapter, with_adapter

    plain, prompt = stock("hot", "fp16"), conditioning("hot")
    file = adapter("lora", plain)
    own = sample(with_adapter(stock("hot", "fp32"), file), prompt, steps=2)
    unload()
    original = mm.LoadedModel.model_load
    monkeypatch.setattr(mm.LoadedModel, "model_load", lambda self, *a, **k: original(self, memory))
    for setting in ("online", "s"):
        self_check.forget_all()
        model = with_adapter(fixed(plain, **SETTINGS[setting]), file)
        assert rel(sample(model, prompt, steps=2), own) < 5e-3
        assert report(model)["self_check"]["result"] == ("failed" if failing(built, setting) else "passed")


# ---- what is compared -------------------------------------------------------------------------------------------


class Spy:
    """The calls a proof makes: their latents' sizes, text lengths and sigmas. `error` is raised in their place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Any = None) -> None:
        self.sizes: list[tuple[int, ...]] = []
        self.texts: list[int] = []
        self.sigmas: list[float] = []
        compute = model_call.ModelCall.compute

        def spying(call: Any, rung: Rung, observer: Any = None, *, exact: bool = False) -> torch.Tensor:
            if exact:
                self.sizes.append(tuple(call.x.shape[-2:]))
                self.texts.append(call.conds["c_crossattn"].shape[1])
                self.sigmas.append(call.sigma)
                if error is not None and (raised := error(tuple(call.x.shape[-2:]))) is not None:
                    raise raised
            return compute(call, rung, observer, exact=exact)

        monkeypatch.setattr(model_call.ModelCall, "compute", spying)


@pytest.mark.parametrize(
    ("size", "strip"), [((24, 24), (24, 2)), ((5, 7), (3, 7)), ((12, 5), (12, 3)), ((6, 20), (2, 20)), ((1, 1), (1, 1))]
)
@pytest.mark.parametrize("built", ["MOSS-Image"], indirect=True)
def test_a_strip_keeps_the_longer_side_and_what_is_odd(
    built: str, size: tuple[int, int], strip: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    prompt = [[torch.randn(1, 100, 48, generator=torch.Generator().manual_seed(1)), {}]]
    model = fixed(stock("cool", "fp16"))
    sample(model, prompt, steps=1, size=size)
    assert report(model)["self_check"]["result"] == "passed"
    assert spy.sizes == [strip] * 2 and spy.texts == [64] * 2
    assert spy.sigmas == [pytest.approx(0.6)] * 2


@pytest.mark.parametrize("built", ["MOSS-Image"], indirect=True)
def test_a_conditioning_of_the_latents_size_is_proven_on_the_whole_call(
    built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    base = stock("hot", "fp32")
    base.model.diffusion_model.add_control(2)
    prompt = conditioning("hot", moss_control_hint=torch.full((1, 2, 6, 4), 4.0))
    sample(fixed(base, **SETTINGS["online"]), prompt, steps=1)
    assert spy.sizes == [(6, 4)] * 2
    prompt = conditioning("hot", moss_control_map=torch.full((1, 3, 5, 5), 4.0))
    sample(fixed(base, **SETTINGS["online"]), prompt, steps=1)
    assert set(spy.sizes[2:]) == {(6, 2)}  # and it is found to write to the stream, on one latent after the other


@pytest.mark.parametrize("built", ["MOSS-Image", "another RoPE centre"], indirect=True)
def test_out_of_memory_it_is_a_smaller_strip(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch, lambda size: torch.cuda.OutOfMemoryError("no room") if max(size) > 16 else None)
    model = fixed(stock("cool", "fp16"), **SETTINGS["s"])
    sample(model, conditioning("cool"), steps=1, size=(64, 6))
    assert spy.sizes[:4] == [(64, 2), (32, 2), (16, 2), (16, 2)]
    found = report(model)["self_check"]
    assert found["compared"] == "a strip of the latent (16 x 2 of 64 x 6)"
    assert found["result"] == ("passed" if built == "MOSS-Image" else "failed")


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no room"), ValueError("this class needs fp16")])
@pytest.mark.parametrize("built", ["MOSS-Image", "a large writer", "a small writer"], indirect=True)
def test_where_there_is_no_proof_the_call_must_agree_at_c_and_half_of_it(
    built: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spy(monkeypatch, lambda _size: error)
    prompt = conditioning("cool")
    own = sample(stock("cool", "fp32"), prompt, steps=1)
    model = fixed(stock("cool", "fp16"))
    out = sample(model, prompt, steps=1)
    found = report(model)["self_check"]
    assert found["compared"] == "the call at c and c/2"
    if built == "MOSS-Image":
        assert found["result"] == "not proven" and report(model)["mode"] == "online"
    else:
        assert found["result"] == "failed" and report(model)["mode"] == "none"
    assert rel(out, own) < 5e-3


@pytest.mark.parametrize("built", ["MOSS-Image"], indirect=True)
def test_a_class_that_only_takes_the_whole_latent(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch, lambda size: ValueError("not this size") if size != (6, 4) else None)
    model = fixed(stock("cool", "fp16"))
    sample(model, conditioning("cool"), steps=1)
    assert spy.sizes == [(6, 2), (6, 4), (6, 4)]
    assert report(model)["self_check"]["compared"] == "the whole call (6 x 4)"


# ---- nothing stays behind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["online", "s", "fp32_residual"])
@pytest.mark.parametrize("built", ["MOSS-Image"], indirect=True)
def test_an_end_in_the_middle_of_a_proof_leaves_nothing_behind(
    built: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, prompt = stock("hot_fp16fix", "fp16"), conditioning("hot")
    first = sample(base, prompt, steps=1)
    before = marks(base)

    def ending(call: int) -> Any:
        calls: list[int] = []

        def patch(args: dict[str, Any], extra: dict[str, Any]) -> Any:
            calls.append(1)
            if len(calls) == call:
                raise mm.InterruptProcessingException()
            return extra["original_block"](args)

        return patch

    for call in (1, 2):  # inside the class's own forward, and inside the rung's
        self_check.forget_all()
        model = fixed(base, **SETTINGS[setting]).clone()
        model.set_model_patch_replace(ending(call), "dit", "single_block", 2)
        with pytest.raises(mm.InterruptProcessingException):
            sample(model, prompt, steps=2)
        fix = fixed_state(model)
        assert fix.run is None and fix.call == CallState(fix.first_rung)
        assert torch.equal(sample(base, prompt, steps=1), first)
        assert {k: v for k, v in marks(base).items() if before.get(k, v) != v or k not in before} == {}
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("built", ["MOSS-Image"], indirect=True)
def test_quantized_weights_and_own_dtypes_are_the_numbers_they_stand_for(built: str, tmp_path: Any) -> None:
    """A linear that rounds what goes into it would make two right forwards differ."""
    from moss_fp16_pack.fold.dtypes import parse_rules
    from moss_fp16_pack.nodes.loading.load import load_moss
    from quantized_files import make_file

    with torch.inference_mode():
        for kind in ("int8_convrot", "fp8_scaled"):
            file = make_file("hot_fused_qkv", kind, tmp_path)
            rules = parse_rules("layers.*.proj.o.weight = bf16")
            for options in ({"fix": "fp32_residual"}, {"fix": "fp32_residual", "rules": rules}):
                self_check.forget_all()
                model = fixed(load_moss(str(file), "fp16", True, "native"), **options)
                sample(model, conditioning("hot"), steps=1)
                found = report(model)["self_check"]
                assert found["result"] == "passed" and found["difference"] < 1e-6, (kind, options)


# ---- the built-in class, by the same code -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cool", "warm", "hot", "burst"])
def test_the_same_code_proves_the_built_in_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "foreign_parts", lambda *_: ["this test"])
    base = load(name, "fp16")
    for setting, options in SETTINGS.items():
        self_check.forget_all()
        model = fixed(base, guard="off", **options)
        sample(model, conditioning(name), steps=1)
        found = report(model)["self_check"]
        assert found["result"] == "passed" and found["difference"] == 0.0, setting


def test_a_bug_in_our_own_forward_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate's factor left out, as a change of the fold might do: the proof of the built-in class fails."""
    from moss_fp16_pack.fold.scaling import plan

    monkeypatch.setattr(self_check, "foreign_parts", lambda *_: ["this test"])
    blocks = plan.StreamPlan.blocks

    def wrong(self: StreamPlan, depth: int) -> Any:
        from dataclasses import replace

        scales = blocks(self, depth)
        return (replace(scales[0], gate_ffn=1.0), *scales[1:])

    model = fixed(load("hot", "fp16"))
    monkeypatch.setattr(plan.StreamPlan, "blocks", wrong)
    sample(model, conditioning("hot"), steps=1)
    assert report(model)["self_check"]["result"] == "failed"


def test_options_know_what_was_asked_for_by_hand() -> None:
    assert FixOptions(engine="managed").managed_by_hand and FixOptions(fix="fp32_residual").managed_by_hand
    assert not FixOptions(clamp=True).managed_by_hand
