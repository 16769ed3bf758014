"""The names that q, k and v have in the other layout: one weight where a model has three, three where it has one.

ComfyUI's adapter loaders take the names that an adapter may come under from the keys of the model's state dict. So the
built-in class lists the other layout's names there as well. They are names only: no memory, nothing to load or save.
`qkv_patcher` hands what comes under them on to the weights that are there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...fold.arch import MossArch
from ...fold.model.modules import module_at
from ...fold.qkv import COUNT, block_keys, join, row_range, split_parts
from ..model.moss import ROOT


class Joined(NamedTuple):
    """What the name of a fused weight stands for where q, k and v are weights of their own: `keys`, joined."""

    keys: tuple[str, ...]

    def read(self, weights: Mapping[str, Tensor]) -> Tensor:
        return join([weights[key] for key in self.keys])


class Slice(NamedTuple):
    """What the name of q, k or v stands for where they are one weight: `rows` rows from `start` on of the fused one."""

    key: str
    start: int
    rows: int

    def read(self, weights: Mapping[str, Tensor]) -> Tensor:
        return weights[self.key].narrow(0, self.start, self.rows)


Place = Joined | Slice


def other_names(arch: MossArch, fused: bool) -> dict[str, Place]:
    """The other layout's names in a model, as keys of ComfyUI's state dict. fused: q, k, v are one weight in it."""
    names: dict[str, Place] = {}
    for index in range(arch.depth):
        keys = block_keys(arch.names, index)
        whole, parts = f"{ROOT}.{keys.fused}", tuple(f"{ROOT}.{key}" for key in keys.split)
        if fused:
            for number, key in enumerate(parts):
                names[key] = Slice(whole, row_range(number, arch.dim).start, arch.dim)
        else:
            names[whole] = Joined(parts)
    return names


class NamedWeights(OrderedDict[str, Tensor]):
    """A state dict that knows its weights by other names, too.

    Iterating over it gives each weight once, which is how ComfyUI counts and saves. `keys()` and `in`, which the
    adapter loaders ask, know all names, and `[...]` answers to all of them. So `dict(...)` of one has all of them, too:
    use `plain()` for the weights alone.
    """

    def __init__(self, weights: Mapping[str, Tensor] | None = None, others: Mapping[str, Place] | None = None) -> None:
        super().__init__()
        self.others = dict(others or {})
        for key, weight in (weights or {}).items():
            self[key] = weight

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        return {**dict.fromkeys(self), **dict.fromkeys(self.others)}.keys()

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.others

    def __missing__(self, key: str) -> Tensor:
        if key not in self.others:
            raise KeyError(key)
        return self.others[key].read(self)

    def pop(self, key: str, *default: Any) -> Any:
        """As a dict's. Another name of a weight is forgotten and the weight stays, so there is nothing to return."""
        if self.others.pop(key, None) is not None:
            return None
        return super().pop(key, *default)

    def plain(self) -> OrderedDict[str, Tensor]:
        """Without the other names."""
        return OrderedDict(self.items())


def add_joined(tree: nn.Module, arch: MossArch) -> None:
    """Give every joint block of a model with split q, k, v a `JoinedLinear` under the fused layout's name."""
    joint = arch.names.joint
    for index in range(arch.depth):
        parts = [module_at(tree, joint.path(index, part)) for part in split_parts(joint)]
        above, _, name = joint.path(index, joint.qkv).rpartition(".")
        tree.get_submodule(above).add_module(name, JoinedLinear(parts))


class JoinedLinear(nn.Module):
    """q, k and v of a joint block as one linear, without weights of its own.

    Adapters in bypass mode wrap the forward of the module they are named after; this is the one for fused names.
    """

    def __init__(self, parts: list[Any]) -> None:
        super().__init__()
        self.parts = tuple(parts)  # in a tuple, so not modules of this one

    @property
    def idle(self) -> bool:
        """Whether nothing wraps the forward, so that q, k and v may as well be called one by one."""
        current = vars(self).get("forward")
        return current is None or getattr(current, "__self__", None) is self  # ComfyUI puts the method back like this

    @property
    def weight(self) -> Tensor:
        """Shape [3D, D] and dtype, for those who ask what an adapter has to fit; there is nothing in it."""
        part: Tensor = self.parts[0].weight
        return torch.empty(COUNT * part.shape[0], *part.shape[1:], dtype=part.dtype, device="meta")

    def forward(self, y: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, 3D]: q, k, v one after the other."""
        return join([part(y) for part in self.parts], dim=-1)
