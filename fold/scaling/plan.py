"""What one run does to the residual streams: a plan, resolved per block before the first step.

Every reader of a stream is an RMSNorm, so a stream scaled by c computes the same function as long as each writer is
scaled by c too and the norm's eps by c^2. The plan holds the numbers; `fold/model/forward.py` applies them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from ..errors import MossError
from .factors import DEFAULT, IDENTITY, Factors, GivenFactors
from .record import NO_FOLD, StoredFold

Mode = Literal["none", "weights", "online", "fp32_residual"]
Eps = Literal["exact", "stock"]

FP16_MAX = 65504.0

#: The smallest scale of a stream in fp16. Outside a few massive channels MOSS's values are about 1, and fp16 has all of
#: its 11 bits down to 2^-14: at 2^-12 even a quarter of that keeps them. Each halving below takes one more away.
SMALLEST_SCALE = 2.0**-12
#: The smallest scale with eps = stock. Next to a mean square of about 1 the norms' eps of 1e-6 counts for 1e-6 / c^2:
#: at 1/16 that is 2.6e-4, less than fp16's own rounding (4.9e-4), at 1/32 1e-3, and at 1/1024 as much as the stream.
SMALLEST_STOCK_SCALE = 2.0**-4


@dataclass(frozen=True)
class BlockScale:
    """The run-time multipliers of one joint block.

    rescale: stream x this before the block (c_l / c_{l-1}; for block 0 against c_0, so 1).
    gate_attn, gate_ffn: the modulation's gates x these (c_l / s_l).
    s_attn, s_ffn: inputs of `o` and `ffn_down` x these.
    unscale: what the norms multiply the stream by, so that their own eps is exact (1 under stock eps).
    """

    rescale: float
    gate_attn: float
    gate_ffn: float
    s_attn: float
    s_ffn: float
    unscale: float


@dataclass(frozen=True)
class StreamPlan:
    """How the two residual streams run.

    mode: the label shown to people. factors: applied at run time. baked: already in the weights (a recorded fold).
    eps: "exact" keeps the function, "stock" leaves the norms' eps at 1e-6 on the scaled stream.
    clamp: the joint stream is limited to +-clamp after each add, or not at all.
    """

    mode: Mode = "none"
    factors: Factors = IDENTITY
    baked: Factors = IDENTITY
    eps: Eps = "exact"
    clamp: float | None = None

    def __post_init__(self) -> None:
        if not self.baked.uniform:
            raise MossError("A fold recorded in a file is uniform, but this plan was given one per block.")
        if self.clamp is not None and not 0 < self.clamp < float("inf"):
            raise MossError(f"The clamp must be a positive, finite number, not {self.clamp}.")

    @property
    def fp32_stream(self) -> bool:
        """Whether both streams are stored in fp32."""
        return self.mode == "fp32_residual"

    @property
    def block_local(self) -> bool:
        """True where something must act inside a block, which only the managed path can do."""
        f = self.factors
        folds_writers = any(s != 1.0 for s in (*f.s_attn, *f.s_ffn))
        return self.fp32_stream or self.clamp is not None or not f.uniform or folds_writers

    @property
    def entry(self) -> float:
        """Multiplier of the embedders' and the text refiner's outputs: c_0."""
        return self.factors.c[0]

    @property
    def smallest_scale(self) -> float:
        """The smallest scale that a stream is stored at: a block's c times the c that the weights carry."""
        return min(self.factors.c) * self.baked.c[0]

    @property
    def least_scale(self) -> float:
        """The least that `smallest_scale` may be without a loss, in fp16 and under this plan's eps."""
        return SMALLEST_STOCK_SCALE if self.eps == "stock" else SMALLEST_SCALE

    @property
    def loses_bits(self) -> bool:
        """Whether a stream in fp16 loses bits to the factor."""
        return self.smallest_scale < SMALLEST_SCALE

    @property
    def eps_counts(self) -> bool:
        """Whether stock eps changes the function by more than fp16's own rounding."""
        return self.eps == "stock" and self.smallest_scale < self.least_scale

    def unscale(self, c: float) -> float:
        """What a norm multiplies a stream of run-time scale `c` by before it applies its own, unscaled eps."""
        return 1.0 if self.eps == "stock" else 1.0 / (c * self.baked.c[0])

    def blocks(self, depth: int) -> tuple[BlockScale, ...]:
        """The scales of `depth` joint blocks. Raises MossError when a per-block list has another length."""
        full = self.factors.expand(depth)
        out, before = [], full.c[0]
        for c, s_attn, s_ffn in zip(full.c, full.s_attn, full.s_ffn, strict=True):
            out.append(BlockScale(c / before, c / s_attn, c / s_ffn, s_attn, s_ffn, self.unscale(c)))
            before = c
        return tuple(out)

    def exit_unscale(self, depth: int) -> float:
        """The final norm's multiplier: the last block's scale undone."""
        return self.unscale(self.factors.expand(depth).c[-1])

    def halved(self) -> StreamPlan:
        """The same function at half the stream's scale: the other side of the self-check.

        Under stock eps that takes norms that see the stream doubled again; it needs one c for all blocks, and with one
        c per block eps counts for twice as much on the halved side.
        """
        half = replace(self, factors=replace(self.factors, c=tuple(c / 2 for c in self.factors.c)))
        if self.eps == "exact" or not self.factors.uniform:
            return half
        return replace(half, eps="exact", baked=Factors((1.0 / self.factors.c[0],)))


