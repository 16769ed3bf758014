"""The golden figures on every device that is here: the CPU, Apple's GPU on CI's Macs, a CUDA or Intel card."""

from __future__ import annotations

import copy
from functools import cache

import golden
import pytest
import torch
from golden import Case, relative

from fold.model.forward import MossDiT
from fold.report.counters import Counters, site_names
from fold.scaling.plan import StreamPlan

CASES = [cases[0] for name in golden.MODELS if (cases := golden.cases_of(name))]


def devices() -> list[str]:
    found = ["cpu"]
    found += ["mps"] if torch.backends.mps.is_available() else []
    found += ["cuda"] if torch.cuda.is_available() else []
    found += ["xpu"] if getattr(torch, "xpu", None) and torch.xpu.is_available() else []
    return found


@cache
def on_device(name: str, device: str, dtype: torch.dtype) -> MossDiT:
    return copy.deepcopy(golden.model(name, dtype)).to(device)


@torch.no_grad()
def velocity(
    case: Case, device: str, plan: StreamPlan, dtype: torch.dtype, counters: Counters | None = None
) -> torch.Tensor:
    model = on_device(case.model, device, dtype)
    inputs = (tensor.to(device) for tensor in (case.latent, case.sigma, case.context))
    return model(*inputs, plan=plan, dtype=dtype, observer=counters).cpu()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp32_is_the_reference_on_this_device(case: Case, device: str) -> None:
    assert relative(velocity(case, device, StreamPlan(), torch.float32), case.expected["none"]) <= 1e-4


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_fold_keeps_fp16_in_range_on_this_device(case: Case, device: str) -> None:
    plan, arch = StreamPlan("online", golden.factors(case.model)), golden.model(case.model, torch.float16).arch
    counters = Counters(site_names(arch.text_blocks, arch.depth))
    value = velocity(case, device, plan, torch.float16, counters)
    counters.commit()
    assert sum(row.non_finite + row.saturated for row in counters.read()) == 0
    exact = velocity(case, device, StreamPlan(), torch.float32)
    assert relative(value, exact) <= 8 * case.scalars["fp16"]["online"]["rel"]
