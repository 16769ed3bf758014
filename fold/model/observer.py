"""What a forward shows of itself to whoever counts or measures."""

from __future__ import annotations

from torch import Tensor


class Observer:
    """What a forward shows of itself. The base class looks at nothing."""

    #: False spares the forward the calls to `inner`.
    wants_inner: bool = False

    def stream(self, site: int, x: Tensor) -> None:
        """The stream [B, S, D] as stored after site's block; text refiner blocks come before the joint blocks."""

    def clamping(self, site: int, x: Tensor, limit: float) -> None:
        """The joint stream just before it is clamped to +-limit."""

    def inner(self, kind: str, layer: int, value: Tensor, scale: float) -> None:
        """`value` inside joint block `layer` (a text block for the kinds text_*), `scale` times what it truly is."""
