"""What the user asked one Loader or Fix node for, checked and frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..fold.dtypes import DtypeRule, InputPolicy, parse_rules
from ..fold.factors import Factors, parse_factors
from ..fold.record import FoldRecord
from ..fold.stream import FP16_MAX, StreamPlan, own_c, plan_for

PLAIN_INPUTS = InputPolicy()

Guard = Literal["off", "report", "rescue"]
Engine = Literal["auto", "native", "managed", "builtin"]


@dataclass(frozen=True)
class FixOptions:
    """The inputs that Loader and Fix share. factors: None where the user left the mode's own. s_alone: they are
    s_attn and s_ffn only, and c is the mode's own."""

    fix: Literal["auto", "none", "online", "fp32_residual"] = "auto"
    guard: Guard = "rescue"
    factors: Factors | None = None
    s_alone: bool = False
    eps: Literal["exact", "stock"] = "exact"
    clamp: bool = False
    counters: bool = True
    self_check: bool = True
    engine: Engine = "auto"
    inputs: InputPolicy = PLAIN_INPUTS
    rules: tuple[DtypeRule, ...] = ()

    def plan(self, *, half: bool, record: FoldRecord | None, unfolded: bool) -> StreamPlan:
        """The stream plan for a model that computes in fp16 (half) and came with `record`."""
        factors = self.factors
        if factors is not None and self.s_alone:
            factors = replace(factors, c=(own_c(self.fix, record, unfolded),))
        return plan_for(
            self.fix,
            half=half,
            record=record,
            unfolded=unfolded,
            factors=factors,
            # "exact" is the input's default; a kept fold's own eps counts until the user says stock
            eps="stock" if self.eps == "stock" else None,
            clamp=FP16_MAX if self.clamp else None,
        )


def read_options(inputs: dict[str, Any]) -> FixOptions:
    """The options from a node's inputs. Raises MossError naming the field that is wrong."""
    return FixOptions(
        fix=inputs.get("fix", "auto"),
        guard=inputs.get("guard", "rescue"),
        factors=read_factors(inputs),
        s_alone=inputs.get("factors") is None and not str(inputs.get("c", "")).strip(),
        eps=inputs.get("eps", "exact"),
        clamp=bool(inputs.get("clamp", False)),
        counters=bool(inputs.get("counters", True)),
        self_check=bool(inputs.get("self_check", True)),
        engine=inputs.get("engine", "auto"),
        inputs=InputPolicy(*(inputs.get(f"{name}_dtype", "default") for name in ("latents", "cond", "timestep"))),
        rules=parse_rules(inputs.get("param_dtypes", "")),
    )


def read_factors(inputs: dict[str, Any]) -> Factors | None:
    """A connected MOSS_FACTORS wins; else c (1/16 if empty), s_attn and s_ffn. None where all are left as they are."""
    measured = inputs.get("factors")
    if measured is not None:
        return measured if isinstance(measured, Factors) else Factors.from_json(measured, "the factors input")
    c, s_attn, s_ffn = (str(inputs.get(key, "")).strip() for key in ("c", "s_attn", "s_ffn"))
    if not c and s_attn in ("", "1") and s_ffn in ("", "1"):
        return None
    return parse_factors(c or "1/16", s_attn or "1", s_ffn or "1")
