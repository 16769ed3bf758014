"""The fold in the weights: which rows move, by how much, and that taking it out gives the tensor back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import golden
from torch import Tensor

from fold.arch import MossArch
from fold.errors import MossError
from fold.scaling.factors import DEFAULT, IDENTITY, Factors
from fold.scaling.weights import rescale, row_scale, unfold_tensor

ARCH = MossArch(
    dim=16, depth=2, heads=2, ffn_dim=24, text_dim=12, text_blocks=1, text_ffn_dim=20, latent_channels=8, freq_dim=32
)
FACTORS = Factors((1 / 16,), (1 / 2,), (1 / 4,))
NAMES = tuple(ARCH.expected_shapes(False)) + tuple(ARCH.expected_shapes(True))


def expected_scale(name: str) -> float | None:
    """The rule of the fold, written out name by name."""
    writers = ("video_embedder", "text_embedder.proj", "text_embedder.blocks.0.proj", "text_embedder.blocks.0.ffn_down")
    if name in {f"{writer}.{kind}" for writer in writers for kind in ("weight", "bias")}:
        return 1 / 16
    if name in {f"layers.{block}.proj.o.weight" for block in range(2)}:
        return 1 / 2
    if name in {f"layers.{block}.proj.ffn_down.weight" for block in range(2)}:
        return 1 / 4
    return None


@pytest.mark.parametrize("name", sorted({*NAMES} - {"shared_block_modulation.weight", "shared_block_modulation.bias"}))
def test_every_tensor_has_its_scale(name: str) -> None:
    assert row_scale(name, ARCH, FACTORS) == expected_scale(name)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_the_gates_take_over_what_the_writers_give_up(kind: str) -> None:
    scale = row_scale(f"shared_block_modulation.{kind}", ARCH, FACTORS)
    assert isinstance(scale, Tensor) and scale.dtype == torch.float32
    groups = scale.view(6, 16)
    for row, value in enumerate((1.0, 1.0, 1 / 8, 1.0, 1.0, 1 / 4)):
        assert bool((groups[row] == value).all())


def test_nothing_moves_without_factors() -> None:
    assert {row_scale(name, ARCH, IDENTITY) for name in NAMES} == {None}
    assert row_scale("lora.anything", ARCH, FACTORS) is None
    # c = s: the gates stay as they are.
    assert row_scale("shared_block_modulation.bias", ARCH, Factors((0.5,), (0.5,), (0.5,))) is None


def test_per_block_factors_are_refused_in_words() -> None:
    with pytest.raises(MossError, match="share one modulation"):
        row_scale("video_embedder.weight", ARCH, Factors((0.5, 0.25)))
    assert row_scale("video_embedder.weight", ARCH, Factors((0.5, 0.5))) == 0.5


def folded_by_export(
    name: str, tensor: Tensor, arch: MossArch, factors: Factors, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor with the fold in it, as the export computes it."""
    return rescale(tensor, multiply=row_scale(name, arch, factors), dtype=dtype)


@pytest.mark.parametrize("model", ["hot", "warm"])
@pytest.mark.parametrize(
    ("suffix", "factors", "dtype"),
    [("", DEFAULT, torch.float16), ("_bf16", DEFAULT, torch.bfloat16), ("_s", FACTORS, torch.float16)],
)
def test_folding_gives_the_golden_tensors(model: str, suffix: str, factors: Factors, dtype: torch.dtype) -> None:
    source, fixed = golden(model), golden(f"{model}_fp16fix{suffix}")
    arch = MossArch.from_shapes({name: tensor.shape for name, tensor in source.items()})
    for name, tensor in source.items():
        target = torch.float32 if name == "rope.bands" else dtype
        folded = folded_by_export(name, tensor, arch, factors, target)
        assert folded.dtype == fixed[name].dtype and torch.equal(folded, fixed[name]), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


NAME_AND_FACTORS = (
    st.sampled_from(
        [
            "video_embedder.weight",
            "layers.0.proj.o.weight",
            "layers.1.proj.ffn_down.weight",
            "shared_block_modulation.weight",
        ]
    ),
    st.builds(lambda *powers: Factors(*((2.0**p,) for p in powers)), *[st.integers(-6, 2)] * 3),
)


@settings(deadline=None)
@given(*NAME_AND_FACTORS, st.integers(0, 2**31))
def test_fold_then_unfold_is_the_identity_on_bf16(name: str, factors: Factors, seed: int) -> None:
    """Any bf16 numbers, exponents from 2^-100 to 2^100 (beyond lie its own subnormals and infinity), and zeros."""
    generator = torch.Generator().manual_seed(seed)
    rows = 96 if name.startswith("shared") else 16
    sign_and_fraction = torch.randint(2**16, (rows, 8), generator=generator)
    exponent = torch.randint(27, 228, (rows, 8), generator=generator)
    tensor = ((sign_and_fraction & 0x807F) | (exponent << 7)).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    tensor[0, :2] = torch.tensor([0.0, -0.0])
    assert torch.equal(
        bits(unfold_tensor(name, folded_by_export(name, tensor, ARCH, factors), ARCH, factors)), bits(tensor)
    )


@settings(deadline=None)
@given(*NAME_AND_FACTORS, st.integers(0, 2**31))
def test_fold_then_unfold_is_the_identity_on_fp16_but_for_subnormals(name: str, factors: Factors, seed: int) -> None:
    """Any fp16 numbers: given back bit for bit unless the product is subnormal or too large."""
    generator = torch.Generator().manual_seed(seed)
    rows = 96 if name.startswith("shared") else 16
    tensor = torch.randint(2**16, (rows, 8), generator=generator).to(torch.int32).to(torch.int16).view(torch.float16)
    tensor = torch.where(tensor.isfinite(), tensor, torch.ones_like(tensor))
    folded = folded_by_export(name, tensor, ARCH, factors)
    product = folded_by_export(name, tensor, ARCH, factors, torch.float32)
    exact = (product.abs() >= 2.0**-14) & folded.isfinite() | (tensor == 0)
    again = unfold_tensor(name, folded, ARCH, factors)
    assert torch.equal(bits(again)[exact], bits(tensor)[exact])
    # What was lost is no more than half a step of the subnormals.
    assert bool(((folded.float() - product).abs()[~exact & folded.isfinite()] <= 2.0**-25).all())


def test_one_rounding_from_fp32() -> None:
    """bf16 times 1/3 straight to fp16, not by way of bf16; and a wide tensor is multiplied in its own width."""
    tensor = torch.tensor([1.0, 3.0, 100.5, -7.125], dtype=torch.bfloat16)
    assert torch.equal(rescale(tensor, multiply=1 / 3, dtype=torch.float16), (tensor.float() * (1 / 3)).half())
    wide = torch.tensor([1.0 + 2.0**-40], dtype=torch.double)
    assert rescale(wide, multiply=0.5).item() == 0.5 + 2.0**-41


def test_untouched_tensors_are_not_copied() -> None:
    tensor = torch.ones(3)
    assert rescale(tensor) is tensor
    assert folded_by_export("final_norm_video.weight", tensor, ARCH, FACTORS) is tensor
