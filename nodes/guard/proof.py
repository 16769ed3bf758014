"""The proof: a rung, computed in fp32, against the class's own forward in fp32 with nothing of ours at work.

In fp32 nothing overflows and next to nothing is rounded, so that the two agree to about 1e-6 where the rung computes
the class's function, and whatever it leaves out or scales wrongly shows undimmed. What fp16 itself does to a rung is
watched by the guard, call by call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace

import comfy.model_management as mm
import torch
from torch import Tensor

from ...fold.errors import MossError
from ...fold.report.report import SelfCheck
from ..state import Rung
from .call import ModelCall
from .ladder import in_fp32, own_forward
from .self_check import middle_difference, relative_difference
from .small_calls import SmallCall, small_calls, whole_call

log = logging.getLogger(__name__)

#: Relative L2 of the two velocities; see docs/proof.md for what was measured on either side of it.
BOUND = 2e-6
#: Beyond the bound, what the class's own forward makes of a latent moved by NUDGE (about two roundings) counts as
#: rounding, this many times: a deep model makes more of the roundings in which two forwards differ.
NUDGE, NUDGES = 2.0**-22, 32.0
#: Further off than any rounding, unless it tips something.
FAR = 1e-2
#: Latents asked before a rung is refused. A rounding may tip an attention that is all but undecided between two tokens,
#: in one latent of many; a class that is built otherwise is so on each.
LATENTS = 3


class Prover:
    """Proves rungs on one model call. What the class itself computes is computed once."""

    def __init__(self, call: ModelCall) -> None:
        self.call = call
        self._smalls = list(small_calls(call))
        self._own: dict[int, Tensor] = {}

    def prove(self, rung: Rung) -> SelfCheck:
        """Passed, failed, or not proven where neither a part of the call nor the whole could be computed in fp32."""
        while self._smalls:
            try:
                return self._compare(self._smalls[0], rung)
            except (MossError, mm.InterruptProcessingException):
                raise
            except Exception as error:
                log.info("The proof could not run on %s: %s", self._smalls[0].what, error)
                self._go_on_after(error)
        return SelfCheck("not proven", bound=BOUND)

    def _compare(self, small: SmallCall, rung: Rung) -> SelfCheck:
        """The best of a few latents; the first one settles it unless the rung would be refused."""
        found: list[SelfCheck] = []
        for number, call in enumerate(_latents(small.call)):
            one = self._on_one(number, call, rung, small.what)
            if one.result != "failed":
                return one
            found.append(one)
        return min(found, key=lambda check: check.rank)

    def _on_one(self, number: int, call: ModelCall, rung: Rung, what: str) -> SelfCheck:
        own = own_forward(rung.plan, self.call.fix.path, torch.float32)
        if number not in self._own:
            self._own[number] = _velocity(call, own)
        reference = self._own[number]
        if not bool(reference.isfinite().all()):
            return SelfCheck("not proven", bound=BOUND, compared=what)
        bound, difference = BOUND, relative_difference(reference, _velocity(call, in_fp32(rung)))
        if BOUND < difference < FAR:
            nudged = _velocity(replace(call, x=nudge(call.x)), own)
            bound = max(BOUND, NUDGES * middle_difference(reference, nudged))
        return SelfCheck("passed" if difference <= bound else "failed", difference, bound, what)

    def _go_on_after(self, error: Exception) -> None:
        """Out of memory: a smaller part. Anything else: a class that only runs on the whole call."""
        self._own.clear()
        tried = self._smalls.pop(0)
        if is_out_of_memory(error):
            mm.soft_empty_cache()
        else:
            self._smalls = [] if tried.whole else [whole_call(self.call)]


def _velocity(call: ModelCall, rung: Rung) -> Tensor:
    """Sigma times the velocity [B, C, h, w], fp32."""
    with eagerly():
        return call.x.float() - call.compute(rung, exact=True).float()


def _latents(call: ModelCall) -> Iterator[ModelCall]:
    """The call on latents that have nothing in common but their numbers."""
    flips: tuple[tuple[int, ...], ...] = ((), (-2,), (-1, -2))
    for flip in flips[:LATENTS]:
        yield replace(call, x=call.x.flip(flip)) if flip else call


def nudge(x: Tensor) -> Tensor:
    """x with every number moved by about two roundings, up and down in turns."""
    signs = torch.ones_like(x).flatten()
    signs[::2] = -1.0
    return x * (1.0 + NUDGE * signs.view_as(x))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is the device running out of memory, of any device type."""
    said = str(error).lower()
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        "memory" in said and ("out of memory" in said or "not enough memory" in said)
    )


def eagerly() -> contextlib.AbstractContextManager[None]:
    """Run without torch.compile, which would compile for minutes what runs once. Needs torch 2.6; no effect before."""
    stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if stance is None else stance("force_eager")
