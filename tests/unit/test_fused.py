"""Triton's kernels in its interpreter on a CPU: against plain torch, and what happens where they cannot be used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import math
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import golden
import pytest
import torch
from golden import UNIFORM, relative, velocity
from repo import ROOT
from torch import Tensor

from fold.model import fused, ops
from fold.model.forward import MossDiT
from fold.model.fused import Fused, chosen, fused_kernels, norm_weight, trial
from fold.model.kernels import FUNCTIONAL, Slabs
from fold.scaling.plan import StreamPlan

CPU = torch.device("cpu")


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = float("inf"), float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


@pytest.fixture(scope="module")
def triton_kernels() -> ModuleType:
    """The kernels as Triton's interpreter runs them (see conftest); a skip where it cannot."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    # torch 2.4 comes with 3.0, 2.5 with 3.1. On a card their compiler is tried before use, as any.
    if tuple(int(n) for n in importlib.metadata.version("triton").split(".")[:2]) < (3, 2):
        pytest.skip("Triton before 3.2: its interpreter takes no sizes from arguments")
    from fold.model import triton_kernels

    return triton_kernels


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def roundings(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape and one.dtype == other.dtype
    return fused._roundings(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trial_finds_them_equal_to_plain_torch(triton_kernels: ModuleType, dtype: torch.dtype) -> None:
    assert trial(triton_kernels, CPU, dtype) <= (1 if dtype != torch.float32 else 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (1, 2, 1024), (3, 1, 1025)], ids=str)
def test_situ_of_odd_sizes_and_halves(triton_kernels: ModuleType, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    wide = (torch.randn(*shape[:2], 2 * shape[2]) * 20).to(dtype)
    up, gate = wide.chunk(2, dim=-1)
    plain, untouched = ops.situ(up, gate, 0.25), gate.clone()
    found = triton_kernels.situ(up, gate, 0.25)
    assert roundings(found, plain) <= 8
    assert found.data_ptr() == wide.data_ptr() and torch.equal(wide[..., shape[2] :], untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize("keep", [False, True])
def test_gated_add_of_any_dtypes(
    triton_kernels: ModuleType, dtype: torch.dtype, y_dtype: torch.dtype, keep: bool
) -> None:
    x, y, gate = torch.randn(2, 5, 33).to(dtype)[:, 1:4], torch.randn(2, 3, 33).to(y_dtype), torch.randn(2, 1, 33)
    before, plain = x.clone(), ops.gated_add(x, y, gate)
    found = triton_kernels.gated_add(x, y, gate, keep=keep)
    assert roundings(found, plain) <= 2
    assert torch.equal(x, before) == keep
    one = triton_kernels.gated_add(before, y, gate[:1], keep=True)
    assert roundings(one, ops.gated_add(before, y, gate[:1])) <= 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True], ids=["stream", "fp32 stream"])
def test_norms_scale_modulate_and_round_once(triton_kernels: ModuleType, dtype: torch.dtype, wide: bool) -> None:
    x = (torch.randn(2, 6, 96) * 1e3).to(torch.float32 if wide else dtype)[:, 2:5]
    norm = fused._norm(torch.randn(96))
    factor, shift, unscale = torch.randn(2, 1, 96), torch.randn(2, 1, 96), ops.Unscale(16.0, torch.tensor([16.0]))
    for scaled in (None, unscale):
        found = triton_kernels.modulated_norm(x, norm.weight, norm.eps, scaled, factor, shift, dtype)
        assert roundings(found, ops.modulated_norm(norm, x, scaled, factor, shift, dtype)) <= 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, width", [(1, 8), (3, 16), (24, 128)])
@pytest.mark.parametrize("batches", [1, 2])
def test_norm_and_rope_in_place_of_a_part_of_qkv(
    triton_kernels: ModuleType, dtype: torch.dtype, heads: int, width: int, batches: int
) -> None:
    qkv = torch.randn(2, 5, 3 * heads * width).to(dtype)
    q = qkv.chunk(3, dim=-1)[1].view(2, 5, heads, width)
    angle, norm = torch.randn(batches, 5, 1, width // 2), fused._norm(torch.randn(width))
    rope = torch.cat((angle, angle), dim=-1).cos(), angle.sin()
    plain, rest = ops.norm_rope(norm, q, rope, dtype), qkv[..., : heads * width].clone()
    assert roundings(triton_kernels.norm_rope(q, norm.weight, norm.eps, rope, dtype), plain) <= 4
    assert roundings(q.clone(), plain) <= 4
    assert torch.equal(qkv[..., : heads * width], rest)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nan_and_infinity_are_passed_on(triton_kernels: ModuleType, bad: float) -> None:
    x, row = torch.randn(1, 3, 8), torch.ones(1, 1, 8)
    x[0, 1, 2] = bad
    y = torch.randn(1, 3, 8)

    def same(one: Tensor, other: Tensor) -> bool:
        return torch.allclose(one, other, rtol=1e-5, equal_nan=True)

    assert same(triton_kernels.gated_add(x, y, row, keep=True), ops.gated_add(x, y, row))
    assert same(triton_kernels.gated_add(y, x, row, keep=True), ops.gated_add(y, x, row))
    assert same(triton_kernels.situ(y.clone(), x, 1.0), ops.situ(y, x))
    assert same(triton_kernels.situ(x.clone(), y, 1.0), ops.situ(x, y))
    norm = fused._norm(torch.ones(8))
    found = triton_kernels.modulated_norm(x, norm.weight, norm.eps, None, row, row, torch.float32)
    assert not bool(found[0, 1].isfinite().all()) and bool(found[0, [0, 2]].isfinite().all())


class CastingNorm(ops.RMSNorm):
    """A runtime's norm that keeps its weight elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def test_a_norms_weight_is_what_the_module_makes_of_it() -> None:
    norm = fused._norm(torch.randn(64))
    assert torch.equal(norm_weight(norm, torch.empty(1, 1, 64)), norm.weight)
    cast = CastingNorm(64, 1e-6)
    cast.weight.copy_(norm.weight)
    assert torch.equal(norm_weight(cast, torch.empty(1, 1, 64)), norm.weight * 0.5)


@pytest.mark.parametrize("model", ["hot", "cool"])
def test_the_whole_forward_gives_the_golden_velocity_and_the_fold_changes_no_bit(
    triton_kernels: ModuleType, model: str
) -> None:
    case = min(golden.cases_of(model), key=lambda one: one.latent.numel())
    tree: MossDiT = golden.model(model)

    def run(plan: StreamPlan) -> Tensor:
        kernels = Fused(CPU, triton_kernels)
        return tree(case.latent, case.sigma, case.context, plan=plan, kernels=kernels)  # type: ignore[no-any-return]

    plain = run(StreamPlan())
    assert relative(plain, case.expected["none"]) < 4e-6
    assert torch.equal(run(StreamPlan("online", UNIFORM)), plain)
    assert relative(plain, velocity(case)) > 0  # they did run


def test_kernels_that_are_wrong_or_fail_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, triton_kernels: ModuleType
) -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no ptxas")

    def off(x: Tensor, y: Tensor, gate: Tensor, *, keep: bool) -> Tensor:
        return triton_kernels.gated_add(x, y, gate, keep=keep) * 1.05  # type: ignore[no-any-return]

    monkeypatch.setattr(fused, "_DEVICES", ("cpu",))
    monkeypatch.delenv(fused.SWITCH, raising=False)
    real = vars(triton_kernels)
    for change, said in (({}, ""), ({"situ": broken}, "no ptxas"), ({"gated_add": off}, "roundings off")):
        stand_in = SimpleNamespace(**{name: real[name] for name in FUNCTIONS} | change)
        monkeypatch.setattr("fold.model.triton_kernels", stand_in)
        fused._tried.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert isinstance(chosen(None, CPU), Fused) == (not change)
            assert isinstance(chosen(None, CPU), Slabs)
        assert len(caplog.records) == len(change)
        assert said in caplog.text
    fused._tried.cache_clear()


FUNCTIONS = ("modulated_norm", "norm_rope", "situ", "gated_add", "fits")


def test_a_switch_turns_them_off_and_gradients_get_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_DEVICES", ("cpu",))
    monkeypatch.setattr(fused, "_tried", lambda device: SimpleNamespace())
    assert fused_kernels(CPU) is not None
    monkeypatch.setenv("MOSS_FP16_NO_TRITON", "1")  # as README.md says
    assert fused_kernels(CPU) is None
    with torch.enable_grad():
        assert chosen(None, CPU) is FUNCTIONAL


def test_fold_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import fold.model.forward, fold.cli; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "fine\n"


def test_tanh_is_exact_from_tiny_to_large(triton_kernels: ModuleType) -> None:
    x = torch.cat([sign * torch.logspace(-8, 3, 4096) for sign in (1.0, -1.0)])[None, None]
    ones = torch.full_like(x, 1e4)  # sigmoid and the first tanh are 1
    found = triton_kernels.situ(x.clone(), ones, 1.0) / ops.SITU_PEAK
    wanted = torch.tanh(x.double() * 0.04)
    assert float(((found - wanted) / wanted).abs().max()) < 5e-7
    assert math.isclose(float(found.max()), 1.0)
