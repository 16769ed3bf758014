"""Every rung the guard ever chooses: from what a bad model call showed to the next one worth computing it on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...fold.model.observer import CallObserver, Kind
from ...fold.report.counters import BlockStats
from ...fold.report.messages import Message, message, named
from ...fold.scaling.factors import Factors
from ...fold.scaling.plan import FP16_MAX, Mode, StreamPlan
from ..state import Path, Rung, RungKind

C_STEP = 2.0**-4
S_STEP, S_FLOOR = 2.0**-6, 2.0**-12


@dataclass(frozen=True)
class Evidence:
    """Where a call went out of range.

    stream: names of blocks whose stream did. attn, ffn: whether a block's o, or its ffn_down, did before that.
    """

    stream: tuple[str, ...] = ()
    attn: bool = False
    ffn: bool = False

    @property
    def writers(self) -> bool:
        return self.attn or self.ffn

    def reason(self) -> Message:
        """For the report: "layer.22 out of range, and the output of ffn_down"."""
        side = "attn" if self.attn else "ffn" if self.ffn else ""
        if not self.stream:
            return message(f"reason_{side or 'output'}")
        return message(f"reason_stream_{side}" if side else "reason_stream", blocks=named(self.stream))


class WriterWatch(CallObserver):
    """Looks at the writers of one call that already failed: which side of a block overflowed first, if one did.

    A stream that overflowed before makes every later value NaN, so what goes into a writer is looked at as well.
    """

    wants_inner = True

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the call before."""
        self.first: Kind | None = None
        self.asked = False

    def saw_anything(self) -> bool:
        return self.asked

    def inner(self, kind: Kind, layer: int, value: Tensor, scale: float) -> None:
        self.asked = True
        if self.first is not None:
            return
        match kind:
            case Kind.Q | Kind.FFN_UP_GATE if not bool(value.isfinite().all()):
                self.first = kind
            case Kind.O | Kind.FFN_DOWN if not bool((value.abs() < FP16_MAX).all()):
                self.first = kind
            case _:
                pass  # the text blocks' writers have no s, and a stream is in the counters


def evidence_of(blocks: Sequence[BlockStats], watch: WriterWatch | None) -> Evidence:
    """The evidence in a call's counters and, where it could be computed again under a `WriterWatch`, in that."""
    stream = tuple(b.name for b in blocks if b.saturated or b.non_finite)
    if watch is None:
        return Evidence(stream)
    return Evidence(stream, watch.first is Kind.O, watch.first is Kind.FFN_DOWN)


def next_rung(rung: Rung, evidence: Evidence, *, manageable: bool, path: Path, disproved: set[RungKind]) -> Rung | None:
    """The next rung, or None above the last.

    A writer's own output out of range needs s for its side (a smaller c does not reach it); a stream out of range needs
    a smaller c; then the stream goes to fp32, keeping s; then everything does. Only the managed forward has s.
    manageable: whether it can run this call. disproved: kinds of rungs that do not exist here.
    """
    for candidate in _rungs_above(rung, evidence, manageable):
        if exists(candidate, path, disproved):
            return candidate
    last = own_forward(rung.plan, path, torch.float32)
    return None if rung.dtype == torch.float32 else last


def _rungs_above(rung: Rung, evidence: Evidence, manageable: bool) -> Iterator[Rung]:
    plan, f = rung.plan, rung.plan.factors
    if rung.dtype is not None:
        return
    if manageable and evidence.writers and (shrunk := _shrink_s(f, evidence)) is not None:
        yield Rung(replace(plan, mode=_folded(plan), factors=shrunk), managed=True)
    if evidence.stream and not plan.fp32_stream and (step := _c_step(plan)) < 1.0:
        c = tuple(value * step for value in f.c)
        yield Rung(replace(plan, mode=_folded(plan), factors=replace(f, c=c)), managed=rung.managed)
    if manageable and not plan.fp32_stream:
        yield _wide_stream(plan, c=1.0)
    yield Rung(replace(plan, factors=f if rung.managed else Factors()), managed=rung.managed, dtype=torch.float32)


