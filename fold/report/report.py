"""The saturation report, `moss_fp16.report/1`: one JSON object per run, the same for the page, the API and the CLI.

`make_report` is the one place that builds it. Whoever shows one reads the level of each block, the outcome and the
verdict from it and judges nothing again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from ..dtypes import dtype_name
from ..scaling.factors import Factors, factor_text
from ..scaling.plan import FP16_MAX, SMALLEST_SCALE, Eps, StreamPlan
from .counters import DEFAULT_THRESHOLD, BlockStats
from .messages import Message, by_importance, message, named

SCHEMA = "moss_fp16.report/1"

#: How near a block came to fp16's limit. low: under LOW_BITS of headroom. A stream in fp32 or bf16 has no such limit,
#: so there every finite block is ok.
Level = Literal["ok", "low", "saturated", "not_finite"]
#: What became of the image. unknown: nothing was counted, or the factor is too small for fp16 to hold the stream, which
#: no counter sees. saturated: values hit the limit and were not computed again.
Outcome = Literal["ok", "rescued", "saturated", "broken", "unknown"]
State = Literal["idle", "running", "done", "failed", "interrupted"]

#: Headroom in bits below which a block counts as low.
LOW_BITS = 3.0


class Block(NamedTuple):
    """One block of a report: what was counted, and the level that follows from it."""

    stats: BlockStats
    level: Level

    def to_json(self) -> dict[str, Any]:
        """An infinite peak is null, as are its headroom bits."""
        stats = self.stats
        return {
            "name": stats.name,
            "max_abs": finite_or_none(stats.max_abs),
            "over": stats.over,
            "saturated": stats.saturated,
            "clamped": stats.clamped,
            "non_finite": stats.non_finite,
            "headroom_bits": headroom_bits(stats.max_abs),
            "level": self.level,
        }


class Summary(NamedTuple):
    """The block with the largest peak (inf where something was not finite), and the totals."""

    peak: float
    block: str | None
    saturated: int
    clamped: int
    non_finite: int

    def to_json(self) -> dict[str, Any]:
        return {
            "peak": finite_or_none(self.peak),
            "block": self.block,
            "headroom_bits": headroom_bits(self.peak),
            "saturated": self.saturated,
            "clamped": self.clamped,
            "non_finite": self.non_finite,
        }


class Rescue(NamedTuple):
    """A model call the guard computed again: at which step and sigma, on which rung, and why."""

    step: int
    sigma: float
    rung: str
    reason: Message

    def to_json(self) -> dict[str, Any]:
        reason = self.reason.to_json()
        return {
            "step": self.step,
            "sigma": self.sigma,
            "rung": self.rung,
            "reason": reason["text"],
            "reason_key": reason["key"],
            "reason_values": reason["values"],
        }


class Setting(NamedTuple):
    """An input to change on the node that the MODEL comes from."""

    input: str
    value: str


class Remedy(NamedTuple):
    """What the user can do about it; `action` where changing one input is all it takes."""

    said: Message
    action: Setting | None = None

    def to_json(self) -> dict[str, Any]:
        action = None if self.action is None else {"node": "source", **self.action._asdict()}
        return {**self.said.to_json(), "action": action}


#: From what says least to what is worst. off: the user left it out. nothing to prove: the class is this pack's own.
#: remembered: passed in an earlier run. not proven: neither a part of the call nor the whole could be computed in fp32.
#: accepted: failed, and the user wants it all the same.
CheckResult = Literal["off", "nothing to prove", "remembered", "passed", "not proven", "accepted", "failed"]
_RANKS: tuple[CheckResult, ...] = get_args(CheckResult)


@dataclass(frozen=True)
class SelfCheck:
    """What the self-check found of a run's calls.

    difference: relative L2 of the two results that were compared, allowed up to bound. compared: on what, in words.
    detail: what in the call could be the reason.
    """

    result: CheckResult
    difference: float | None = None
    bound: float | None = None
    compared: str | None = None
    detail: str | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """Orders findings; the worst is the largest."""
        return _RANKS.index(self.result), self.difference or 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "difference": finite_or_none(self.difference)}


class AppliedFactors(NamedTuple):
    """The factors at work: the run's own, and the fold that the weights carry where there is one."""

    run: Factors
    eps: Eps
    baked: Factors | None = None
    clamp: float | None = None

    @staticmethod
    def of(plan: StreamPlan) -> AppliedFactors:
        """Those of a plan."""
        return AppliedFactors(plan.factors, plan.eps, None if plan.baked.identity else plan.baked, plan.clamp)

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {**self.run.to_json(), "eps": self.eps}
        if self.baked is not None:
            shown["baked"] = self.baked.to_json()
        if self.clamp is not None:
            shown["clamp"] = self.clamp
        return shown