def plan_for(
    fix: Literal["auto", "none", "online", "fp32_residual"],
    *,
    half: bool,
    stored: StoredFold = NO_FOLD,
    factors: GivenFactors | None = None,
    eps: Eps | None = None,
    clamp: float | None = None,
) -> StreamPlan:
    """Choose the plan from what the user asked for and what the weights carry.

    half: the compute dtype is fp16. stored: the fold of the file. factors, eps: the user's own, over every default; a c
    that was left out is the one that the fix would have used for itself.

    auto: a recorded fold that was taken out is applied online with the same factors; one still in the weights is left
    at work ("weights"); fp16 without a record gets c = 1/16; bf16 and fp32 need nothing.
    """
    plan = _chosen(fix, half, stored, factors, eps, clamp)
    return _for_fp16(plan) if half else plan


def _chosen(
    fix: str, half: bool, stored: StoredFold, factors: GivenFactors | None, eps: Eps | None, clamp: float | None
) -> StreamPlan:
    """`plan_for`, whatever numbers fp16 can hold."""
    kept_eps: Eps = eps or stored.eps
    own = IDENTITY if stored.kept or fix == "fp32_residual" else stored.record.factors if stored.record else DEFAULT
    given = factors.with_c(own.c) if factors is not None else None
    match fix:
        case "none":
            mode: Mode = "weights" if stored.kept else "none"
            return StreamPlan(mode, IDENTITY, stored.in_weights, kept_eps, clamp)
        case "fp32_residual" | "online":
            return StreamPlan(fix, given or own, stored.in_weights, kept_eps, clamp)
        case "auto" if given is not None or stored.unfolded:
            return StreamPlan("online", given or own, stored.in_weights, kept_eps, clamp)
        case "auto" if stored.kept:
            return StreamPlan("weights", IDENTITY, stored.in_weights, kept_eps, clamp)
        case "auto":
            return StreamPlan("online" if half else "none", DEFAULT if half else IDENTITY, IDENTITY, kept_eps, clamp)
        case _:
            raise MossError(f"The fix is one of auto, none, online or fp32_residual, not {fix!r}.")


def _for_fp16(plan: StreamPlan) -> StreamPlan:
    """The same function in fp16. Raises MossError for a multiplier of an fp16 tensor that fp16 cannot hold.

    A clamp above fp16's maximum is one at its maximum. A stream in fp32 takes any c, but s multiplies fp16 in any mode.
    """
    f = plan.factors
    for field, values in (("s_attn", f.s_attn), ("s_ffn", f.s_ffn), ("c", () if plan.fp32_stream else f.c)):
        if values and max(values) > FP16_MAX:
            raise MossError(f"{field} is {max(values):g}, but in fp16 it must not be above 65504: give a smaller one.")
    if plan.fp32_stream:
        return plan
    steps = [after / before for before, after in pairwise(f.c)]
    if max(steps, default=1.0) > FP16_MAX:
        raise MossError(
            f"c grows {max(steps):g}-fold from one block to the next, but in fp16 it must not by more than 65504."
        )
    return plan if plan.clamp is None else replace(plan, clamp=min(plan.clamp, FP16_MAX))