def _c_step(plan: StreamPlan) -> float:
    """What c is multiplied by: as far down as fp16 loses nothing by it; 1 or more where there is no such way."""
    step = C_STEP
    while plan.smallest_scale * step < plan.least_scale:
        step *= 2
    return step


def _wide_stream(plan: StreamPlan, c: float) -> Rung:
    return Rung(replace(plan, mode="fp32_residual", factors=replace(plan.factors, c=(c,))), managed=True)


def kind_of(rung: Rung, path: Path) -> RungKind | None:
    """What has to be proven of a rung: "fold" or "managed"; None for the class's own forward without a fix."""
    if rung.managed and path != "builtin":
        return "managed"
    plan = rung.plan
    if rung.managed and (plan.fp32_stream or plan.block_local):
        return "fold" if plan.baked.c[0] != 1.0 or plan.factors.c != (1.0,) else "managed"
    return "fold" if plan.factors.c != (1.0 / plan.baked.c[0],) else None


def exists(rung: Rung, path: Path, disproved: set[RungKind]) -> bool:
    """Whether a rung may be used where the proof of some kinds has failed.

    Where a fold failed, something unknown writes to the stream, which our own forward need not have.
    """
    kind = kind_of(rung, path)
    if kind is None or not disproved:
        return True
    return kind not in disproved and (path == "builtin" or "fold" not in disproved)


def own_forward(plan: StreamPlan, path: Path, dtype: torch.dtype | None) -> Rung:
    """The class's own forward without the fix. A fold in the weights is undone at run time.

    It is undone at the outputs of the writers, with the norms' stock eps: that is the function before the fold, and
    writers we do not know keep their scale. A recorded s needs nothing, as its effect stays inside a block.
    """
    factors = Factors(c=(1.0 / plan.baked.c[0],))
    return Rung(StreamPlan("none", factors, plan.baked), managed=path == "builtin", dtype=dtype)


def in_fp32(rung: Rung) -> Rung:
    """A rung as it is proven: exactly its function, in fp32, without the limits of a clamp or of stock eps."""
    return replace(rung, plan=replace(rung.plan, clamp=None, eps="exact"), dtype=torch.float32)


def writers_watched(rung: Rung) -> Rung:
    """A rung computed by the managed forward, which shows the blocks' own writers."""
    return replace(rung, managed=True)


def halved(rung: Rung) -> Rung:
    """The same function at half the stream's scale: the other side of the check by c and c/2."""
    return replace(rung, plan=rung.plan.halved())


def rungs_without_fold(rung: Rung, path: Path, computes_in: torch.dtype | None, *, has_bf16: bool) -> Iterator[Rung]:
    """Where a proof has failed: the class's own forward, no wider than it has to be to stay in range.

    Of the built-in class that may be the one with an fp32 stream, if that is proven for the call.
    """
    if path == "builtin" and not rung.plan.fp32_stream:
        yield _wide_stream(rung.plan, c=1.0 / rung.plan.baked.c[0])
    wide = torch.bfloat16 if has_bf16 else torch.float32
    yield own_forward(rung.plan, path, wide if computes_in == torch.float16 else None)


def _folded(plan: StreamPlan) -> Mode:
    """A plan that had no run-time factors becomes an online one when it gets some."""
    return "online" if plan.mode in ("none", "weights") else plan.mode


def _shrink_s(f: Factors, evidence: Evidence) -> Factors | None:
    """s one step down on the side that was out of range; None where it is at the floor."""
    attn = tuple(s * S_STEP for s in f.s_attn) if evidence.attn else ()
    ffn = tuple(s * S_STEP for s in f.s_ffn) if evidence.ffn else ()
    if min((*attn, *ffn)) < S_FLOOR:
        return None
    return replace(f, s_attn=attn or f.s_attn, s_ffn=ffn or f.s_ffn)