@dataclass(frozen=True)
class Report:
    """What one run did and reached. Dtypes are short names ("fp16"); peaks are of the streams as stored.

    guard, self_check, remedy and error are None where the maker has none.
    """

    node_id: str
    mode: str
    engine: str
    compute_dtype: str
    stream_dtype: str
    factors: AppliedFactors
    threshold: float
    model_calls: int
    steps: int
    blocks: tuple[Block, ...]
    rescues: tuple[Rescue, ...]
    summary: Summary
    outcome: Outcome
    verdict: Message
    remedy: Remedy | None
    messages: tuple[Message, ...]
    error: Message | None
    state: State
    step: int
    total_steps: int
    cached: bool
    guard: str | None
    self_check: SelfCheck | None
    input_dtypes: Mapping[str, str]
    param_dtypes: Mapping[str, Any]

    @property
    def warnings(self) -> list[str]:
        """The messages that are more than information, in English."""
        return [said.text for said in self.messages if said.severity != "info"]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types only."""
        return {
            "schema": SCHEMA,
            "node_id": self.node_id,
            "mode": self.mode,
            "engine": self.engine,
            "compute_dtype": self.compute_dtype,
            "stream_dtype": self.stream_dtype,
            "factors": self.factors.to_json(),
            "threshold": self.threshold,
            "model_calls": self.model_calls,
            "steps": self.steps,
            "blocks": [block.to_json() for block in self.blocks],
            "rescues": [rescue.to_json() for rescue in self.rescues],
            "summary": self.summary.to_json(),
            "outcome": self.outcome,
            "verdict": self.verdict.to_json(),
            "remedy": self.remedy and self.remedy.to_json(),
            "messages": [said.to_json() for said in self.messages],
            "warnings": self.warnings,
            "error": self.error and self.error.to_json(),
            "state": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            "cached": self.cached,
            "guard": self.guard,
            "self_check": self.self_check and self.self_check.to_json(),
            "input_dtypes": dict(self.input_dtypes),
            "param_dtypes": dict(self.param_dtypes),
        }


def make_report(
    *,
    node_id: str,
    engine: str,
    plan: StreamPlan,
    dtype: torch.dtype | None,
    rows: Sequence[BlockStats],
    model_calls: int,
    steps: int,
    input_dtypes: Mapping[str, str],
    param_dtypes: Mapping[str, Any],
    counted: bool = True,
    shown: bool = True,
    finite: bool | None = None,
    threshold: float = DEFAULT_THRESHOLD,
    rescues: Sequence[Rescue] = (),
    messages: Sequence[Message] = (),
    advise: Callable[[Outcome], Remedy | None] = lambda outcome: None,
    error: Message | None = None,
    state: State = "done",
    total_steps: int | None = None,
    guard: str | None = None,
    self_check: SelfCheck | None = None,
) -> Report:
    """The report of a run, with the level of each block, the outcome, the verdict and what to do about it.

    dtype: what the run computed in. rows: what was counted per block; counted: whether
    anything was. shown: whether the blocks are part of the report. finite: of the result, None where there is none yet.
    advise: the maker's remedy for an outcome. error: why the run failed.
    """
    stream_dtype = "fp32" if plan.fp32_stream else dtype_name(dtype)
    limited = stream_dtype == "fp16"
    blocks = tuple(Block(row, level_of(row, limited)) for row in rows)
    seen = counted and (state != "done" or any(row.max_abs > 0 for row in rows))
    remarks, small = remarks_on(plan, limited), limited and plan.loses_bits
    outcome = outcome_of(blocks, counted=seen, rescued=bool(rescues), small=small, finite=finite)
    cause, remedy = cause_of(outcome, blocks, messages, clamped=plan.clamp is not None), advise(outcome)
    return Report(
        node_id=node_id,
        mode=plan.mode,
        engine=engine,
        compute_dtype=dtype_name(dtype),
        stream_dtype=stream_dtype,
        factors=AppliedFactors.of(plan),
        threshold=threshold,
        model_calls=model_calls,
        steps=steps,
        blocks=blocks if shown else (),
        rescues=tuple(rescues),
        summary=summary(rows if shown else ()),
        outcome=outcome,
        verdict=_verdict(outcome, cause, rescues, state, error, (steps, total_steps or steps), small=small),
        remedy=remedy,
        messages=_all_said((*messages, *remarks), outcome, cause, remedy, done=state == "done"),
        error=error,
        state=state,
        step=steps,
        total_steps=steps if total_steps is None else total_steps,
        cached=False,
        guard=guard,
        self_check=self_check,
        input_dtypes=input_dtypes,
        param_dtypes=param_dtypes,
    )


def remarks_on(plan: StreamPlan, limited: bool) -> tuple[Message, ...]:
    """Messages about what a plan loses that no counter sees. limited: its streams are stored in fp16."""
    scale, said = plan.smallest_scale, []
    if limited and plan.loses_bits:
        said.append(message("small_factor", c=factor_text(scale), least=factor_text(SMALLEST_SCALE)))
    if plan.eps_counts:
        said.append(message("stock_eps", c=factor_text(scale)))
    return tuple(said)


def level_of(block: BlockStats, limited: bool) -> Level:
    """How near the block came to fp16's limit. limited: its stream is stored in fp16."""
    if block.non_finite or not math.isfinite(block.max_abs):
        return "not_finite"
    if not limited:
        return "ok"
    bits = headroom_bits(block.max_abs)
    if block.saturated or (bits is not None and bits <= 0):
        return "saturated"
    return "ok" if bits is None or bits >= LOW_BITS else "low"


