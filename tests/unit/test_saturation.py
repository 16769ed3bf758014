"""The counters: exact counts, calls that are kept or dropped, one read."""

from __future__ import annotations

import math

import golden
import pytest
import torch
from golden import UNIFORM, counted, velocity
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fold.report import counters as counters_module
from fold.report.counters import BlockStats, Counters, site_names
from fold.scaling.plan import StreamPlan

INF, NAN = float("inf"), float("nan")


def counters(threshold: float = 4096.0) -> Counters:
    return Counters(("a", "b"), threshold)


@pytest.fixture(params=[True, False], ids=["cpu-branch", "no-branch"], autouse=True)
def branch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of counting: with the look that costs nothing on a CPU, and without, as on a device."""
    if not request.param:
        monkeypatch.setattr(counters_module, "_cheap_branch", lambda x: False)


def test_names_put_the_text_blocks_first() -> None:
    assert site_names(2, 3) == ("text.0", "text.1", "layer.0", "layer.1", "layer.2")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_elements_over_saturated_and_the_peak_are_counted(dtype: torch.dtype) -> None:
    watch = counters()
    watch.stream(
        1, torch.tensor([1.0, -4096.0, 4128.0, -8192.0, 65536.0 if dtype != torch.float16 else 65504.0]).to(dtype)
    )
    watch.commit()
    first, second = watch.read()
    assert first == BlockStats("a", 0.0, 0, 0, 0, 0)
    assert (second.over, second.saturated, second.non_finite) == (3, 1, 0)
    assert second.max_abs == (65504.0 if dtype == torch.float16 else 65536.0)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_is_counted_once_and_marks_the_peak(bad: float) -> None:
    watch = counters()
    watch.stream(0, torch.tensor([bad, 1.0, bad, 70000.0]))
    assert bool(watch.bad_flag())
    watch.commit()
    watch.stream(0, torch.tensor([1.0]))
    watch.commit()
    row = watch.read()[0]
    assert (row.max_abs, row.over, row.saturated, row.non_finite) == (INF, 1, 1, 2)


def test_elements_beyond_the_clamp_are_counted() -> None:
    watch = counters()
    for value in ([5.0, -5.0, 4.0, -4.0, 4.0001], [1.0], [INF, 3.0]):
        watch.clamping(0, torch.tensor(value), 4.0)
    watch.commit()
    assert watch.read()[0].clamped == 4


def test_a_dropped_call_leaves_nothing() -> None:
    watch = counters()
    watch.stream(0, torch.tensor([5000.0]))
    watch.commit()
    watch.stream(0, torch.tensor([INF, 1e5]))
    watch.clamping(0, torch.tensor([9.0]), 1.0)
    assert bool(watch.bad_flag())
    assert watch.read_call()[0] == BlockStats("a", INF, 1, 1, 1, 1)
    watch.drop()
    assert not bool(watch.bad_flag())
    watch.commit()
    assert watch.read()[0] == BlockStats("a", 5000.0, 1, 0, 0, 0)


def test_calls_add_up() -> None:
    watch = counters()
    for peak in (4100.0, 5000.0, 10.0):
        watch.stream(0, torch.tensor([peak, -peak]))
        watch.commit()
    assert watch.read()[0] == BlockStats("a", 5000.0, 4, 0, 0, 0)


def test_nothing_seen_reads_as_zeros() -> None:
    watch = counters()
    watch.begin()
    watch.commit()
    assert watch.read() == (BlockStats("a", 0.0, 0, 0, 0, 0), BlockStats("b", 0.0, 0, 0, 0, 0))
    assert watch.read_call() == ()
    assert not bool(watch.bad_flag())
    assert torch.equal(watch.packed(), torch.zeros(2, 5))


def test_counts_beyond_24_bits_are_exact() -> None:
    watch = counters()
    watch.stream(0, torch.ones(1))
    watch.call_beyond[0, counters_module.OVER] += 2**24 + 1
    watch.commit()
    assert watch.read()[0].over == 2**24 + 1
    assert watch.packed().dtype == torch.float32


def test_peaks_are_read_exactly() -> None:
    watch = counters()
    value = torch.tensor([0.1, 1 / 3]).max()
    watch.stream(0, value[None])
    watch.commit()
    assert watch.read()[0].max_abs == float(value)


def test_totals_follow_the_stream_to_another_device() -> None:
    watch = counters()
    watch.stream(0, torch.tensor([5000.0]))
    watch.commit()
    watch._place(torch.device("cpu", 0), 1)  # another device to torch, and the only other one everywhere
    assert watch.counts[0, 0] == 1 and watch.call_peaks.device == torch.device("cpu")
    watch.stream(0, torch.tensor([1.0, 6000.0]))
    watch.commit()
    assert watch.read()[0] == BlockStats("a", 6000.0, 2, 0, 0, 0)
    assert watch.peak.device == watch.counts.device == torch.device("cpu")


# every fp16 number by its bits, the interesting ones more often
numbers = st.integers(-(2**15), 2**15 - 1).map(
    lambda bits: float(torch.tensor(bits, dtype=torch.int16).view(torch.float16))
)
numbers |= st.sampled_from([INF, -INF, NAN, 65504.0, -65504.0, 4096.0, 4100.0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(numbers, min_size=1, max_size=12), min_size=1, max_size=4))
def test_counts_equal_a_plain_count(calls: list[list[float]]) -> None:
    watch = counters()
    for values in calls:
        watch.stream(0, torch.tensor(values, dtype=torch.float16))
        watch.commit()
    flat = [abs(value) for values in calls for value in values]
    finite = [value for value in flat if math.isfinite(value)]
    row = watch.read()[0]
    assert row.over == sum(value > 4096 for value in finite)
    assert row.saturated == sum(value >= 65504 for value in finite)
    assert row.non_finite == len(flat) - len(finite)
    assert row.max_abs == (max(finite) if len(finite) == len(flat) else INF)


def test_counting_changes_nothing() -> None:
    case = golden.cases_of("hot")[1]
    plan = StreamPlan("online", UNIFORM)
    arch = golden.model("hot").arch
    watch = Counters(site_names(arch.text_blocks, arch.depth))
    counted: Tensor = velocity(case, plan, torch.float16, observer=watch)
    assert torch.equal(counted, velocity(case, plan, torch.float16))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting as on a GPU: no branch on values."""
    monkeypatch.setattr(counters_module, "_cheap_branch", lambda x: False)
    monkeypatch.setattr(counters_module, "CHANNELS", 64)  # the golden models have no more


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("plan", [StreamPlan(), StreamPlan("fp32_residual", clamp=4096.0)], ids=["none", "clamp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_counting_without_a_branch_gives_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, plan: StreamPlan, dtype: torch.dtype
) -> None:
    for case in (*golden.cases_of("hot")[:1], *golden.cases_of("burst")[:1]):
        rows = counted(case, plan, dtype)
        with monkeypatch.context() as patch:
            patch.setattr(counters_module, "_cheap_branch", lambda x: True)
            wanted = counted(case, plan, dtype)
        assert rows == wanted
        assert any(row.over or row.clamped for row in wanted.values())


@pytest.mark.usefixtures("device")
def test_counts_on_a_device_are_exact_in_the_loudest_channels_and_peaks_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_module, "CHANNELS", 2)
    x = torch.tensor([[9.0, 5000.0, 7000.0, 6000.0], [5000.0, -7000.0, 1.0, NAN]])
    watch = counters()
    watch.stream(0, x[:, :3])
    assert watch.read_call()[0] == BlockStats("a", 7000.0, 3, 0, 0, 0)  # the first channel is not among the two
    watch.drop()
    watch.stream(0, x)
    assert bool(watch.bad_flag())
    assert watch.read_call()[0] == BlockStats("a", INF, 2, 0, 0, 1)


@pytest.mark.usefixtures("device")
def test_a_block_that_runs_twice_in_a_call_is_counted_twice_on_a_device() -> None:
    watch = counters()
    watch.stream(0, torch.tensor([[5000.0, 1.0]]))
    watch.stream(0, torch.tensor([[6000.0, -6000.0]]))
    watch.commit()
    watch.stream(0, torch.tensor([[1.0, 65504.0]]))
    watch.commit()
    assert watch.read()[0] == BlockStats("a", 65504.0, 4, 1, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("threshold", [0.1, 4096.0, 65504.0, 1e6])
def test_bit_patterns_separate_what_comparisons_separate(dtype: torch.dtype, threshold: float) -> None:
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    bits = torch.arange(2**15, dtype=torch.int32) << (16 if dtype == torch.float32 else 0)
    x = bits.to(whole).view(dtype)
    over, saturated, non_finite = counters_module._patterns(dtype, threshold)
    assert torch.equal(bits > over, ~(x.float() <= threshold))
    assert torch.equal(bits > saturated, ~(x.float() < 65504))
    assert torch.equal(bits > non_finite, ~x.isfinite())
