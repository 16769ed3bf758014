"""Every number an independent implementation gave for the golden models, held to."""

from __future__ import annotations

import copy

import golden
import pytest
import torch
from golden import SKIP_1, UNIFORM, Case, counted, relative, velocity
from repo import DATA

from fold.report.counters import Counters, site_names
from fold.scaling.factors import Factors
from fold.scaling.plan import StreamPlan, plan_for

FP32_TOLERANCE = 2e-6
each_case = pytest.mark.parametrize("case", golden.cases(), ids=str)
FOLDED = [path.stem for path in sorted(DATA.glob("*_fp16fix*.safetensors"))]
each_folded = pytest.mark.parametrize("name", FOLDED)
# The originals are bf16 and the factors powers of two, so storing a fold costs only what falls into fp16's subnormals.
STORAGE = 1e-6


@each_case
def test_fp32_is_the_reference(case: Case) -> None:
    assert relative(velocity(case), case.expected["none"]) <= FP32_TOLERANCE


@each_case
def test_fp32_with_a_skipped_block_is_the_reference(case: Case) -> None:
    assert relative(velocity(case, replace=SKIP_1), case.expected["none_skip1"]) <= FP32_TOLERANCE


@each_case
def test_stock_eps_is_the_reference(case: Case) -> None:
    plan = StreamPlan("online", UNIFORM, eps="stock")
    assert relative(velocity(case, plan), case.expected["weights_stock_eps"]) <= FP32_TOLERANCE


@each_case
def test_clamp_is_the_reference_and_counts_the_same_elements(case: Case) -> None:
    plan = StreamPlan("fp32_residual", clamp=4096.0)
    assert relative(velocity(case, plan), case.expected["clamp4096"]) <= FP32_TOLERANCE
    rows = counted(case, plan)
    assert {name: rows[f"layer.{name}"].clamped for name in "0123"} == case.scalars["clamp4096_counts"]


@each_case
@pytest.mark.parametrize("online", [False, True], ids=["none", "online"])
def test_saturation_peaks_and_counts(case: Case, online: bool) -> None:
    plan = StreamPlan("online", golden.factors(case.model)) if online else StreamPlan()
    rows = counted(case, plan)
    wanted = case.scalars["online_saturation" if online else "saturation"]
    assert rows.keys() == wanted.keys()
    for name, row in rows.items():
        assert row.max_abs == pytest.approx(wanted[name]["maxabs"], rel=1e-5), name
        assert row.over == wanted[name]["over"], name
        assert (row.clamped, row.non_finite) == (0, 0)


@each_case
@pytest.mark.parametrize("skip", [None, SKIP_1], ids=["whole", "skip1"])
@pytest.mark.parametrize("kind", ["model", "per_block", "uniform"])
def test_fp32_online_is_bit_equal(case: Case, kind: str, skip: object) -> None:
    factors = {"model": golden.factors(case.model), "per_block": golden.factors("per_block"), "uniform": UNIFORM}[kind]
    plain = velocity(case, replace=SKIP_1 if skip else None)
    assert torch.equal(velocity(case, StreamPlan("online", factors), replace=SKIP_1 if skip else None), plain)


@each_case
def test_fp16_without_a_fix_overflows_where_it_should(case: Case) -> None:
    finite = bool(velocity(case, dtype=torch.float16).isfinite().all())
    assert finite == case.scalars["fp16"]["none"]["finite"]


def fp16_plan(case: Case, kind: str) -> StreamPlan:
    """The plan behind one of expected.json's fp16 figures."""
    match kind:
        case "online_per_block" if case.model == "burst":
            # per_block's own range is too small for burst: its shape, at burst's magnitude
            shape, own = golden.factors("per_block"), golden.factors("burst")
            c = tuple(16 * value * own.c[0] for value in shape.c)
            return StreamPlan("online", Factors(c, shape.s_attn, tuple(value * own.s_ffn[0] for value in shape.s_ffn)))
        case "online_per_block":
            return StreamPlan("online", golden.factors("per_block"))
        case "online":
            return StreamPlan("online", golden.factors(case.model))
        case _:
            return StreamPlan("fp32_residual")


