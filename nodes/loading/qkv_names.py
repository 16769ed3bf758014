"""The names that q, k and v have in the other layout: one `proj.qkv` [3D, D] where a model has them apart, or three.

ComfyUI's adapter loaders take the names that an adapter may come under from the keys of the model's state dict. So the
built-in class lists the other layout's names there as well. They are names only: no memory, nothing to load or save.
What comes under them is handed on to the weights that are there by `patcher`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..model.moss import ROOT

LETTERS = "qkv"


@dataclass(frozen=True)
class Apart:
    """What the name of a fused weight stands for where its three thirds are weights of their own."""

    keys: tuple[str, str, str]

    def read(self, weights: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([weights[key] for key in self.keys])


@dataclass(frozen=True)
class Within:
    """What the name of q, k or v stands for where it is `rows` rows, from `start` on, of a fused weight."""

    key: str
    start: int
    rows: int

    def read(self, weights: Mapping[str, Tensor]) -> Tensor:
        return weights[self.key].narrow(0, self.start, self.rows)


Place = Apart | Within


def other_names(depth: int, dim: int, fused: bool) -> dict[str, Place]:
    """The other layout's names in a model of `depth` blocks of width `dim`, as keys of ComfyUI's state dict."""
    names: dict[str, Place] = {}
    for layer in range(depth):
        whole = f"{ROOT}.layers.{layer}.proj.qkv.weight"
        q, k, v = (f"{ROOT}.layers.{layer}.proj.{letter}.weight" for letter in LETTERS)
        if fused:
            names |= {key: Within(whole, i * dim, dim) for i, key in enumerate((q, k, v))}
        else:
            names[whole] = Apart((q, k, v))
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


class Joined(nn.Module):
    """q, k and v of a joint block under the fused layout's name, without weights of its own.

    Adapters in bypass mode wrap the forward of the module they are named after; this is the one for fused names.
    """

    def __init__(self, proj: Any) -> None:
        super().__init__()
        self.parts = tuple(getattr(proj, letter) for letter in LETTERS)  # in a tuple, so not modules of this one

    @property
    def idle(self) -> bool:
        """Whether nothing wraps the forward, so that q, k and v may as well be called one by one."""
        current = vars(self).get("forward")
        return current is None or getattr(current, "__self__", None) is self  # ComfyUI puts the method back like this

    @property
    def weight(self) -> Tensor:
        """Shape [3D, D] and dtype, for those who ask what an adapter has to fit; there is nothing in it."""
        part: Tensor = self.parts[0].weight
        return torch.empty(len(self.parts) * part.shape[0], *part.shape[1:], dtype=part.dtype, device="meta")

    def forward(self, y: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, 3D]: q, k, v one after the other."""
        return torch.cat([part(y) for part in self.parts], dim=-1)
