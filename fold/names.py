"""The modules of MOSS-Image, by name and by role: the one table that everything else reads them from.

A module that is called otherwise in another class is another value of `ModuleNames` (see `ModuleNames.renamed`); no
other file spells a module's path.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

#: The rows of the shared modulation, in units of the model width: shift, scale and gate of attention, then of the FFN.
MODULATION = ("shift_a", "scale_a", "gate_a", "shift_f", "scale_f", "gate_f")
GATE_ATTN, GATE_FFN = MODULATION.index("gate_a"), MODULATION.index("gate_f")
#: The rows of the head's modulation.
HEAD_MODULATION = ("head_shift", "head_scale")


class Role(Enum):
    """What a module is to the two residual streams, and with that what a fold does to it (c, s_attn, s_ffn)."""

    STREAM_WRITER = auto()  # its output is a stream or is added to one: times c
    ATTN_WRITER = auto()  # its output is added to the stream through the attention gate: times s_attn
    FFN_WRITER = auto()  # its output is added to the stream through the FFN gate: times s_ffn
    GATES = auto()  # the shared modulation; its two rows of gates: times c / s
    STREAM_NORM = auto()  # an RMSNorm that reads a stream: eps times c^2
    HEAD_NORM = auto()  # an RMSNorm over one attention head, which reads no stream
    CONDITIONING = auto()  # made from sigma alone
    OUTPUT = auto()  # behind the last stream norm
    LINEAR = auto()  # between a norm and a writer: untouched


NORMS = frozenset({Role.STREAM_NORM, Role.HEAD_NORM})
#: Norms, conditioning and head: small, and half of the rounding error if they were not fp32.
FP32_ROLES = NORMS | {Role.GATES, Role.CONDITIONING, Role.OUTPUT}


class Part(NamedTuple):
    """One linear or norm: its path (below its block where it has one), role, and sizes.

    rows, columns: a size of `MossArch`, perhaps with a factor, such as "6 dim"; a norm has rows only. fused: whether
    it is there with q, k, v as one matrix (True) or as three (False) only; None: in either layout.
    """

    path: str
    role: Role
    rows: str
    columns: str = ""
    bias: bool = False
    fused: bool | None = None


_T = TypeVar("_T", bound="_Table")


class _Table:
    """Parts by field name: the class's own, but for those given. Equal where all are; never changed once made.

    TypeError for a field that the class does not have, AttributeError for setting one.

    No dataclasses, here and below: to make them would take longer than all the rest of what `inspect` imports.
    """

    def __init__(self, **given: Any) -> None:
        if unknown := given.keys() - type(self).__annotations__.keys():
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        # the class's own values, too: torch 2.4 cannot compile code that reads them off the class
        self.__dict__.update(self.fields() | given)

    def __setattr__(self, name: str, value: Any) -> None:
        # what is cached below goes into __dict__ by another way
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: make another table with replaced()")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    def __repr__(self) -> str:
        """The call that makes it: the class's own fields are left out."""
        own = [f"{name}={value!r}" for name, value in self.fields().items() if value != getattr(type(self), name, None)]
        return f"{type(self).__name__}({', '.join(own)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.fields() == other.fields()

    def __hash__(self) -> int:
        return hash(tuple(self.fields().values()))

    def fields(self) -> dict[str, Any]:
        """Field name -> what it holds, parts and paths."""
        return {name: getattr(self, name) for name in type(self).__annotations__}

    def replaced(self: _T, **given: Any) -> _T:
        """The same table with other values for some fields."""
        return type(self)(**(self.fields() | given))

    @cached_property
    def parts(self) -> Mapping[str, Part]:
        """Field name -> part."""
        return {name: value for name, value in self.fields().items() if isinstance(value, Part)}

    @cached_property
    def by_path(self) -> Mapping[str, Part]:
        """Path -> part."""
        return {part.path: part for part in self.parts.values()}


class Block(_Table):
    """The modules of one block of a kind. blocks: the path of the list of them."""

    blocks: str

    def path(self, index: int, part: Part | None = None) -> str:
        """The path of a block, or of one of its modules."""
        return f"{self.blocks}.{index}" + (f".{part.path}" if part is not None else "")

    def pattern(self, part: Part) -> str:
        """What names one module's parameters in all blocks, as a line of parameter dtypes takes it."""
        return f"{self.blocks}.*.{part.path}.*"


class TextBlock(Block):
    """The modules of one text refiner block."""

    blocks: str = "text_embedder.blocks"
    norm1: Part = Part("norm1", Role.STREAM_NORM, "dim")
    norm2: Part = Part("norm2", Role.STREAM_NORM, "dim")
    q_norm: Part = Part("q_norm", Role.HEAD_NORM, "head_dim")
    k_norm: Part = Part("k_norm", Role.HEAD_NORM, "head_dim")
    qkv: Part = Part("qkv", Role.LINEAR, "3 dim", "dim", bias=True)
    proj: Part = Part("proj", Role.STREAM_WRITER, "dim", "dim", bias=True)
    ffn_gate: Part = Part("ffn_gate", Role.LINEAR, "text_ffn_dim", "dim", bias=True)
    ffn_up: Part = Part("ffn_up", Role.LINEAR, "text_ffn_dim", "dim", bias=True)
    ffn_down: Part = Part("ffn_down", Role.STREAM_WRITER, "dim", "text_ffn_dim", bias=True)


