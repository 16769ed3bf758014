"""What ties one fixed MODEL to its runs: the rung it is on, its counters, its last report.

All clones made downstream (LoRA loaders, sampling nodes) share the handle, so a report node finds the run whichever of
them was sampled. The patched callables read the rung from it; nothing is ever stored on the module.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..fold.arch import MossArch
from ..fold.dtypes import dtype_name
from ..fold.model.observer import Observer
from ..fold.report.counters import BlockStats, Counters, site_names
from ..fold.report.report import Report, Rescue, factors_json
from ..fold.scaling.plan import StreamPlan
from .engines.dtypes import OwnDtype
from .inputs import FixOptions
from .model.moss import blocks as block_paths

KEY = "moss_fp16"
Path = Literal["native", "managed", "builtin"]
State = Literal["idle", "running", "done", "failed", "interrupted"]


@dataclass(frozen=True)
class Rung:
    """How a model call is computed: the plan, by which forward, and whether all of it in fp32."""

    plan: StreamPlan
    managed: bool
    full: bool = False

    @property
    def label(self) -> str:
        """For the report: "online c=1/256 s_ffn=1/64"."""
        f = self.plan.factors
        shown = [
            f"{name}={_ratio(values)}"
            for name, values in (("c", f.c), ("s_attn", f.s_attn), ("s_ffn", f.s_ffn))
            if any(value != 1.0 for value in values)
        ]
        return " ".join([self.plan.mode, *shown, *(["in fp32"] if self.full else [])])


def _ratio(values: tuple[float, ...]) -> str:
    if len(set(values)) > 1:
        return "per block"
    inverse = 1.0 / values[0]
    return f"1/{inverse:g}" if inverse >= 1 and inverse.is_integer() else f"{values[0]:g}"


def finite_or_none(value: float | None) -> float | None:
    """JSON knows no infinity."""
    return value if value is not None and math.isfinite(value) else None


@dataclass
class Run:
    """One sampling run in progress."""

    counters: Counters
    prompt_id: str | None = None
    workflow_id: str | None = None
    total_steps: int = 0
    step: int = 0
    model_calls: int = 0
    rescues: list[Rescue] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notices: set[str] = field(default_factory=set)
    self_check: dict[str, Any] | None = None
    checks: int = 0
    #: the MODEL's part of the combinations that the self-check goes by
    model_key: tuple[Any, ...] = ()
    broken: bool = False
    #: items of the batch came in broken and are left out, so that the guard can look after the others
    partly: bool = False
    started: float = field(default_factory=time.monotonic)

    def warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def checked(self, result: str, difference: float | None = None, detail: str | None = None) -> None:
        """What the self-check said of a combination; the report shows the worst of the run."""
        before = self.self_check
        order = ("remembered", "passed", "failed")
        if before is not None and order.index(before["result"]) > order.index(result):
            return
        if before is not None and before["result"] == result == "passed":
            difference = max(before["difference"], difference or 0.0)
        self.self_check = {"result": result, "difference": finite_or_none(difference), "detail": detail}


class Handle:
    """Shared by every clone of one fixed MODEL."""

    def __init__(
        self,
        *,
        node_id: str,
        options: FixOptions,
        arch: MossArch,
        plan: StreamPlan,
        path: Path,
        compute_dtype: torch.dtype | None,
        notes: tuple[str, ...] = (),
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.node_id, self.options, self.arch, self.path = node_id, options, arch, path
        self.compute_dtype, self.notes, self.extra = compute_dtype, notes, extra or {}
        self.start = Rung(plan, managed=path != "native")
        self.rung = self.start
        self.run: Run | None = None
        self.watch: Observer | None = None
        self.retuned = False
        self.own_dtypes: dict[str, OwnDtype] = {}
        self.last: dict[str, Any] | None = None
        #: whether our own forward could run this class of MOSS-Image
        self.manageable = True
        #: whether the diffusion model's forward of the run in progress is still ours
        self.entered = False
        #: the blocks' paths and their places in the counters
        self.sites = {path: site for site, path in enumerate(block_paths(arch))}
        #: paths that are scaled or counted outside another pack's patch for the call in progress, and what does it
        self.covered: frozenset[str] = frozenset()
        self.outer: dict[str, Any] = {}

    @property
    def observer(self) -> Observer | None:
        """The counters of the run in progress, where counting is on; or who else is looking for the moment."""
        if self.watch is not None:
            return self.watch
        return self.run.counters if self.run is not None and self.counting else None

    @property
    def counting(self) -> bool:
        """Whether the streams are counted: for the panel, and because guard and self-check see no other way."""
        return self.options.counters or self.options.guard != "off" or self.options.self_check

    @property
    def half_stream(self) -> bool:
        """Whether the streams of the present rung are stored in fp16."""
        return self.compute_dtype == torch.float16 and not self.rung.full and not self.rung.plan.fp32_stream

    def begin(self, total_steps: int, prompt_id: str | None, workflow_id: str | None) -> Run:
        """Start a run on the rung that was asked for."""
        self.rung, self.entered = self.start, False
        names = site_names(self.arch.text_blocks, self.arch.depth)
        self.run = Run(Counters(names), prompt_id, workflow_id, total_steps)
        self.run.warnings.extend(self.notes)
        return self.run

    def current(self) -> Run:
        """The run in progress; a model called outside a sampler gets one of its own."""
        return self.run or self.begin(0, None, None)

    def report(self, state: State, blocks: tuple[BlockStats, ...]) -> dict[str, Any]:
        """The report of the run in progress."""
        run, rung = self.current(), self.rung
        return Report(
            node_id=self.node_id,
            mode=rung.plan.mode,
            engine=self.path if self.path != "native" or not rung.managed else "managed",
            compute_dtype="fp32" if rung.full else dtype_name(self.compute_dtype),
            stream_dtype="fp32" if rung.full or rung.plan.fp32_stream else dtype_name(self.compute_dtype),
            factors=factors_json(rung.plan),
            blocks=blocks if self.options.counters else (),
            threshold=run.counters.threshold,
            model_calls=run.model_calls,
            steps=run.step,
            rescues=tuple(run.rescues),
            warnings=tuple(run.warnings),
            extra={
                "state": state,
                "step": run.step,
                "total_steps": run.total_steps,
                "cached": False,
                "guard": self.options.guard,
                "self_check": run.self_check,
                "input_dtypes": self.options.inputs.to_json(),
                "param_dtypes": {},
                **self.extra,
            },
        ).to_json()


def handle_of(model: Any) -> Handle | None:
    """The handle a MODEL carries, or None for one that no node of this pack made."""
    found = model.get_attachment(KEY)
    return found if isinstance(found, Handle) else None
