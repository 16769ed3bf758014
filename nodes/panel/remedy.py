"""What the user of a fixed MODEL can do about a run: one input to change, wherever that is all it takes."""

from __future__ import annotations

from functools import partial

import torch

from ...fold.dtypes import dtype_name
from ...fold.report.counters import BlockStats
from ...fold.report.messages import TEXTS, Message, message
from ...fold.report.report import Outcome, Remedy, Report, Setting, State
from ..state import FixState, Run, Rung, factors_text

_NODES = {TEXTS[key][1]: key for key in ("node_loader", "node_fix")}


def report_of(fix: FixState, run: Run, state: State, rows: tuple[BlockStats, ...]) -> Report:
    """The report of a run, with its remedy."""
    return fix.report(run, state, rows, partial(remedy_for, fix, run))


def remedy_for(fix: FixState, run: Run, outcome: Outcome) -> Remedy | None:
    """What to do about a run of that outcome; None where nothing has to be done."""
    said = {one.key for one in run.messages}
    match outcome:
        case "rescued" if "self_check_failed" not in said:
            return _saved_steps(fix, run.rung)
        case "saturated" | "broken" if any(key.startswith("input_fault_between") for key in said):
            return Remedy(message("remedy_between"))
        case "saturated" | "broken" if any(key.startswith("input_fault") for key in said):
            return Remedy(message("remedy_input"))
        case "broken" if "weights_broken" in said:
            return Remedy(message("remedy_weights"))
        case "saturated" | "broken" if "model_broken" in said or run.compute_dtype != torch.float16:
            return Remedy(message("remedy_model"))
        case "saturated" | "broken" if fix.options.fix == "none" and fix.first_rung.plan.mode == "none":
            return Remedy(message("remedy_fix", value="auto", node=node_of(fix)), Setting("fix", "auto"))
        case "saturated" if run.rung.plan.clamp is not None:
            return Remedy(message("remedy_clamp", node=node_of(fix)))
        case "saturated" | "broken" if fix.options.guard != "rescue":
            return Remedy(message("remedy_guard", node=node_of(fix)), Setting("guard", "rescue"))
        case "saturated" | "broken":
            return Remedy(message("remedy_model"))
        case _:
            return None


def node_of(fix: FixState) -> Message | str:
    """The title of the node that the settings are on, as a value of a message."""
    key = _NODES.get(fix.node)
    return fix.node if key is None else message(key)


def _saved_steps(fix: FixState, rung: Rung) -> Remedy:
    """The settings that start a run on the rung that a rescue ended on, so that no step is computed twice."""
    settings = tuple(settings_of(fix, rung))
    said = message("remedy_save_steps", settings=tuple(f"{s.input} = {s.value}" for s in settings), node=node_of(fix))
    # where factors are given, they may come over a link, which a typed value does not replace
    alone = len(settings) == 1 and (settings[0].input in ("fix", "compute_dtype") or fix.options.factors is None)
    return Remedy(said, settings[0] if alone else None)


def settings_of(fix: FixState, rung: Rung) -> list[Setting]:
    """The inputs that differ between what was asked for and `rung`."""
    before, after = fix.first_rung.plan.factors, rung.plan.factors
    if rung.dtype is not None:
        return [Setting("compute_dtype", dtype_name(rung.dtype))]
    if not after.uniform:
        return [Setting("fix", "fp32_residual")]
    if fix.options.fix == "none" and after.c == (1 / 16,) and after.s_attn == after.s_ffn == (1.0,):
        return [Setting("fix", "auto")]
    found = []
    if fix.options.engine == "native" and rung.plan.block_local:
        found.append(Setting("engine", "auto"))
    if rung.plan.mode != fix.first_rung.plan.mode:
        found.append(Setting("fix", rung.plan.mode))
    if after.c != before.c and not rung.plan.fp32_stream:
        found.append(Setting("c", factors_text(after.c)))
    for name in ("s_attn", "s_ffn"):
        if getattr(after, name) != getattr(before, name):
            found.append(Setting(name, factors_text(getattr(after, name))))
    return found
