"""The guard: what it sees, which rung it takes, and that a rescued run is the run that started there."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import comfy.sample
import comfy.samplers
import pytest
import torch
from comfy_runs import conditioning, fixed, load, rel, report, sample, stock
from moss_fp16_pack.fold.model.observer import Kind
from moss_fp16_pack.fold.names import OFFICIAL
from moss_fp16_pack.fold.report import counters
from moss_fp16_pack.fold.report.report import remarks_on
from moss_fp16_pack.fold.scaling.factors import Factors
from moss_fp16_pack.fold.scaling.plan import StreamPlan
from moss_fp16_pack.nodes.apply import apply_fix
from moss_fp16_pack.nodes.guard.inputs_check import broken_weights
from moss_fp16_pack.nodes.guard.ladder import Evidence, WriterWatch, evidence_of, next_rung
from moss_fp16_pack.nodes.inputs import read_options
from moss_fp16_pack.nodes.panel import remedy
from moss_fp16_pack.nodes.state import Rung, fix_of
from torch.utils._python_dispatch import TorchDispatchMode

FP16_ERROR = 5e-3
UNIFORM = Factors(c=(1 / 16,))
MODELS = {"builtin": load, "foreign": stock}


pytestmark = pytest.mark.usefixtures("foreign")


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


class LatentEater:
    """Keeps every latent a run's model calls got, by the order of the calls."""

    def __init__(self) -> None:
        self.latents: list[torch.Tensor] = []

    def __call__(self, index: int, x0: Any, x: torch.Tensor, total: int) -> None:
        self.latents.append(x.clone())


def sigmas_of(model: Any, steps: int) -> torch.Tensor:
    return comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)


def euler_from(model: Any, x: torch.Tensor, sigmas: torch.Tensor, prompt: list[Any]) -> torch.Tensor:
    """An Euler run that starts with the latent x at sigmas[0]; x is in the model's own latent space."""
    from comfy.samplers import CFGGuider, sampler_object

    guider = CFGGuider(model)
    guider.set_conds(prompt, prompt)
    guider.set_cfg(1.0)
    process = model.model.latent_format.process_out
    # noise_scaling makes sigma * noise + (1 - sigma) * latent of its inputs: x goes in as the noise of a zero latent
    sigma = float(sigmas[0])
    with torch.inference_mode():
        return guider.sample(
            x / sigma, process(torch.zeros_like(x)), sampler_object("euler"), sigmas, disable_pbar=True, seed=7
        )


# ---- rungs from evidence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "start", "rung"),
    [
        # a stream out of range: a smaller c
        ("hot", {"fix": "none"}, "online c=1/16"),
        ("hot", {"fix": "online", "c": 1 / 2}, "online c=1/32"),
        # a writer's own output: s for its side, beside a c for the stream
        ("burst", {"fix": "online", "c": 1 / 256}, "online c=1/256 s_ffn=1/64"),
        ("burst", {"fix": "none"}, "s_ffn=1/64"),
        # a stream that is fp32 already cannot be the cause: s at once
        ("burst", {"fix": "fp32_residual"}, "fp32_residual s_ffn=1/64"),
    ],
)
def test_the_rung_comes_from_the_evidence(make: Any, name: str, start: dict[str, Any], rung: str) -> None:
    prompt = conditioning(name)
    reference = sample(make(name, "fp32"), prompt)
    model = fixed(make(name, "fp16"), **start)
    out = sample(model, prompt)
    found = report(model)
    assert rel(out, reference) < FP16_ERROR
    (rescue,) = found["rescues"]
    assert rescue["step"] == 1 and 0.9 < rescue["sigma"] <= 1.0
    assert rescue["rung"].endswith(rung), rescue
    assert rescue["reason"]
    assert found["summary"]["non_finite"] == 0
    assert found["summary"]["saturated"] == 0 or found["stream_dtype"] == "fp32"  # where 65504 is no limit
    assert found["model_calls"] == 3  # what was computed again is not counted twice