@each_case
@pytest.mark.parametrize("kind", ["online", "online_per_block", "fp32_residual"])
def test_fp16_is_finite_where_the_reference_is_and_no_worse_than_plain_rounding(case: Case, kind: str) -> None:
    wanted, plan = case.scalars["fp16"][kind], fp16_plan(case, kind)
    value = velocity(case, plan, torch.float16)
    assert bool(value.isfinite().all()) == wanted["finite"]
    if wanted["finite"]:
        # The whole norm hangs on a few tokens, where luck decides (see `rounding_error`): seen up to 2.5 times.
        assert relative(value, velocity(case)) <= 4 * wanted["rel"]
        assert golden.rounding_error(case, plan, torch.float16) <= golden.fp16_bound(case)


@each_case
def test_the_fp16_bound_notices_one_writer_that_is_off_by_a_hundredth(case: Case) -> None:
    plan = StreamPlan("online", golden.factors(case.model))
    off = copy.deepcopy(golden.model(case.model, torch.float16))
    with torch.no_grad():
        off.get_submodule(golden.names().video_embedder.path).weight.mul_(1.01)
    assert golden.rounding_error(case, plan, torch.float16, weights=off) > golden.fp16_bound(case)


@each_case
def test_bf16_is_as_exact_as_the_reference_and_the_fold_leaves_it_alone(case: Case) -> None:
    plain, exact = velocity(case, dtype=torch.bfloat16), velocity(case)
    # The median over tokens: where a massive channel cancels to nothing, which sign a token ends up with is luck.
    per_token = (plain - exact).norm(dim=1) / exact.norm(dim=1)
    assert per_token.median() <= 1.25 * case.scalars["fp16"]["bf16_none"]["rel"]
    assert torch.equal(velocity(case, StreamPlan("online", golden.factors(case.model)), torch.bfloat16), plain)


@pytest.mark.parametrize("case", golden.cases_of("cool"), ids=str)
def test_fp16_online_changes_nothing_but_subnormals(case: Case) -> None:
    folded = velocity(case, StreamPlan("online", Factors((1024.0,), (64.0,), (64.0,))), torch.float16)
    assert torch.equal(folded, velocity(case, dtype=torch.float16))


@each_folded
@pytest.mark.parametrize("unfold", [True, False], ids=["auto", "keep"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_a_folded_file_is_its_original(name: str, unfold: bool, half: bool) -> None:
    source = name.split("_")[0]
    dtype = torch.float16 if half else torch.float32
    plan = plan_for("auto", half=half, stored=golden.stored(name, unfold), eps="exact")
    for case in golden.cases_of(source):
        if half:
            error = golden.rounding_error(case, plan, dtype, weights=name, unfold=unfold)
            assert error <= golden.fp16_bound(case) + STORAGE, str(case)
        else:
            assert relative(velocity(case, plan, dtype, weights=name, unfold=unfold), velocity(case)) <= STORAGE


@each_folded
def test_a_folded_file_kept_as_it_is_runs_under_stock_eps(name: str) -> None:
    source = name.split("_")[0]
    plan = plan_for("auto", half=False, stored=golden.stored(name, False))
    assert (plan.mode, plan.eps, plan.factors.identity) == ("weights", "stock", True)
    for case in golden.cases_of(source):
        assert relative(velocity(case, plan, weights=name, unfold=False), case.expected["weights_stock_eps"]) <= STORAGE


@pytest.mark.parametrize("name", [name for name in FOLDED if name.endswith("_bf16")])
def test_a_folded_bf16_file_is_bit_equal_to_its_original(name: str) -> None:
    plan = plan_for("auto", half=False, stored=golden.stored(name, True))
    for case in golden.cases_of(name.split("_")[0]):
        assert torch.equal(velocity(case, plan, weights=name), velocity(case))


@pytest.mark.parametrize("name", ["hot_fused_qkv", "hot_prefixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_other_layouts_are_bit_equal(name: str, dtype: torch.dtype) -> None:
    with golden.opened(name) as checkpoint:
        assert checkpoint.fused == (name == "hot_fused_qkv")
    plan = StreamPlan("online", UNIFORM)
    for case in golden.cases_of("hot"):
        other, plain = (velocity(case, plan, dtype, weights=source) for source in (name, "hot"))
        assert torch.equal(other, plain), str(case)


def test_burst_without_s_is_wrong_and_the_counts_show_it() -> None:
    case = golden.cases_of("burst")[0]
    plan = StreamPlan("online", Factors((golden.factors("burst").c[0],)))
    arch = golden.model("burst", torch.float16).arch
    counters = Counters(site_names(arch.text_blocks, arch.depth))
    value = velocity(case, plan, torch.float16, observer=counters)
    counters.commit()
    bad = sum(row.non_finite + row.saturated for row in counters.read())
    assert not relative(value, velocity(case)) <= 0.1
    assert bad > 0
