"""Stream plans: what is multiplied by what, and which plan is chosen when."""

from __future__ import annotations

import golden
import pytest
import torch
from golden import UNIFORM, velocity
from hypothesis import given, settings
from hypothesis import strategies as st

from fold.errors import MossError
from fold.model.forward import skip_block
from fold.scaling.factors import DEFAULT, IDENTITY, Factors, GivenFactors
from fold.scaling.plan import BlockScale, StreamPlan, plan_for
from fold.scaling.record import NO_FOLD, FoldRecord, StoredFold

RECORD = FoldRecord(1 / 32, 1.0, 0.5)
RECORDED = Factors((1 / 32,), (1.0,), (0.5,))


def test_block_scales_of_a_per_block_plan() -> None:
    plan = StreamPlan("online", Factors((1 / 16, 1 / 32, 1 / 32), (1.0, 0.5, 1.0), (0.25,)))
    assert plan.blocks(3) == (
        BlockScale(1.0, 1 / 16, 1 / 4, 1.0, 0.25, 16.0),
        BlockScale(0.5, 1 / 16, 1 / 8, 0.5, 0.25, 32.0),
        BlockScale(1.0, 1 / 32, 1 / 8, 1.0, 0.25, 32.0),
    )
    assert (plan.entry, plan.exit_unscale(3)) == (1 / 16, 32.0)


def test_stock_eps_leaves_the_norms_alone() -> None:
    plan = StreamPlan("online", UNIFORM, eps="stock")
    assert {scale.unscale for scale in plan.blocks(4)} == {1.0}
    assert plan.exit_unscale(4) == 1.0


def test_a_fold_in_the_weights_counts_towards_the_exact_eps() -> None:
    plan = StreamPlan("online", Factors((0.5,)), baked=Factors((1 / 16,)))
    assert plan.blocks(1)[0].unscale == 32.0
    assert StreamPlan("weights", baked=Factors((1 / 16,))).blocks(1)[0].unscale == 16.0


@pytest.mark.parametrize(
    ("plan", "local"),
    [
        (StreamPlan(), False),
        (StreamPlan("online", UNIFORM), False),
        (StreamPlan("online", Factors((0.5, 0.5))), False),
        (StreamPlan("online", Factors((0.5, 0.25))), True),
        (StreamPlan("online", Factors(s_ffn=(0.5,))), True),
        (StreamPlan("online", UNIFORM, clamp=10.0), True),
        (StreamPlan("fp32_residual"), True),
    ],
)
def test_what_only_the_managed_path_can_do(plan: StreamPlan, local: bool) -> None:
    assert plan.block_local == local


def test_halved_keeps_everything_but_c() -> None:
    plan = StreamPlan("online", Factors((0.5, 0.25), (0.5, 1.0)), eps="stock", clamp=3.0)
    assert plan.halved() == StreamPlan("online", Factors((0.25, 0.125), (0.5, 1.0)), eps="stock", clamp=3.0)


def test_a_list_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(MossError, match="c has 3 values, but this model has 4 blocks"):
        StreamPlan("online", Factors((0.5, 0.5, 0.5))).blocks(4)


@pytest.mark.parametrize("clamp", [0.0, -1.0, float("inf"), float("nan")])
def test_a_senseless_clamp_is_refused(clamp: float) -> None:
    with pytest.raises(MossError, match="clamp must be"):
        StreamPlan(clamp=clamp)


def test_a_per_block_fold_cannot_be_in_the_weights() -> None:
    with pytest.raises(MossError, match="uniform"):
        StreamPlan(baked=Factors((0.5, 0.25)))


# (fix, half, stored, factors) -> (mode, run-time factors, baked, eps)
UNFOLDED, KEPT = StoredFold(RECORD, unfolded=True), StoredFold(RECORD)
TABLE = [
    ("auto", True, NO_FOLD, None, "online", DEFAULT, IDENTITY, "exact"),
    ("auto", False, NO_FOLD, None, "none", IDENTITY, IDENTITY, "exact"),
    ("auto", False, NO_FOLD, UNIFORM, "online", UNIFORM, IDENTITY, "exact"),
    ("auto", True, UNFOLDED, None, "online", RECORDED, IDENTITY, "exact"),
    ("auto", False, UNFOLDED, None, "online", RECORDED, IDENTITY, "exact"),
    ("auto", True, KEPT, None, "weights", IDENTITY, RECORDED, "stock"),
    ("auto", True, KEPT, UNIFORM, "online", UNIFORM, RECORDED, "stock"),
    ("none", True, NO_FOLD, None, "none", IDENTITY, IDENTITY, "exact"),
    ("none", True, UNFOLDED, None, "none", IDENTITY, IDENTITY, "exact"),
    ("none", True, KEPT, None, "weights", IDENTITY, RECORDED, "stock"),
    ("online", False, NO_FOLD, None, "online", DEFAULT, IDENTITY, "exact"),
    ("online", True, UNFOLDED, None, "online", RECORDED, IDENTITY, "exact"),
    ("online", True, KEPT, None, "online", IDENTITY, RECORDED, "stock"),
    ("online", True, UNFOLDED, UNIFORM, "online", UNIFORM, IDENTITY, "exact"),
    ("fp32_residual", True, NO_FOLD, None, "fp32_residual", IDENTITY, IDENTITY, "exact"),
    ("fp32_residual", True, KEPT, None, "fp32_residual", IDENTITY, RECORDED, "stock"),
    ("fp32_residual", True, UNFOLDED, RECORDED, "fp32_residual", RECORDED, IDENTITY, "exact"),
]


