"""What a call does on a card that is not here: exact counts on fake tensors of the real model's sizes."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.files import REAL
from bench.trace import report
from bench.trace.calls import DEVICES, MODES, Shape, row, trace_call
from bench.trace.cards import Card, estimate
from bench.trace.watch import Watch, count
from fold.model.forward import skip_block
from fold.model.memory import activation_bytes

SHAPE = Shape(1024, 2)
TWO = ("cuda", "mps")


def clean(found: object, waits: int) -> None:
    assert (found.wide, found.elsewhere) == ([], []), found  # type: ignore[attr-defined]
    assert len(found.waits) == waits, found.waits  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODES)
def test_no_float64_no_other_device_and_one_wait_with_the_guard(name: str) -> None:
    for device in DEVICES:
        clean(trace_call(device, Shape(256, 2), MODES[name], 1), int(MODES[name].guard))


@pytest.mark.parametrize("name", ["none", "online + counters + guard", "fp32_residual + counters + guard"])
@pytest.mark.parametrize("fused_keys", [False, True], ids=["q, k, v", "qkv"])
def test_the_same_with_a_mask_a_skipped_block_and_one_run_by_a_patch(name: str, fused_keys: bool) -> None:
    def patched(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        return run(x)

    found = trace_call(
        "xpu", Shape(256, 2), MODES[name], 3, fused=fused_keys, mask=True, replaced={0: skip_block, 1: patched}
    )
    clean(found, int(MODES[name].guard))


@pytest.mark.parametrize("name", MODES)
def test_activations_are_at_most_eight_streams(name: str) -> None:
    for side, batch in ((1024, 2), (2048, 1)):
        assert row("cuda", Shape(side, batch), name).streams <= 8


def test_a_block_that_a_patch_runs_needs_no_second_stream_beside_attention() -> None:
    for name in ("none", "fp32_residual"):
        found = trace_call("cuda", SHAPE, MODES[name], 2, replaced={0: lambda x, run: run(x)})
        assert found.peak <= 8 * SHAPE.stream(REAL)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["none", "online", "fp32_residual"])
def test_plain_torch_moves_seven_gigabytes_a_block(device: str, name: str) -> None:
    assert row(device, SHAPE, name).pointwise_block <= 7e9


@pytest.mark.parametrize("name", [name for name in MODES if name.startswith("fused")])
def test_fused_kernels_move_two_and_a_half_gigabytes_in_45_kernels(name: str) -> None:
    found = row("cuda", SHAPE, name)
    assert found.pointwise_block <= 2.5e9
    assert found.kernels_block <= 45


@pytest.mark.parametrize("plain, counted", [("online", "online + counters"), ("fp32_residual", None)])
def test_counters_add_two_percent_and_six_kernels(plain: str, counted: str | None) -> None:
    for device in TWO:
        less, more = row(device, SHAPE, plain), row(device, SHAPE, counted or "fp32_residual + counters + guard")
        assert 0 < more.pointwise_block - less.pointwise_block <= 0.02 * less.pointwise_block
        assert more.kernels_block - less.kernels_block <= 6


@pytest.mark.parametrize("name", ["online + counters + guard", "fp32_residual + counters + guard"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_memory_estimate_is_never_below_and_at_most_a_quarter_above(name: str, dtype: torch.dtype) -> None:
    plan = MODES[name].plan
    for side, batch, text in ((512, 1, 77), (1024, 1, 256), (1024, 2, 512), (2048, 2, 256)):
        shape = Shape(side, batch, text, dtype)
        held = trace_call("cuda", shape, MODES[name], 2).peak
        told = activation_bytes(REAL, batch, (side // 16) ** 2, text, dtype, fp32_stream=plan.fp32_stream)
        assert held <= told <= 1.25 * held, (side, batch, told / held)


def test_kernels_bytes_and_memory_are_counted_by_hand() -> None:
    with FakeTensorMode():
        x, row_ = torch.empty(4, 8, dtype=torch.float16, device="cuda"), torch.empty(8, device="cuda")

        def run() -> None:
            y = x + row_.expand(4, 8)  # reads 64 + 32, writes 128
            z = y.mul_(2.0)[:, :4]  # reads and writes 128
            w = torch.mm(z, z.t())  # 64 multiply-adds times two
            del y, z
            w.zero_()

        trace = count("cuda", run, x, row_)
    assert [(one.name, one.kind, one.read, one.written) for one in trace.kernels] == [
        ("add", "pointwise", 96, 128),
        ("mul_", "pointwise", 128, 128),
        ("mm", "product", 128, 64),
        ("zero_", "pointwise", 0, 64),
    ]
    assert trace.flops("product") == 2 * 4 * 4 * 4
    assert (trace.peak, trace.held) == (128 + 64, 0)


def test_float64_other_devices_and_waits_are_seen() -> None:
    with FakeTensorMode():
        x = torch.empty(4, device="cuda")
        with Watch("cuda") as watch:
            x.double()
            x.cpu()
            bool((x > 0).any())
        gc.collect()
    assert "_to_copy" in watch.trace.wide
    assert "_to_copy" in watch.trace.elsewhere
    assert watch.trace.waits == ["_to_copy", "item"]


def test_tables_and_estimates_are_written_and_keep_before_and_notes(tmp_path: Path) -> None:
    found = [row("cuda", SHAPE, name) for name in MODES]
    (tmp_path / "trace.json").write_text(json.dumps({"before": [found[1].to_json() | {"kernels_block": 999}]}))
    report.write(tmp_path, found)
    document = tmp_path / "trace.md"
    assert "999 kernels" in document.read_text("utf-8")
    with document.open("a", encoding="utf-8") as text:
        text.write(f"\n{report.NOTES}\n\n- By hand.\n")
    report.write(tmp_path, found)
    again = document.read_text("utf-8")
    assert again.count("- By hand.") == 1 and again.count("999 kernels") == 1
    kept = json.loads((tmp_path / "trace.json").read_text("utf-8"))
    assert len(kept["rows"]) == len(MODES) and len(kept["before"]) == 1


def test_an_estimate_is_bytes_and_operations_over_the_peak_rates() -> None:
    one = replace(
        row("cuda", SHAPE, "none"),
        pointwise_block=10**9, products_block=10**6, product_flops_block=10**12,
        attention_block=2 * 10**9, attention_flops_block=10**9,
    )  # fmt: skip
    found = estimate(Card("a card", 100.0, 500.0, "made up"), one, 42)
    assert (found.products_ms, found.pointwise_ms) == pytest.approx((10.0 + 4.0, 2.0))
    assert found.call_s == pytest.approx(42 * 0.016)