def outcome_of(
    blocks: Sequence[Block], *, counted: bool, rescued: bool, small: bool, finite: bool | None
) -> Outcome:
    """What became of the image. small: the factor is too small. finite: of the result; None where there is none yet."""
    levels = {block.level for block in blocks}
    if finite is False or (finite is None and "not_finite" in levels):
        return "broken"
    if levels & {"saturated", "not_finite"}:
        return "saturated"
    if small:
        return "unknown"  # what it loses, no counter sees
    if rescued:
        return "rescued"
    return "ok" if counted else "unknown"


def cause_of(
    outcome: Outcome, blocks: Sequence[Block], messages: Sequence[Message], *, clamped: bool = False
) -> Message | None:
    """Why the image is affected; None where it is not."""
    keys = {said.key for said in messages}
    bad = [block.stats.name for block in blocks if block.level in ("saturated", "not_finite")]
    match outcome:
        case "saturated" if clamped:
            return message("cause_clamp", blocks=named(bad))
        case "saturated":
            return message("cause_limit", blocks=named(bad))
        case "broken" if any(key.startswith("input_fault_between") for key in keys):
            return message("cause_between")
        case "broken" if any(key.startswith("input_fault") for key in keys):
            return message("cause_input")
        case "broken" if "weights_broken" in keys:
            return message("cause_weights")
        case "broken" if "model_broken" in keys:
            return message("cause_model")
        case "broken" if bad:
            return message("cause_range")
        case "broken":
            return message("cause_output")
        case _:
            return None


def _verdict(
    outcome: Outcome,
    cause: Message | None,
    rescues: Sequence[Rescue],
    state: State,
    error: Message | None,
    steps: tuple[int, int],
    *,
    small: bool,
) -> Message:
    """The report's first line: why the run failed, else what became of the image. small: the factor is too small."""
    match state, outcome:
        case "failed", _ if error is not None:
            return message("verdict_failed", error=error)
        case "interrupted", _:
            return message("verdict_interrupted", step=steps[0], total=steps[1])
        case _, "broken":
            return message("verdict_broken", cause=cause)
        case _, "rescued" if len(rescues) == 1:
            return message("verdict_rescued_once", step=rescues[0].step, rung=rescues[0].rung)
        case _, "rescued":
            return message("verdict_rescued", n=len(rescues), rung=rescues[-1].rung)
        case _, "unknown" if small:
            return message("verdict_small_factor")
        case _:
            return message(f"verdict_{outcome}")


def _all_said(
    messages: Sequence[Message], outcome: Outcome, cause: Message | None, remedy: Remedy | None, *, done: bool
) -> tuple[Message, ...]:
    """A run's messages, what became of the image first. That no fix was active is no fault where none was needed."""
    said = [one for place, one in enumerate(messages) if one not in messages[:place]]
    no_fix = message("no_fix")
    if no_fix in said and outcome in ("rescued", "saturated", "broken"):
        said.remove(no_fix)  # what became of it and the remedy say more
    elif no_fix in said and done and outcome == "ok":
        said[said.index(no_fix)] = message("no_fix_needed")
    if done and cause is not None:
        some = any(one.key in ("input_fault_latent_some", "input_fault_between_some") for one in said)
        key = "image_affected" if outcome == "saturated" else "some_images_broken" if some else "black_image"
        said.append(message(key, cause=cause, remedy=remedy.said if remedy else ""))
    return by_importance(said)


def finite_or_none(value: float | None) -> float | None:
    """JSON knows no infinity."""
    return value if value is not None and math.isfinite(value) else None


def headroom_bits(max_abs: float) -> float | None:
    """log2(65504 / max_abs): how many doublings are left. None at 0 and where something was not finite."""
    if max_abs <= 0 or not math.isfinite(max_abs):
        return None
    return math.log2(FP16_MAX / max_abs)


def summary(rows: Sequence[BlockStats]) -> Summary:
    """The worst block and the totals."""
    worst = max(rows, key=lambda row: row.max_abs, default=None)
    peak = worst.max_abs if worst else 0.0
    return Summary(
        peak=peak,
        block=worst.name if worst and peak > 0 else None,
        saturated=sum(row.saturated for row in rows),
        clamped=sum(row.clamped for row in rows),
        non_finite=sum(row.non_finite for row in rows),
    )