class JointBlock(Block):
    """The modules of one joint block."""

    blocks: str = "layers"
    norm1: Part = Part("norm1", Role.STREAM_NORM, "dim")
    norm2: Part = Part("norm2", Role.STREAM_NORM, "dim")
    q_norm: Part = Part("q_norm", Role.HEAD_NORM, "head_dim")
    k_norm: Part = Part("k_norm", Role.HEAD_NORM, "head_dim")
    qkv: Part = Part("proj.qkv", Role.LINEAR, "3 dim", "dim", fused=True)
    q: Part = Part("proj.q", Role.LINEAR, "dim", "dim", fused=False)
    k: Part = Part("proj.k", Role.LINEAR, "dim", "dim", fused=False)
    v: Part = Part("proj.v", Role.LINEAR, "dim", "dim", fused=False)
    o: Part = Part("proj.o", Role.ATTN_WRITER, "dim", "dim")
    ffn_up_gate: Part = Part("proj.ffn_up_gate", Role.LINEAR, "2 ffn_dim", "dim")
    ffn_down: Part = Part("proj.ffn_down", Role.FFN_WRITER, "dim", "ffn_dim")


class ModuleNames(_Table):
    """All modules: those there is one of, and those of a block. rope_bands: the key of RoPE's bands."""

    video_embedder: Part = Part("video_embedder", Role.STREAM_WRITER, "dim", "latent_channels", bias=True)
    text_proj: Part = Part("text_embedder.proj", Role.STREAM_WRITER, "dim", "text_dim", bias=True)
    time_in: Part = Part("time_embedding.0", Role.CONDITIONING, "dim", "freq_dim", bias=True)
    time_out: Part = Part("time_embedding.2", Role.CONDITIONING, "dim", "dim", bias=True)
    shared_block_modulation: Part = Part("shared_block_modulation", Role.GATES, "6 dim", "dim", bias=True)
    video_head_modulation: Part = Part("video_head_modulation", Role.CONDITIONING, "2 dim", "dim", bias=True)
    final_norm_video: Part = Part("final_norm_video", Role.STREAM_NORM, "dim")
    final_linear_video: Part = Part("final_linear_video", Role.OUTPUT, "latent_channels", "dim")
    text: TextBlock = TextBlock()
    joint: JointBlock = JointBlock()
    rope_bands: str = "rope.bands"

    def markers(self) -> tuple[str, ...]:
        """Paths by which the model is recognised: no other model family has modules of these names."""
        marks = (self.shared_block_modulation, self.video_head_modulation, self.final_linear_video)
        return tuple(part.path for part in marks)

    def of(self, path: str) -> Part | None:
        """The part at a module's path, whatever its block's number; None for what is no module of the table."""
        block = self.block_of(path)
        if block is None:
            return self.by_path.get(path)
        number, _, inside = path.removeprefix(f"{block.blocks}.").partition(".")
        return block.by_path.get(inside) if number.isdecimal() else None

    def block_of(self, path: str) -> TextBlock | JointBlock | None:
        """The kind of block that a path lies in, or None."""
        return next((block for block in (self.text, self.joint) if path.startswith(f"{block.blocks}.")), None)

    def is_fp32(self, path: str) -> bool:
        """Whether the module at a path keeps fp32 parameters whatever the model computes in."""
        part = self.of(path)
        return part.role in FP32_ROLES if part is not None else path == self.rope_bands.rpartition(".")[0]

    def is_norm(self, path: str) -> bool:
        """Whether the module at a path is one of the table's RMSNorms."""
        part = self.of(path)
        return part is not None and part.role in NORMS

    def renamed(self, paths: Mapping[str, str]) -> ModuleNames:
        """The same table with other paths for some modules, old -> new.

        The old path of a block's module has a star for the block's number (`layers.*.proj.o`) and its new one begins
        below the block (`attention.out`); a list of blocks goes by its own path (`layers`). KeyError for an old path
        that is not in the table.
        """
        left = dict(paths)

        def changes(table: _Table, prefix: str) -> dict[str, Any]:
            found = {name: left.pop(prefix + part.path, None) for name, part in table.parts.items()}
            return {name: table.parts[name]._replace(path=new) for name, new in found.items() if new is not None}

        blocks: dict[str, Any] = {}
        for name, block in (("text", self.text), ("joint", self.joint)):
            changed = changes(block, f"{block.blocks}.*.")
            blocks[name] = block.replaced(blocks=left.pop(block.blocks, block.blocks), **changed)
        whole = changes(self, "") | blocks
        whole["rope_bands"] = left.pop(self.rope_bands, self.rope_bands)
        if left:
            raise KeyError(f"{', '.join(left)}: no module of this table")
        return self.replaced(**whole)


OFFICIAL = ModuleNames()