@pytest.mark.parametrize(("fix", "half", "stored", "factors", "mode", "run", "baked", "eps"), TABLE)
def test_the_plan_follows_from_fix_dtype_stored_fold_and_factors(
    fix, half, stored, factors, mode, run, baked, eps
) -> None:  # type: ignore[no-untyped-def]
    factors = factors and GivenFactors.of(factors)
    plan = plan_for(fix, half=half, stored=stored, factors=factors)
    assert (plan.mode, plan.factors, plan.baked, plan.eps) == (mode, run, baked, eps)
    asked = plan_for(fix, half=half, stored=stored, factors=factors, eps="exact", clamp=5.0)
    assert (asked.eps, asked.clamp) == ("exact", 5.0)


def test_an_exact_record_is_run_exactly() -> None:
    stored = StoredFold(FoldRecord(1 / 16, eps="exact"))
    assert plan_for("auto", half=True, stored=stored).eps == "exact"
    assert plan_for("auto", half=True, stored=stored, eps="stock").eps == "stock"


def test_fp16_takes_no_step_of_c_that_it_cannot_hold() -> None:
    given = GivenFactors((2.0**-12, 2.0**5))
    assert plan_for("online", half=False, factors=given).factors.c == given.c
    with pytest.raises(MossError, match="c grows 131072-fold"):
        plan_for("online", half=True, factors=given)


def test_an_unknown_fix_is_refused() -> None:
    with pytest.raises(MossError, match="one of auto"):
        plan_for("magic", half=True)  # type: ignore[arg-type]


powers = st.integers(-12, 4).map(lambda k: 2.0**k)
lists = st.lists(powers, min_size=4, max_size=4).map(tuple)


@settings(max_examples=25, deadline=None)
@given(c=lists, s_attn=lists, s_ffn=lists, skipped=st.sets(st.integers(0, 3)))
def test_any_powers_of_two_leave_fp32_bit_equal(c, s_attn, s_ffn, skipped) -> None:  # type: ignore[no-untyped-def]
    case = golden.cases_of("hot")[0]
    replace = dict.fromkeys(skipped, skip_block)
    folded = velocity(case, StreamPlan("online", Factors(c, s_attn, s_ffn)), replace=replace)
    assert torch.equal(folded, velocity(case, replace=replace))


@settings(max_examples=10, deadline=None)
@given(c=powers, s_attn=powers, s_ffn=powers)
def test_any_uniform_powers_of_two_leave_fp32_residual_bit_equal(c: float, s_attn: float, s_ffn: float) -> None:
    case = golden.cases_of("warm")[1]
    plan = StreamPlan("fp32_residual", Factors((c,), (s_attn,), (s_ffn,)))
    assert torch.equal(velocity(case, plan), velocity(case))


@settings(max_examples=10, deadline=None)
@given(c=st.floats(1e-3, 8.0), s=st.floats(1e-2, 4.0))
def test_other_factors_only_round(c: float, s: float) -> None:
    case = golden.cases_of("cool")[0]
    plan = StreamPlan("online", Factors((c,), (s,), (1 / s,)))
    assert golden.relative(velocity(case, plan), velocity(case)) < 1e-5


def test_a_replacement_sees_the_rescaled_stream_and_may_run_the_block() -> None:
    case, factors = golden.cases_of("hot")[0], Factors((0.5, 0.25, 0.25, 1.0))
    seen = []

    def watch(x, run):  # type: ignore[no-untyped-def]
        seen.append(x.clone())
        return run(x)

    folded = velocity(case, StreamPlan("online", factors), replace=dict.fromkeys(range(4), watch))
    entering, seen = seen, []
    plain = velocity(case, replace=dict.fromkeys(range(4), watch))
    assert torch.equal(folded, plain)
    for scale, x, y in zip(factors.c, entering, seen, strict=True):
        assert torch.equal(x, y * scale)


def test_a_replacement_may_keep_the_stream_it_was_given() -> None:
    case = golden.cases_of("hot")[0]
    kept = []

    def half(x, run):  # type: ignore[no-untyped-def]
        before = x.clone()
        mixed = x + 0.5 * (run(x) - x)
        kept.append(torch.equal(x, before))
        return mixed

    for plan in (StreamPlan(), StreamPlan("fp32_residual", clamp=4096.0)):
        velocity(case, plan, replace={1: half})
    assert kept == [True, True]
