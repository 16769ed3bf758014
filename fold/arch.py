"""The geometry of a MOSS-Image model, read off its tensor shapes, and the state dict that goes with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from .errors import MossError
from .names import OFFICIAL, Block, ModuleNames, Part, Role

# RoPE uses four axes, and a half of each head: a head's width is a multiple of this.
_HEAD_UNIT = 8
_MAX_BLOCKS = 4096


# Without slots: torch 2.4 cannot compile what reads the table of names through one.
@dataclass(frozen=True)
class MossArch:
    """Sizes of one model, and its modules' names.

    All sizes but ``rope_base``, ``eps`` and ``time_scale`` can be read off tensor shapes.
    """

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
    names: ModuleNames = field(default=OFFICIAL, repr=False)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    def sizes(self) -> dict[str, int | float]:
        """Everything but the names, as a JSON-able dict."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "names"}

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, Sequence[int]], where: str = "", names: ModuleNames = OFFICIAL
    ) -> MossArch:
        """Read the geometry off ``shapes`` (bare key -> shape); keys that are not MOSS's are ignored.

        ``where`` names the file or model in the MossError raised when a key is missing or its shape makes no sense.
        """
        reader, text, joint = _ShapeReader(shapes, where), names.text, names.joint
        dim = reader.size(joint.path(0, joint.norm1), 0)
        head_dim = reader.size(joint.path(0, joint.q_norm), 0)
        if head_dim % _HEAD_UNIT or dim % head_dim:
            raise MossError(
                f"{joint.path(0, joint.q_norm)}.weight{reader.place} has length {head_dim}, but a head's width must be "
                f"a multiple of {_HEAD_UNIT} that divides the model width {dim}."
            )
        up_gate = reader.size(joint.path(0, joint.ffn_up_gate), 0, ndim=2)
        if up_gate % 2:
            raise MossError(
                f"{joint.path(0, joint.ffn_up_gate)}.weight{reader.place} has {up_gate} rows, but needs an even number."
            )
        freq_dim = reader.size(names.time_in.path, 1, ndim=2)
        if freq_dim % 2:
            raise MossError(
                f"{names.time_in.path}.weight{reader.place} has {freq_dim} columns, but needs an even number."
            )
        return cls(
            dim=dim,
            depth=reader.count(joint.blocks),
            heads=dim // head_dim,
            ffn_dim=up_gate // 2,
            text_dim=reader.size(names.text_proj.path, 1, ndim=2),
            text_blocks=reader.count(text.blocks),
            text_ffn_dim=reader.size(text.path(0, text.ffn_up), 0, ndim=2),
            latent_channels=reader.size(names.video_embedder.path, 1, ndim=2),
            freq_dim=freq_dim,
            names=names,
        )

    def modules(self, fused: bool) -> Iterator[tuple[str, Part]]:
        """Every linear and norm with its path; ``fused``: one ``qkv`` per joint block instead of q, k, v."""
        for part in self.names.parts.values():
            yield part.path, part
        for block, count in self._blocks():
            parts = [part for part in block.parts.values() if part.fused in (None, fused)]
            for index in range(count):
                for part in parts:
                    yield block.path(index, part), part

    def paths(self, *roles: Role) -> tuple[str, ...]:
        """The paths of the modules that have one of ``roles``; q, k, v only where they are one matrix."""
        return tuple(path for path, part in self.modules(fused=True) if part.role in roles)

    def block_paths(self) -> tuple[str, ...]:
        """The paths of all blocks: text refiner, then joint ones."""
        return tuple(block.path(index) for block, count in self._blocks() for index in range(count))

    def shape(self, part: Part) -> tuple[int, ...]:
        """The shape of a module's weight."""
        return tuple(self._size(size) for size in (part.rows, part.columns) if size)

    def expected_shapes(self, fused: bool) -> dict[str, tuple[int, ...]]:
        """Every bare key of the state dict with its shape; ``fused``: one ``qkv`` per joint block instead of q, k, v.

        ``rope.bands`` is included although a file may leave it out (it is derived).
        """
        shapes: dict[str, tuple[int, ...]] = {self.names.rope_bands: (self.head_dim // _HEAD_UNIT,)}
        for path, part in self.modules(fused):
            shapes[f"{path}.weight"] = self.shape(part)
            if part.bias:
                shapes[f"{path}.bias"] = shapes[f"{path}.weight"][:1]
        return shapes

    def _blocks(self) -> tuple[tuple[Block, int], ...]:
        return (self.names.text, self.text_blocks), (self.names.joint, self.depth)

    def _size(self, text: str) -> int:
        """A size of the table of modules: "dim", or "6 dim"."""
        factor, _, name = text.rpartition(" ")
        return int(factor or 1) * int(getattr(self, name))


class _ShapeReader:
    """Looks sizes up in a mapping of shapes, with an error that names the key and the file."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], where: str) -> None:
        self.shapes = shapes
        self.name = where or "This state dict"
        self.place = f" in {where}" if where else ""

    def size(self, path: str, axis: int, ndim: int = 1) -> int:
        """One size of the weight of the module at ``path``, at least 1."""
        key = f"{path}.weight"
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
    """The block numbers that occur in the keys ``names`` under the list of blocks ``group`` ("layers")."""
    pattern = re.compile(re.escape(group) + r"\.(0|[1-9][0-9]{0,8})\.")
    return {int(found[1]) for name in names if (found := pattern.match(name))}
