"""The saturation report, `moss_fp16.report/1`: one JSON object per run, the same for the page, the API and the CLI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..scaling.plan import FP16_MAX, StreamPlan
from .counters import DEFAULT_THRESHOLD, BlockStats

SCHEMA = "moss_fp16.report/1"


@dataclass(frozen=True)
class Rescue:
    """A model call the guard computed again: at which step and sigma, on which rung, and why."""

    step: int
    sigma: float
    rung: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What one run did and reached. Dtypes are short names ("fp16"); max_abs is of the streams as stored."""

    node_id: str
    mode: str
    engine: str
    compute_dtype: str
    stream_dtype: str
    factors: dict[str, Any]
    blocks: Sequence[BlockStats] = ()
    threshold: float = DEFAULT_THRESHOLD
    model_calls: int = 0
    steps: int = 0
    rescues: Sequence[Rescue] = ()
    warnings: Sequence[str] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types only: an infinite peak is null, as are its headroom bits."""
        blocks = [block_json(b) for b in self.blocks]
        return {
            "schema": SCHEMA,
            "node_id": self.node_id,
            "mode": self.mode,
            "engine": self.engine,
            "compute_dtype": self.compute_dtype,
            "stream_dtype": self.stream_dtype,
            "factors": self.factors,
            "threshold": self.threshold,
            "model_calls": self.model_calls,
            "steps": self.steps,
            "blocks": blocks,
            "rescues": [asdict(r) for r in self.rescues],
            "summary": summary(self.blocks),
            "warnings": list(self.warnings),
            **self.extra,
        }


def headroom_bits(max_abs: float) -> float | None:
    """log2(65504 / max_abs): how many doublings are left. None at 0 and where something was not finite."""
    if max_abs <= 0 or not math.isfinite(max_abs):
        return None
    return math.log2(FP16_MAX / max_abs)


def block_json(block: BlockStats) -> dict[str, Any]:
    return {
        "name": block.name,
        "max_abs": block.max_abs if math.isfinite(block.max_abs) else None,
        "over": block.over,
        "saturated": block.saturated,
        "clamped": block.clamped,
        "non_finite": block.non_finite,
        "headroom_bits": headroom_bits(block.max_abs),
    }


def summary(blocks: Sequence[BlockStats]) -> dict[str, Any]:
    """The worst block and the totals."""
    worst = max(blocks, key=lambda b: b.max_abs, default=None)
    peak = worst.max_abs if worst else 0.0
    return {
        "peak": peak if math.isfinite(peak) else None,
        "block": worst.name if worst and peak > 0 else None,
        "headroom_bits": headroom_bits(peak),
        "saturated": sum(b.saturated for b in blocks),
        "clamped": sum(b.clamped for b in blocks),
        "non_finite": sum(b.non_finite for b in blocks),
    }


def factors_json(plan: StreamPlan) -> dict[str, Any]:
    """The factors at work: the run's own, and the fold the weights carry where there is one."""
    shown: dict[str, Any] = {**plan.factors.to_json(), "eps": plan.eps}
    if not plan.baked.identity:
        shown["baked"] = plan.baked.to_json()
    if plan.clamp is not None:
        shown["clamp"] = plan.clamp
    return shown
