"""The geometry of a model, read off shapes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_files import golden
from repo import DATA

from fold.arch import MossArch
from fold.errors import MossError


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in golden(name).items()}


@pytest.mark.parametrize("name", ["hot", "hot_fused_qkv"])
def test_the_geometry_of_golden_files_is_read_off_their_shapes(name: str) -> None:
    arch = MossArch.from_shapes(shapes_of(name), name)
    expected = json.loads((DATA / "expected.json").read_text())["arch"]
    assert {field: value for field, value in arch.sizes().items() if field != "text_ffn_dim"} == expected
    assert arch.text_ffn_dim == 96 and arch.head_dim == 32
    assert arch.expected_shapes("fused" in name) == shapes_of(name)


@given(
    st.builds(
        lambda heads, unit, **sizes: MossArch(dim=heads * unit * 8, heads=heads, **sizes),
        heads=st.integers(1, 6),
        unit=st.integers(1, 16),
        depth=st.integers(1, 12),
        ffn_dim=st.integers(1, 999),
        text_dim=st.integers(1, 999),
        text_blocks=st.integers(1, 3),
        text_ffn_dim=st.integers(1, 999),
        latent_channels=st.integers(1, 999),
        freq_dim=st.integers(1, 99).map(lambda half: 2 * half),
    ),
    st.booleans(),
)
def test_shapes_give_the_geometry_back(arch: MossArch, fused: bool) -> None:
    assert MossArch.from_shapes(arch.expected_shapes(fused)) == arch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.0.norm1.weight": None}, "it has no layers.0.norm1.weight"),
        ({"layers.0.q_norm.weight": (12,)}, "layers.0.q_norm.weight in x has length 12"),
        ({"layers.0.q_norm.weight": (24,)}, "layers.0.q_norm.weight in x has length 24"),
        ({"layers.0.q_norm.weight": (0,)}, r"layers.0.q_norm.weight in x has shape \[0\]"),
        ({"layers.0.proj.ffn_up_gate.weight": (5, 64)}, "ffn_up_gate.weight in x has 5 rows"),
        ({"time_embedding.0.weight": (64, 255)}, "time_embedding.0.weight in x has 255 columns"),
        ({"video_embedder.weight": (64,)}, r"video_embedder.weight in x has shape \[64\]"),
        ({"layers.6.norm1.weight": (64,)}, "layers.4 is missing"),
        ({"text_embedder.blocks.99999999.norm1.weight": (64,)}, r"text_embedder.blocks.2 is missing"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, tuple[int, ...] | None], message: str) -> None:
    shapes = {key: shape for key, shape in (shapes_of("hot") | change).items() if shape is not None}
    with pytest.raises(MossError, match=message):
        MossArch.from_shapes(shapes, "x")