@pytest.mark.parametrize(
    ("plan", "manageable", "labels"),
    [
        (StreamPlan("online"), True, ["online c=1/16", "online c=1/256", "online c=1/4096", "fp32_residual"]),
        (StreamPlan("online"), False, ["online c=1/16", "online c=1/256", "online c=1/4096"]),
        # as far as there is way left
        (StreamPlan("online", Factors(c=(2.0**-11,))), True, ["online c=1/4096", "fp32_residual"]),
        (StreamPlan("online", Factors(c=(2.0**-22,))), True, ["fp32_residual"]),
        (StreamPlan("online", Factors(c=(1.0, 1.0, 2.0**-22))), True, ["fp32_residual"]),
        # what the weights carry counts
        (StreamPlan("weights", baked=Factors(c=(2.0**-8,))), False, ["online c=1/16"]),
        # with stock eps a smaller c changes the function
        (StreamPlan("online", eps="stock"), False, ["online c=1/16"]),
        (StreamPlan("online", Factors(c=(0.25,)), eps="stock"), True, ["online c=1/16", "fp32_residual"]),
        (StreamPlan("online", UNIFORM, eps="stock"), True, ["fp32_residual"]),
    ],
)
def test_the_ladder_takes_no_factor_that_its_own_report_would_warn_of(
    plan: StreamPlan, manageable: bool, labels: list[str]
) -> None:
    rung, found = Rung(plan, managed=manageable), []
    evidence = Evidence(stream=("layer.0",))
    while (above := next_rung(rung, evidence, manageable=manageable, path="builtin", disproved=set())) is not None:
        rung = above
        found.append(rung.label)
        assert rung.dtype is not None or not remarks_on(rung.plan, limited=not rung.plan.fp32_stream), rung.label
    assert found[:-1] == labels
    assert rung.dtype == torch.float32


@pytest.mark.parametrize(
    ("start", "labels"),
    [
        (Factors(), ["online s_ffn=1/64", "online s_ffn=1/4096", "fp32_residual s_ffn=1/4096"]),
        # the other side's s is its own affair
        (Factors(s_attn=(2.0**-13,)), ["online s_attn=1/8192 s_ffn=1/64", "online s_attn=1/8192 s_ffn=1/4096"]),
    ],
)
def test_the_ladder_shrinks_s_to_its_floor_on_the_side_that_was_out_of_range(start: Factors, labels: list[str]) -> None:
    rung, found = Rung(StreamPlan("online", start), managed=True), []
    for _ in labels:
        above = next_rung(rung, Evidence(ffn=True), manageable=True, path="builtin", disproved=set())
        assert above is not None
        rung = above
        found.append(rung.label)
    assert found == labels


def test_what_the_managed_forward_cannot_run_goes_to_fp32() -> None:
    """A control map keeps the call on the native path: smaller factors first, and s is out of reach."""
    prompt = conditioning("burst", moss_control_map=torch.zeros(1, 1, 2, 2))
    reference = sample(stock("burst", "fp32"), prompt)
    model = fixed(stock("burst", "fp16"), fix="online", c=1 / 16)
    out = sample(model, prompt)
    found = report(model)
    assert found["compute_dtype"] == "fp32" and found["rescues"][-1]["rung"].endswith("in fp32")
    assert rel(out, reference) < 1e-5


@pytest.mark.parametrize("name", ["hot", "burst"])
def test_a_rescued_run_is_the_run_started_on_that_rung(make: Any, name: str) -> None:
    """From the step of the rescue on, bit for bit."""
    prompt = conditioning(name)
    model = fixed(make(name, "fp16"), fix="none")
    rescued = sample(model, prompt, steps=3)
    handle_factors = report(model)["factors"]
    same = {key: handle_factors[key] for key in ("c", "s_attn", "s_ffn")}
    engine = {"engine": "managed"} if report(model)["engine"] == "managed" and make is stock else {}
    on_that_rung = fixed(make(name, "fp16"), fix="online", **same, **engine)
    assert torch.equal(sample(on_that_rung, prompt, steps=3), rescued)
    assert report(on_that_rung)["rescues"] == []


