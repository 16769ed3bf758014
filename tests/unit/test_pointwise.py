"""The pointwise pieces in slabs against the same pieces of plain torch, and products of fp16 on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fold.model import fused, ops
from fold.model.forward import sdpa
from fold.model.kernels import CPU_ELEMENTS, FUNCTIONAL, Slabs, near_tanh, slabs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SLABS = Slabs(torch.device("cpu"))
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def norm(width: int) -> ops.RMSNorm:
    return fused._norm(random(width))


@pytest.mark.parametrize("dtype", DTYPES)
def test_slabs_of_norms_rope_and_gated_add_are_bit_equal_to_all_at_once(dtype: torch.dtype) -> None:
    tokens, width = 3 * CPU_ELEMENTS // 512 + 5, 256  # more than one slab, the last of them smaller
    x, row = random(2, tokens, width, dtype=dtype), random(2, 1, width)
    unscale = ops.Unscale(16.0, torch.full((1,), 16.0))
    args = (norm(width), x, unscale, row, row, dtype)
    assert torch.equal(SLABS.modulated_norm(*args), FUNCTIONAL.modulated_norm(*args))
    heads, angle = x.view(2, tokens, 2, width // 2), random(1, tokens, 1, width // 4)
    rope = torch.cat((angle, angle), dim=-1).cos(), angle.sin()
    wanted = FUNCTIONAL.norm_rope(norm(width // 2), heads, rope, dtype)
    assert torch.equal(SLABS.norm_rope(norm(width // 2), heads.clone(), rope, dtype), wanted)
    assert torch.equal(SLABS.gated_add(x, x, row, keep=True), FUNCTIONAL.gated_add(x, x, row, keep=True))


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8)], ids=["no sample", "no token"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slabs_of_nothing_are_nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, row = torch.empty(shape, dtype=dtype), torch.ones(shape[0], 1, 8)
    rope = torch.ones(shape[0], shape[1], 1, 8), torch.ones(shape[0], shape[1], 1, 4)
    for found in (
        SLABS.modulated_norm(norm(8), x, None, row, row, dtype),
        SLABS.norm_rope(norm(8), x[:, :, None], rope, dtype),
        SLABS.situ(x, x, 1.0),
        SLABS.gated_add(x, x, row, keep=True),
    ):
        assert found.numel() == 0 and found.dtype == dtype
    assert [*slabs(x)] == [*slabs(x, 2)] == [slice(0, shape[1])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_situ_in_slabs_is_bit_equal_in_fp32_and_a_few_in_a_hundred_round_otherwise_in_16_bits(
    dtype: torch.dtype, scale: float
) -> None:
    up, gate = (random(1, 2 * CPU_ELEMENTS // 300, 600, dtype=dtype) * scale).chunk(2, dim=-1)
    found, plain = SLABS.situ(up, gate, 0.5), FUNCTIONAL.situ(up, gate, 0.5)
    differ = float((found != plain).float().mean())
    assert differ == 0 if dtype == torch.float32 else differ < 0.05
    assert bool(((found.float() - plain.float()).abs() <= torch.finfo(dtype).eps * plain.float().abs() + 6e-8).all())


def test_near_tanh_is_relatively_exact_from_tiny_to_large_and_passes_nan_on() -> None:
    x = torch.cat([sign * torch.logspace(-10, 4, 4096) for sign in (1.0, -1.0)])
    wanted = torch.tanh(x.double())
    assert float(((near_tanh(x, out=torch.empty_like(x)) - wanted) / wanted).abs().max()) < 2e-5
    ends = torch.tensor([NAN, INF, -INF, 0.0])
    near_tanh(ends, out=ends)
    assert bool(ends[0].isnan()) and torch.allclose(ends[1:], torch.tensor([1.0, -1.0, 0.0]), atol=2e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_fp16_products_on_a_cpu_round_once_and_overflow_as_fp16_does(
    monkeypatch: pytest.MonkeyPatch, biased: bool
) -> None:
    layer = ops.Linear(64, 33, bias=biased, dtype=torch.float16)
    x = random(3, 5, 64, dtype=torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "_CPU_HAS_FP16", False)
        patch.setattr(ops, "_WIDENED", 8 * 64)  # parts of eight rows, the last one smaller
        found = layer(x)
        big = layer(x * 3e4)
        q = random(1, 2, 5, 8, dtype=torch.float16)
        attended = sdpa(q, q, q, None)
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if biased else 0)
    assert found.dtype == attended.dtype == torch.float16
    assert float((found.double() - exact).abs().max() / exact.abs().max()) < 2**-11
    assert bool(big.isinf().any())
    wide = sdpa(q.float(), q.float(), q.float(), None)
    assert torch.equal(attended, wide.half())
    monkeypatch.setattr(ops, "_CPU_HAS_FP16", True)
    assert ops.product_dtype(x) == torch.float16 and fused._roundings(layer(x), found) <= 1


def test_products_of_other_dtypes_and_devices_keep_their_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert ops.product_dtype(torch.empty(1, dtype=dtype)) == dtype
    assert ops.product_dtype(torch.empty(1, dtype=torch.float16, device="meta")) == torch.float16
