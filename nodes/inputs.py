"""The inputs that Loader and Fix share: the widgets, and what a user chose in them, checked and frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from comfy_api.latest import io

from ..fold.dtypes import INPUT_CHOICES, DtypeRule, InputPolicy, parse_rules
from ..fold.errors import MossError
from ..fold.scaling.factors import Factors, GivenFactors, parse_factors
from ..fold.scaling.plan import FP16_MAX, StreamPlan, plan_for
from ..fold.scaling.record import StoredFold

CATEGORY = "MOSS/FP16"

MossFactors: Any = io.Custom("MOSS_FACTORS")

FACTOR_HINT_UNIFORM = "0.0625, 1/16 or 2^-4."
FACTOR_HINT = "0.0625, 1/16, 2^-4, or a comma list with one value per block."


def compute_dtype_input(first: str, tooltip: str) -> io.Combo.Input:
    """`first` is what the model computes in when nothing is chosen: auto (Loader) or keep (Fix)."""
    return io.Combo.Input("compute_dtype", options=[first, "fp16", "bf16", "fp32"], default=first, tooltip=tooltip)


def fix_inputs(engines: list[str]) -> list[io.Input]:
    """fix and guard, then the advanced ones, in the order of the help pages."""
    return [
        io.Combo.Input(
            "fix",
            options=["auto", "none", "online", "fp32_residual"],
            default="auto",
            tooltip="How the residual stream is kept in fp16's range. auto: the fold recorded in the file, else the "
            "online fold with c = 1/16 in fp16; bf16 and fp32 need no fix. online: the fold at sampling time, the "
            "weights stay as they are. fp32_residual: the stream in fp32. none: the model as stored.",
        ),
        io.Combo.Input(
            "guard",
            options=["rescue", "report", "off"],
            default="rescue",
            tooltip="What happens when a step leaves fp16's range. rescue: it is computed again with safer settings, "
            "which the rest of the run keeps. report: it is only reported. off: nothing is checked.",
        ),
        *advanced_fix_inputs(engines),
    ]


def advanced_fix_inputs(engines: list[str]) -> list[io.Input]:
    """All optional, so that a workflow or API prompt written before an input existed still runs."""
    return [
        io.String.Input(
            "c",
            default="",
            advanced=True,
            optional=True,
            tooltip=f"Stream factor c; empty for the mode's own (the recorded one, else 1/16). {FACTOR_HINT}",
        ),
        io.String.Input(
            "s_attn",
            default="1",
            advanced=True,
            optional=True,
            tooltip=f"Factor on the attention outputs (o): below 1 where o itself overflows. {FACTOR_HINT}",
        ),
        io.String.Input(
            "s_ffn",
            default="1",
            advanced=True,
            optional=True,
            tooltip=f"Factor on the FFN outputs (ffn_down): below 1 where they overflow. {FACTOR_HINT}",
        ),
        io.Combo.Input(
            "eps",
            options=["exact", "stock"],
            default="exact",
            advanced=True,
            optional=True,
            tooltip="exact: the norms' eps is scaled by c^2, so the model computes the same function. stock: eps stays "
            "1e-6.",
        ),
        io.Boolean.Input(
            "clamp",
            default=False,
            advanced=True,
            optional=True,
            tooltip="Limit the joint stream to +-65504 after each add, and count what was limited.",
        ),
        io.Boolean.Input(
            "counters",
            default=True,
            advanced=True,
            optional=True,
            tooltip="Count peaks and saturation per block for the panel.",
        ),
        io.Boolean.Input(
            "self_check",
            default=True,
            advanced=True,
            optional=True,
            tooltip="Once per combination of model, adapters and patches, before its first result is kept: a part of "
            "the call is computed in fp32 under the fix and by the class's own forward without it. If they differ, the "
            "fix is left off.",
        ),
        io.Combo.Input(
            "engine",
            options=engines,
            default="auto",
            advanced=True,
            optional=True,
            tooltip="The code that computes the model. auto picks it; the help page says when another one helps.",
        ),
        *(
            io.Combo.Input(
                f"{name}_dtype",
                options=list(INPUT_CHOICES),
                default="default",
                advanced=True,
                optional=True,
                tooltip=tooltip,
            )
            for name, tooltip in (
                ("latents", "What the latents are rounded to before the model gets them. default: the compute dtype."),
                ("cond", "What the text conditioning is rounded to. default: the compute dtype."),
                ("timestep", "What the timestep is rounded to. default: fp32."),
            )
        ),
        io.String.Input(
            "param_dtypes",
            default="",
            multiline=True,
            advanced=True,
            optional=True,
            tooltip="Lines of `glob = dtype` for single parameters, such as layers.*.proj.o.weight = fp32; a later "
            "line overrides an earlier one. Norms, conditioning and head are fp32 by default.",
        ),
        MossFactors.Input(
            "factors", optional=True, tooltip="Measured factors (MOSS Activation Probe); they replace c, s_attn, s_ffn."
        ),
    ]


def accept_unproven_input() -> io.Boolean.Input:
    """The last widget of a node, as a later one must be: a saved workflow holds its values by their place."""
    return io.Boolean.Input(
        "accept_unproven",
        default=False,
        advanced=True,
        optional=True,
        tooltip="Go on with engine = managed or fix = fp32_residual although it does not compute what this MOSS-Image "
        "class does. Off: that is an error naming the difference.",
    )


PLAIN_INPUTS = InputPolicy()

Guard = Literal["off", "report", "rescue"]
Engine = Literal["auto", "native", "managed", "builtin"]


@dataclass(frozen=True)
class FixOptions:
    """The inputs that Loader and Fix share. factors: None where all were left to the fix."""

    fix: Literal["auto", "none", "online", "fp32_residual"] = "auto"
    guard: Guard = "rescue"
    factors: GivenFactors | None = None
    eps: Literal["exact", "stock"] = "exact"
    clamp: bool = False
    counters: bool = True
    self_check: bool = True
    engine: Engine = "auto"
    accept_unproven: bool = False
    inputs: InputPolicy = PLAIN_INPUTS
    rules: tuple[DtypeRule, ...] = ()

    @property
    def managed_by_hand(self) -> bool:
        """Whether the user asked for our own forward by name."""
        return self.engine == "managed" or self.fix == "fp32_residual"

    def plan(self, *, half: bool, stored: StoredFold) -> StreamPlan:
        """The stream plan for a model that computes in fp16 (half) and whose file had the fold `stored`."""
        return plan_for(
            self.fix,
            half=half,
            stored=stored,
            factors=self.factors,
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
        eps=inputs.get("eps", "exact"),
        clamp=bool(inputs.get("clamp", False)),
        counters=bool(inputs.get("counters", True)),
        self_check=bool(inputs.get("self_check", True)),
        engine=inputs.get("engine", "auto"),
        accept_unproven=bool(inputs.get("accept_unproven", False)),
        inputs=InputPolicy(*(inputs.get(f"{name}_dtype", "default") for name in ("latents", "cond", "timestep"))),
        rules=parse_rules(inputs.get("param_dtypes", "")),
    )


def refusal(read: Callable[[], object]) -> bool | str:
    """What `validate_inputs` answers: True, or the sentence of the MossError that `read` raises.

    ComfyUI then refuses the workflow when it is queued and marks the node's inputs.
    """
    try:
        read()
    except MossError as error:
        return str(error)
    return True


def check_texts(
    c: str | None = None, s_attn: str | None = None, s_ffn: str | None = None, param_dtypes: str | None = None
) -> bool | str:
    """Whether what was typed into these inputs can be read; None for one whose value comes over a link, later."""
    factors = {"c": c, "s_attn": s_attn, "s_ffn": s_ffn}

    def read() -> None:
        read_factors({name: value for name, value in factors.items() if value is not None})
        parse_rules(param_dtypes or "")

    return refusal(read)


def read_factors(inputs: dict[str, Any]) -> GivenFactors | None:
    """The factors of a connected MOSS_FACTORS, else of the texts c, s_attn, s_ffn; None where all are empty. MossError
    for a text that is no factor."""
    measured = inputs.get("factors")
    if measured is not None:
        factors = measured if isinstance(measured, Factors) else Factors.from_json(measured, "the factors input")
        return GivenFactors.of(factors)
    c, s_attn, s_ffn = (str(inputs.get(key, "")).strip() for key in ("c", "s_attn", "s_ffn"))
    return parse_factors(c or None, None if s_attn in ("", "1") else s_attn, None if s_ffn in ("", "1") else s_ffn)
