"""The geometry of a MOSS-Image model, read off its tensor shapes, and the state dict that goes with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .errors import MossError

# RoPE uses four axes, and a half of each head: a head's width is a multiple of this.
_HEAD_UNIT = 8
_MAX_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class MossArch:
    """Sizes of one model. All but ``rope_base``, ``eps`` and ``time_scale`` can be read off tensor shapes."""

    dim: int
    depth: int
    heads: int
    ffn_dim: int
    text_dim: int
    text_blocks: int
    text_ffn_dim: int
    latent_channels: int
    freq_dim: int
    rope_base: float = 10000.0
    eps: float = 1e-6
    time_scale: float = 1000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]], where: str = "") -> MossArch:
        """Read the geometry off ``shapes`` (bare key -> shape); keys that are not MOSS's are ignored.

        ``where`` names the file or model in the MossError raised when a key is missing or its shape makes no sense.
        """
        reader = _ShapeReader(shapes, where)
        dim = reader.size("layers.0.norm1.weight", 0)
        head_dim = reader.size("layers.0.q_norm.weight", 0)
        if head_dim % _HEAD_UNIT or dim % head_dim:
            raise MossError(
                f"layers.0.q_norm.weight{reader.place} has length {head_dim}, but a head's width must be a multiple of "
                f"{_HEAD_UNIT} that divides the model width {dim}."
            )
        up_gate = reader.size("layers.0.proj.ffn_up_gate.weight", 0, ndim=2)
        if up_gate % 2:
            raise MossError(
                f"layers.0.proj.ffn_up_gate.weight{reader.place} has {up_gate} rows, but needs an even number."
            )
        freq_dim = reader.size("time_embedding.0.weight", 1, ndim=2)
        if freq_dim % 2:
            raise MossError(f"time_embedding.0.weight{reader.place} has {freq_dim} columns, but needs an even number.")
        return cls(
            dim=dim,
            depth=reader.count("layers"),
            heads=dim // head_dim,
            ffn_dim=up_gate // 2,
            text_dim=reader.size("text_embedder.proj.weight", 1, ndim=2),
            text_blocks=reader.count("text_embedder.blocks"),
            text_ffn_dim=reader.size("text_embedder.blocks.0.ffn_up.weight", 0, ndim=2),
            latent_channels=reader.size("video_embedder.weight", 1, ndim=2),
            freq_dim=freq_dim,
        )

    def expected_shapes(self, fused: bool) -> dict[str, tuple[int, ...]]:
        """Every bare key of the state dict with its shape; ``fused``: one ``proj.qkv`` per block instead of q, k, v.

        ``rope.bands`` is included although a file may leave it out (it is derived).
        """
        dim, head = self.dim, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"rope.bands": (head // _HEAD_UNIT,)}
        shapes |= _linear("video_embedder", dim, self.latent_channels)
        shapes |= _linear("text_embedder.proj", dim, self.text_dim)
        shapes |= _linear("time_embedding.0", dim, self.freq_dim)
        shapes |= _linear("time_embedding.2", dim, dim)
        shapes |= _linear("shared_block_modulation", 6 * dim, dim)
        shapes |= _linear("video_head_modulation", 2 * dim, dim)
        shapes |= {"final_norm_video.weight": (dim,), "final_linear_video.weight": (self.latent_channels, dim)}
        for index in range(self.text_blocks):
            block, ffn = f"text_embedder.blocks.{index}", self.text_ffn_dim
            shapes |= _norms(block, dim, head)
            for name, rows, columns in (
                ("qkv", 3 * dim, dim),
                ("proj", dim, dim),
                ("ffn_gate", ffn, dim),
                ("ffn_up", ffn, dim),
                ("ffn_down", dim, ffn),
            ):
                shapes |= _linear(f"{block}.{name}", rows, columns)
        for index in range(self.depth):
            shapes |= _norms(f"layers.{index}", dim, head)
            shapes |= {f"layers.{index}.proj.{name}.weight": shape for name, shape in self._matrices(fused).items()}
        return shapes

    def _matrices(self, fused: bool) -> dict[str, tuple[int, int]]:
        """The matrices of one joint block."""
        dim, ffn = self.dim, self.ffn_dim
        qkv = {"qkv": (3 * dim, dim)} if fused else dict.fromkeys("qkv", (dim, dim))
        return qkv | {"o": (dim, dim), "ffn_up_gate": (2 * ffn, dim), "ffn_down": (dim, ffn)}


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norms(block: str, dim: int, head: int) -> dict[str, tuple[int, ...]]:
    sizes = {"norm1": dim, "norm2": dim, "q_norm": head, "k_norm": head}
    return {f"{block}.{name}.weight": (size,) for name, size in sizes.items()}


class _ShapeReader:
    """Looks sizes up in a mapping of shapes, with an error that names the key and the file."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], where: str) -> None:
        self.shapes = shapes
        self.name = where or "This state dict"
        self.place = f" in {where}" if where else ""

    def size(self, key: str, axis: int, ndim: int = 1) -> int:
        """One size of one tensor, at least 1."""
        shape = self.shapes.get(key)
        if shape is None:
            raise MossError(f"{self.name} is not a complete MOSS-Image model: it has no {key}.")
        if len(shape) != ndim or shape[axis] < 1:
            raise MossError(f"{key}{self.place} has shape {list(shape)}, but needs {ndim} dimension(s), none empty.")
        return int(shape[axis])

    def count(self, group: str) -> int:
        """How many blocks ``group`` has; MossError when their numbers have a gap."""
        found = block_indices(self.shapes, group)
        for index in range(len(found)):
            if index not in found:
                raise MossError(f"{self.name} is not a complete MOSS-Image model: {group}.{index} is missing.")
        if not found or len(found) > _MAX_BLOCKS:
            raise MossError(f"{self.name} has {len(found)} blocks under {group}, which no MOSS-Image model has.")
        return len(found)


def block_indices(names: Iterable[str], group: str) -> set[int]:
    """The block numbers that occur in ``names`` under ``group`` ("layers" or "text_embedder.blocks")."""
    pattern = re.compile(re.escape(group) + r"\.(0|[1-9][0-9]{0,8})\.")
    return {int(found[1]) for name in names if (found := pattern.match(name))}
