"""q, k and v of a joint block: three matrices [D, D], or one [3D, D] whose rows are q, k, v in this order.

The one place that knows that order, and the keys of either layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .arch import MossArch
from .names import JointBlock, ModuleNames, Part

if TYPE_CHECKING:
    from torch import Tensor

COUNT = 3


def split_parts(joint: JointBlock) -> tuple[Part, Part, Part]:
    """The three matrices, in the order of the fused one's rows."""
    return joint.q, joint.k, joint.v


class Keys(NamedTuple):
    """The keys of one block's weights in either layout: the fused one's, and those of q, k, v."""

    fused: str
    split: tuple[str, ...]


def block_keys(names: ModuleNames, index: int) -> Keys:
    """The keys of joint block ``index``."""
    joint = names.joint
    split = tuple(f"{joint.path(index, part)}.weight" for part in split_parts(joint))
    return Keys(f"{joint.path(index, joint.qkv)}.weight", split)


def keys_with(name: str, names: ModuleNames) -> Keys | None:
    """The keys of the block that ``name`` is the fused weight of, or one of q, k, v; None for any other key."""
    path, _, leaf = name.rpartition(".")
    joint = names.joint
    if leaf != "weight" or names.block_of(path) is not joint or names.of(path) not in (joint.qkv, *split_parts(joint)):
        return None
    return block_keys(names, int(path.removeprefix(f"{joint.blocks}.").partition(".")[0]))


def row_range(index: int, rows: int) -> slice:
    """Where the ``rows`` rows of q (``index`` 0), k (1) or v (2) lie in the fused matrix."""
    return slice(index * rows, (index + 1) * rows)


def split(fused: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """q, k, v as views of the fused matrix (``dim`` 0), or of what it returned (its last axis)."""
    return fused.chunk(COUNT, dim=dim)


def join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The fused matrix of q, k, v (``dim`` 0), or of what they returned (its last axis)."""
    import torch

    return torch.cat(tuple(parts), dim=dim)


def split_state_dict(tensors: Mapping[str, Tensor], arch: MossArch) -> dict[str, Tensor]:
    """The same state dict (bare keys) with q, k, v of every block as views of its fused weight."""
    result = dict(tensors)
    for index in range(arch.depth):
        keys = block_keys(arch.names, index)
        result |= zip(keys.split, split(result.pop(keys.fused)), strict=True)
    return result


def join_state_dict(tensors: Mapping[str, Tensor], arch: MossArch) -> dict[str, Tensor]:
    """The same state dict (bare keys) with q, k, v of every block joined to its fused weight."""
    result = dict(tensors)
    for index in range(arch.depth):
        keys = block_keys(arch.names, index)
        result[keys.fused] = join([result.pop(key) for key in keys.split])
    return result