def overflow_from(step: int, sigmas: torch.Tensor) -> Any:
    """A block patch that is well-behaved until `step`, and from then on takes the stream out of fp16's range."""

    def patch(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        now = args["transformer_options"]["sigmas"][0]
        if now <= sigmas[step] + 1e-6 and out["img"].dtype == torch.float16:
            return {**out, "img": torch.full_like(out["img"], torch.inf)}
        return out

    return patch


def test_a_run_rescued_midway_goes_on_as_a_run_on_that_rung(make: Any) -> None:
    """Step 3 of 4 overflows whatever c is: the rest of the run equals an fp32-stream run from its latent on."""
    prompt = conditioning("cool")
    model = fixed(make("cool", "fp16"), fix="online", c=1 / 16, self_check=False)
    sigmas = sigmas_of(model, 4)
    patched = model.clone()
    patched.set_model_patch_replace(overflow_from(2, sigmas), "dit", "single_block", 2)
    eater = LatentEater()
    out = sample(patched, prompt, steps=4, callback=eater)
    found = report(patched)
    assert [r["step"] for r in found["rescues"]] == [3]
    assert found["mode"] == "fp32_residual", found["rescues"]
    wide = fixed(make("cool", "fp16"), fix="fp32_residual")
    rest = euler_from(wide, eater.latents[2], sigmas[2:], prompt)
    # the restart's x / sigma * sigma may be off by one rounding
    assert rel(rest, out) < 1e-6
    assert rel(out, sample(make("cool", "fp32"), prompt, steps=4)) < FP16_ERROR


def test_each_run_starts_where_it_was_asked_to(make: Any) -> None:
    prompt = conditioning("hot")
    model = fixed(make("hot", "fp16"), fix="none")
    first = sample(model, prompt)
    second = sample(model, prompt)
    assert torch.equal(first, second)
    assert len(report(model)["rescues"]) == 1


# ---- calls of every shape ---------------------------------------------------------------------------------------


def test_a_rescue_works_under_guidance_and_skipped_layers(make: Any) -> None:
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT, SkipLayerGuidanceDiTSimple

    positive, negative = conditioning("hot"), conditioning("hot", "case1")
    slg = {"double_layers": "", "single_layers": "1", "start_percent": 0.0, "end_percent": 1.0}
    for node, options in ((SkipLayerGuidanceDiTSimple, {}), (SkipLayerGuidanceDiT, {"scale": 1.0})):
        reference = sample(node.execute(make("hot", "fp32"), **slg, **options)[0], positive, negative=negative, cfg=3.0)
        model = node.execute(fixed(make("hot", "fp16"), fix="none"), **slg, **options)[0]
        out = sample(model, positive, negative=negative, cfg=3.0)
        assert rel(out, reference) < 4 * FP16_ERROR, node  # the guidance amplifies what fp16 rounds
        assert len(report(model)["rescues"]) == 1


@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2m", "uni_pc", "er_sde", "dpm_2", "euler_ancestral"])
def test_samplers_that_call_more_than_once_a_step(sampler: str) -> None:
    prompt = conditioning("hot")
    reference = sample(load("hot", "fp32"), prompt, sampler=sampler)
    model = fixed(load("hot", "fp16"), fix="none")
    out = sample(model, prompt, sampler=sampler)
    assert rel(out, reference) < 2 * FP16_ERROR
    assert len(report(model)["rescues"]) == 1


def test_one_bad_item_of_a_batch_has_the_batch_computed_again(make: Any) -> None:
    """Only one latent of the batch is large enough to overflow: the batch is computed again, the others' way too."""
    prompt = conditioning("cool")
    latent = torch.zeros(3, 128, 6, 4)
    model = fixed(make("cool", "fp16"), fix="online", c=1.0, self_check=False)

    def patch(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        if out["img"].dtype == torch.float16:
            out["img"][1] = torch.inf
        return out

    model = model.clone()
    model.set_model_patch_replace(patch, "dit", "single_block", 1)
    out = sample(model, prompt, latent=latent)
    assert out.isfinite().all()
    assert len(report(model)["rescues"]) == 1
    reference = sample(make("cool", "fp32"), prompt, latent=latent)
    for one, expected in zip(out, reference, strict=True):
        assert rel(one, expected) < FP16_ERROR


# ---- faults that no rung helps ----------------------------------------------------------------------------------


def test_a_nan_latent_is_the_inputs_fault(make: Any, notices: list[dict[str, Any]]) -> None:
    latent = torch.zeros(1, 128, 6, 4)
    latent[0, 0, 0, 0] = float("nan")
    model = fixed(make("cool", "fp16"))
    calls: list[int] = []
    model.add_wrapper_with_key(
        "diffusion_model", "count", lambda executor, *a, **k: calls.append(1) or executor(*a, **k)
    )
    out = sample(model, conditioning("cool"), steps=3, latent=latent)
    found = report(model)
    assert not out.isfinite().all()
    assert len(calls) == 3  # nothing was computed again
    assert found["rescues"] == [] and found["mode"] == "online"
    assert any("latent held NaN" in sentence for sentence in found["warnings"])
    assert [n["kind"] for n in notices] == ["input_fault", "black_image"]
    assert found["outcome"] == "broken" and found["verdict"]["values"]["cause"]["key"] == "cause_input"
    assert [m["key"] for m in found["messages"]] == ["black_image", "input_fault_latent"]
    assert found["remedy"]["key"] == "remedy_input" and found["remedy"]["action"] is None
    assert found["summary"]["peak"] is None and found["summary"]["non_finite"] > 0


@pytest.mark.parametrize("guard", ["rescue", "report"])
@pytest.mark.parametrize("first", [2, 3])
def test_nan_made_between_two_calls_is_not_blamed_on_the_nodes_before(make: Any, first: int, guard: str) -> None:
    """A post-CFG function breaks what the model gave: in mid-run, or after the last call."""
    step: list[int] = []

    def post_cfg(args: dict[str, Any]) -> torch.Tensor:
        step.append(1)
        return args["denoised"] * (float("nan") if len(step) >= first else 1.0)

    whole = fixed(make("cool", "fp16"), guard=guard)
    model = whole.clone()
    model.set_model_sampler_post_cfg_function(post_cfg)
    assert not sample(model, conditioning("cool"), steps=3).isfinite().all()
    found = report(model)
    assert [m["key"] for m in found["messages"]] == ["black_image", "input_fault_between"]
    assert found["messages"][1]["values"] == {"call": first} and found["rescues"] == []
    assert found["verdict"]["values"]["cause"]["key"] == "cause_between"
    assert found["remedy"]["key"] == "remedy_between"
    assert sample(whole, conditioning("cool"), steps=3).isfinite().all()  # what the remedy says, done
    assert report(whole)["outcome"] == "ok"


def test_nan_made_between_two_calls_in_a_batch(make: Any) -> None:
    def post_cfg(args: dict[str, Any]) -> torch.Tensor:
        out = args["denoised"].clone()
        out[0] = float("nan")
        return out

    model = fixed(make("cool", "fp16"))
    model.set_model_sampler_post_cfg_function(post_cfg)
    out = sample(model, conditioning("cool"), steps=3, batch=2)
    assert not out[0].isfinite().all() and out[1].isfinite().all()
    assert [m["key"] for m in report(model)["messages"]] == ["some_images_broken", "input_fault_between_some"]


@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_a_nan_latent_in_a_batch_leaves_the_others_their_rescue(
    make: Any, notices: list[dict[str, Any]], cfg: float
) -> None:
    prompt = conditioning("hot")
    whole = torch.zeros(3, 128, 6, 4)
    latent = whole.clone()
    latent[1, 0, 0, 0] = float("nan")
    model = fixed(make("hot", "fp16"), fix="none")
    out = sample(model, prompt, latent=latent, cfg=cfg)
    reference = sample(make("hot", "fp32"), prompt, latent=whole, cfg=cfg)
    assert not out[1].isfinite().any()
    for item in (0, 2):
        assert rel(out[item], reference[item]) < FP16_ERROR
    found = report(model)
    assert len(found["rescues"]) == 1
    assert any("some images held NaN" in said and "other images" in said for said in found["warnings"])
    assert found["summary"]["peak"] is not None and found["summary"]["non_finite"] == 0
    assert sum("other images" in n["text"] for n in notices) == 1
    assert found["messages"][0]["key"] == "some_images_broken"


def test_a_nan_prompt_is_the_inputs_fault(make: Any) -> None:
    prompt = conditioning("cool")
    prompt[0][0] = prompt[0][0].clone()
    prompt[0][0][0, 1, 2] = float("nan")
    model = fixed(make("cool", "fp16"))
    sample(model, prompt, steps=2)
    assert report(model)["rescues"] == []
    assert any("conditioning text held NaN" in sentence for sentence in report(model)["warnings"])


def calls_of(model: Any) -> list[int]:
    """A list that grows by each call of the MODEL's diffusion model."""
    calls: list[int] = []
    model.add_wrapper_with_key(
        "diffusion_model", "count", lambda executor, *a, **k: calls.append(1) or executor(*a, **k)
    )
    return calls


def test_a_broken_model_is_climbed_once_and_named(make: Any) -> None:
    """NaN out of a patch: no rung helps, and the calls after the first do not climb again."""
    model = make("cool", "fp16")
    model.set_model_patch_replace(lambda args, extra: {"img": args["img"] * math.nan}, "dit", "single_block", 1)
    model = fixed(model)
    calls = calls_of(model)
    sample(model, conditioning("cool"), steps=4)
    first_climb = len(calls) - 3
    assert 3 < first_climb <= 24
    found = report(model)
    assert [m["key"] for m in found["messages"]] == ["black_image", "model_broken"]
    assert found["remedy"]["key"] == "remedy_model" and found["verdict"]["values"]["cause"]["key"] == "cause_model"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_broken_weights_are_named(value: float, make: Any) -> None:
    """When the output is NaN nothing is climbed. A class that clips makes numbers of infinity, until a rung in fp32."""
    model = make("cool", "fp16")
    path = "diffusion_model.layers.1.proj.ffn_down.weight"
    broken = model.get_model_object(path).detach().clone()
    broken[0, 0] = value
    model.add_object_patch(path, torch.nn.Parameter(broken, False))
    model = fixed(model)
    calls = calls_of(model)
    sample(model, conditioning("cool"), steps=4)
    found = report(model)
    assert [m["key"] for m in found["messages"]] == ["black_image", "weights_broken"]
    assert found["messages"][1]["values"] == {"weights": ["layers.1.proj.ffn_down.weight"], "dtype": "fp16"}
    assert found["remedy"]["key"] == "remedy_weights" and found["verdict"]["values"]["cause"]["key"] == "cause_weights"
    assert found["rescues"] == []
    if math.isnan(value):
        assert len(calls) <= 4 + 3  # with what proves the fold on a class of ComfyUI's own


def test_weights_that_take_no_part_are_not_to_blame(make: Any) -> None:
    """A layer that the class leaves as it came from the system's memory."""
    model = fixed(make("hot", "fp16"), fix="none")
    tree = model.model.diffusion_model
    tree.add_module("control_adapter", torch.nn.Linear(2, 2))
    tree.control_adapter.weight = torch.nn.Parameter(torch.full((2, 2), math.nan), False)
    try:
        out = sample(model, conditioning("hot"), steps=2)
    finally:
        del tree.control_adapter
    assert out.isfinite().all() and report(model)["rescues"] and report(model)["outcome"] == "rescued"


def test_only_weights_that_can_be_looked_at_are(make: Any) -> None:
    """Not those without values or in 8 bits; the name is the model's, also where blocks are compiled one by one."""
    tree = make("cool", "fp16").model.diffusion_model
    block = tree.layers[1]
    block.norm1.weight = torch.nn.Parameter(torch.empty(64, device="meta"), False)
    block.norm2.weight = torch.nn.Parameter(torch.full((64,), math.nan).to(torch.float8_e5m2), False)
    assert broken_weights(tree, OFFICIAL) == {}
    block.norm2.weight = torch.nn.Parameter(torch.full((64,), math.nan), False)
    compiled = torch.compile(block)
    tree.layers[1] = compiled
    assert list(broken_weights(tree, OFFICIAL)) == ["layers.1.norm2.weight"]


# ---- off and report ---------------------------------------------------------------------------------------------


def test_guard_off_computes_nothing_again_and_reports_from_the_counts(make: Any, notices: list[dict[str, Any]]) -> None:
    model = fixed(make("hot", "fp16"), fix="none", guard="off")
    out = sample(model, conditioning("hot"), steps=2)
    found = report(model)
    assert found["rescues"] == [] and found["model_calls"] == 2
    assert found["summary"]["saturated"] + found["summary"]["non_finite"] > 0
    assert bool(out.isfinite().all()) == (found["summary"]["non_finite"] == 0)
    broken = not bool(out.isfinite().all())
    assert found["outcome"] == ("broken" if broken else "saturated")
    (notice,) = notices  # at the end, from the counts: nothing was looked at before
    assert notice["kind"] == ("black_image" if broken else "image_affected") and notice["sticky"] == broken


def test_report_says_so_once_and_keeps_the_result(make: Any, notices: list[dict[str, Any]]) -> None:
    prompt = conditioning("hot")
    off = sample(fixed(make("hot", "fp16"), fix="none", guard="off"), prompt, steps=2)
    notices.clear()
    model = fixed(make("hot", "fp16"), fix="none", guard="report")
    out = sample(model, prompt, steps=2)
    assert torch.allclose(out, off, rtol=0.0, atol=0.0, equal_nan=True)
    found = report(model)
    assert found["rescues"] == []
    assert any("guard is set to report" in sentence for sentence in found["warnings"])
    assert sum("guard is set to report" in n["text"] for n in notices) == 1


def test_a_black_image_has_a_toast_of_its_own_that_stays_and_says_what_to_do(
    make: Any, notices: list[dict[str, Any]]
) -> None:
    model = fixed(make("hot", "fp16"), fix="none", guard="report", node="MOSS FP16 Fix")
    out = sample(model, conditioning("hot"), steps=2)
    broken = not bool(out.isfinite().all())  # a class that clips gives a finite, wrong picture
    first, last = notices
    assert first["kind"] == "out_of_range" and first["severity"] == "warn" and not first["sticky"]
    assert (last["kind"], last["severity"]) == (("black_image", "error") if broken else ("image_affected", "warn"))
    assert last["sticky"] == broken
    remedy = "Set fix = auto on MOSS FP16 Fix."
    assert first["text"].endswith(remedy) and last["text"].endswith(remedy)
    found = report(model)
    assert found["remedy"]["text"] == remedy
    assert found["remedy"]["action"] == {"node": "source", "input": "fix", "value": "auto"}
    assert found["messages"][0]["text"] == last["text"] == found["warnings"][0]
    assert [m["key"] for m in found["messages"]][1:] == ["out_of_range"]


REMEDIES = {
    "none": ({"fix": "none"}, "fix = auto", ("fix", "auto")),
    "c too large": ({"fix": "online", "c": 1.0}, "c = 1/16", None),
    "the fix is on, the guard only reports": (
        {"fix": "online", "c": 1.0, "guard": "report"}, "guard = rescue", ("guard", "rescue"),
    ),
    "clamp": ({"fix": "online", "c": 1.0, "clamp": True}, "clamp off", None),
}  # fmt: skip


@pytest.mark.parametrize("case", REMEDIES)
def test_the_remedy_is_what_would_have_kept_the_run_in_range(make: Any, case: str) -> None:
    options, said, action = REMEDIES[case]
    prompt = conditioning("hot")
    model = fixed(make("hot", "fp16"), **options)
    sample(model, prompt, steps=2)
    found = report(model)
    kept = "guard" in options or "clamp" in options
    assert found["outcome"] in (("saturated", "broken") if kept else ("rescued",))
    assert said in found["remedy"]["text"]
    given = found["remedy"]["action"]
    assert (given and (given["input"], given["value"])) == action


STARTS = [
    ("hot", {"fix": "none"}, ["fix = auto"]),
    ("hot", {"fix": "online", "c": "1/2"}, ["c = 1/32"]),
    ("hot", {"fix": "none", "engine": "native"}, ["fix = auto"]),
    ("burst", {"fix": "online", "c": "1/256"}, ["s_ffn = 1/64"]),
    ("burst", {"fix": "none"}, None),
    ("burst", {"fix": "fp32_residual"}, ["s_ffn = 1/64"]),
]


@pytest.mark.parametrize(("name", "start", "wanted"), STARTS)
def test_the_settings_that_a_rescue_names_need_no_rescue(
    make: Any, name: str, start: dict[str, str], wanted: list[str] | None
) -> None:
    """Typed into the widgets of the node, they start the next run on the rung that this one ended on."""
    prompt = conditioning(name)
    if start.get("engine") == "native" and make is load:
        start = {**start, "engine": "auto"}  # the built-in class has no other forward
    model = apply_fix(make(name, "fp16"), read_options(start), node="MOSS FP16 Fix", node_id="1")
    sample(model, prompt, steps=2)
    found = report(model)
    assert found["outcome"] == "rescued" and found["messages"] == []
    assert found["rescues"][0]["reason_key"].startswith("reason_")
    settings = found["remedy"]["values"]["settings"]
    assert settings == (wanted or settings)
    action = found["remedy"]["action"]
    assert action is None or [f"{action['input']} = {action['value']}"] == settings
    typed = dict(setting.split(" = ") for setting in settings)
    again = apply_fix(make(name, "fp16"), read_options({**start, **typed}), node="MOSS FP16 Fix", node_id="1")
    sample(again, prompt, steps=2)
    assert report(again)["outcome"] == "ok" and report(again)["remedy"] is None
    assert report(again)["factors"] == found["factors"] and report(again)["mode"] == found["mode"]


def test_a_healthy_run_without_a_fix_is_no_fault(make: Any) -> None:
    model = fixed(make("cool", "fp16"), fix="none")
    sample(model, conditioning("cool"), steps=2)
    found = report(model)
    assert found["outcome"] == "ok" and found["warnings"] == []
    assert [m["key"] for m in found["messages"]] == ["no_fix_needed"]


def test_the_guard_sees_saturation_without_the_panels_counters(make: Any) -> None:
    """A class that clips shows no NaN: without counting, a saturated stream would pass for a good one."""
    prompt = conditioning("hot")
    reference = sample(make("hot", "fp32"), prompt)
    model = fixed(make("hot", "fp16"), fix="none", counters=False)
    assert rel(sample(model, prompt), reference) < FP16_ERROR
    assert len(report(model)["rescues"]) == 1
    assert report(model)["blocks"] == []


def test_the_guard_sees_fp16_that_was_set_after_the_fix(make: Any) -> None:
    """A node downstream turns a MODEL to fp16 whose fix was made for fp32: the guard still sees its saturation."""
    prompt = conditioning("hot")
    reference = sample(make("hot", "fp32"), prompt)
    model = fixed(make("hot", "fp32")).clone()
    assert report_mode(model) == "none"
    model.set_model_compute_dtype(torch.float16)
    out = sample(model, prompt)
    assert rel(out, reference) < FP16_ERROR
    assert report(model)["compute_dtype"] == "fp16" and len(report(model)["rescues"]) == 1


def report_mode(model: Any) -> str:
    from moss_fp16_pack.nodes.state import fix_of

    fix = fix_of(model)
    assert fix is not None
    return fix.first_rung.plan.mode


# ---- one look a call --------------------------------------------------------------------------------------------


class Looks(TorchDispatchMode):
    """Counts the operations that would wait for a device, by name."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "item", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WAITS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def looks_of_a_call(model: Any, prompt: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """The waits inside each model call of a run, as on a device (where counting takes no branches)."""
    monkeypatch.setattr(counters, "_cheap_branch", lambda x: False)
    found: list[Counter[str]] = []

    def look(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with Looks() as looks:
            out = executor(*args, **kwargs)
        found.append(looks.seen)
        return out

    # outermost: the APPLY_MODEL wrapper of the fix runs inside this one
    model.wrappers["apply_model"] = {"look": [look], **model.wrappers["apply_model"]}
    sample(model, prompt, steps=1)  # with this the self-check is behind it
    found.clear()
    sample(model, prompt, steps=3)
    return found


@pytest.mark.parametrize("options", [{}, {"guard": "report"}, {"guard": "off"}, {"fix": "fp32_residual"}])
def test_one_wait_a_call(make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = conditioning("hot")
    bare = make("hot", "fp32").clone()
    bare.wrappers["apply_model"] = {}
    own = looks_of_a_call(bare, prompt, monkeypatch)[-1]
    model = fixed(make("hot", "fp16"), **options)
    looks = looks_of_a_call(model, prompt, monkeypatch)
    expected = 0 if options.get("guard") == "off" else 1
    for seen in looks:
        assert sum((seen - own).values()) == expected, seen


def test_a_clamped_stream_is_not_rescued() -> None:
    """Limiting the stream is what the user asked for: only an output that is not finite is a fault then."""
    model = fixed(load("hot", "fp16"), fix="none", clamp=True, guard="rescue")
    out = sample(model, conditioning("hot"), steps=2)
    found = report(model)
    assert out.isfinite().all() and found["rescues"] == []
    assert found["mode"] == "none" and found["summary"]["clamped"] > 0


#: The kinds in which the watch takes a value that is not finite for the first one of a call, and what it concludes.
FIRST = {
    Kind.Q: Evidence(),
    Kind.FFN_UP_GATE: Evidence(),
    Kind.O: Evidence(attn=True),
    Kind.FFN_DOWN: Evidence(ffn=True),
}


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_the_writer_that_overflowed_first_is_named_by_every_kind_that_a_forward_shows(kind: Kind) -> None:
    watch = WriterWatch()
    assert watch.wants_inner and not watch.saw_anything()
    watch.inner(kind, 0, torch.tensor([1.0, -65503.0]), 1.0)
    assert watch.saw_anything() and watch.first is None
    # Saturated is out of range for what a block adds to the stream; what is between two of its modules may be large.
    watch.inner(kind, 1, torch.tensor([1.0, -65504.0]), 1.0)
    assert watch.first == (kind if kind in (Kind.O, Kind.FFN_DOWN) else None)
    for value in (float("inf"), float("nan")):
        watch.begin()
        assert not watch.saw_anything()
        watch.inner(kind, 1, torch.tensor([1.0, value]), 1.0)
        assert watch.first == (kind if kind in FIRST else None)
        # what comes after the first one is NaN because of it
        for later in (Kind.O, Kind.FFN_DOWN):
            watch.inner(later, 2, torch.tensor([float("nan")]), 1.0)
        assert evidence_of([], watch) == FIRST.get(kind, Evidence(attn=True))


def test_a_remedy_has_a_button_only_where_changing_one_input_is_all_it_takes() -> None:
    def action(factors: Factors, **asked: Any) -> Any:
        fix = fix_of(fixed(load("cool", "fp16"), fix="online", **asked))
        assert fix is not None
        return remedy._saved_steps(fix, Rung(StreamPlan("online", factors), managed=True)).action

    smaller = Factors(c=(1 / 256,))
    assert action(smaller) == ("c", "1/256")
    assert action(Factors(c=(1 / 256,), s_ffn=(1 / 64,))) is None
    # a factor that was given may come over a link, which a typed one does not replace
    assert action(smaller, c=1 / 16) is None
