"""What a forward shows of itself to whoever counts or measures."""

from __future__ import annotations

from enum import Enum, auto

from torch import Tensor


class Kind(Enum):
    """The values inside the model that a forward shows to an observer that wants them.

    ENTRY and TEXT_ENTRY are the two streams before their first block, MID and TEXT_MID between a block's attention and
    its FFN. O and FFN_DOWN are what a block adds to the stream, FFN_UP_GATE what goes into its activation, Q and K the
    queries and keys [B, H, S, Dh], each Q followed by its K.
    """

    ENTRY = auto()
    Q = auto()
    K = auto()
    O = auto()
    MID = auto()
    FFN_UP_GATE = auto()
    FFN_DOWN = auto()
    TEXT_ENTRY = auto()
    TEXT_Q = auto()
    TEXT_K = auto()
    TEXT_O = auto()
    TEXT_MID = auto()
    TEXT_FFN_DOWN = auto()


class Observer:
    """What a forward shows of itself. The base class looks at nothing."""

    #: False spares the forward the calls to `inner` and `modulation`.
    wants_inner: bool = False

    def stream(self, site: int, x: Tensor) -> None:
        """The stream [B, S, D] as stored after site's block; text refiner blocks come before the joint blocks."""

    def clamping(self, site: int, x: Tensor, limit: float) -> None:
        """The joint stream just before it is clamped to +-limit."""

    def inner(self, kind: Kind, layer: int, value: Tensor, scale: float) -> None:
        """`value` inside joint block `layer` (a text block for the kinds TEXT_*), `scale` times what it truly is."""

    def modulation(self, row: str, value: Tensor) -> None:
        """One row [B, D] of the shared modulation or of the head's, by its name in MODULATION or HEAD_MODULATION."""


class CallObserver(Observer):
    """An observer of one call at a time."""

    def begin(self) -> None:
        """Forget the call before."""
        raise NotImplementedError

    def saw_anything(self) -> bool:
        """Whether the call in progress ran any block."""
        raise NotImplementedError
