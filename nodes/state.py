"""The state of one fixed MODEL: its options, the model call in progress, the run in progress.

All clones made downstream (LoRA loaders, sampling nodes) share one `FixState`, so a report node finds the run whichever
of them was sampled. What a model call depends on is one immutable `CallState`, which `FixState.during` lends to the
patched callables for the length of that call; nothing is ever stored on the module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from ..fold.arch import MossArch
from ..fold.dtypes import dtype_name
from ..fold.model.observer import Observer
from ..fold.report.counters import BlockStats, Counters, site_names
from ..fold.report.messages import Message
from ..fold.report.report import Outcome, Remedy, Report, Rescue, SelfCheck, State, make_report
from ..fold.scaling.factors import factor_text
from ..fold.scaling.plan import StreamPlan
from .inputs import FixOptions
from .model.comfy_types import ModelPatcher
from .model.moss import blocks as block_paths

KEY = "moss_fp16"
Path = Literal["native", "managed", "builtin"]


@dataclass(frozen=True)
class Rung:
    """How a model call is computed: the plan, by which forward, and in which dtype (None: what the MODEL computes in).

    managed: by our own forward, not by the class's.
    """

    plan: StreamPlan
    managed: bool
    dtype: torch.dtype | None = None

    @property
    def label(self) -> str:
        """For the report: "online c=1/256 s_ffn=1/64"."""
        f = self.plan.factors
        shown = [
            f"{name}={factors_text(values)}"
            for name, values in (("c", f.c), ("s_attn", f.s_attn), ("s_ffn", f.s_ffn))
            if any(value != 1.0 for value in values)
        ]
        return " ".join([self.plan.mode, *shown, *([f"in {dtype_name(self.dtype)}"] if self.dtype else [])])


def factors_text(values: tuple[float, ...]) -> str:
    """A factor as people write it: "1/16"; "per block" where the blocks have different ones."""
    return factor_text(values[0]) if len(set(values)) == 1 else "per block"


#: "fold": the scaled stream on the class's own forward. "managed": our own forward, whatever its plan.
RungKind = Literal["fold", "managed"]


@dataclass
class DtypeUse:
    """Whether a linear with a dtype of its own was ever called; one for its patches on all copies of a MODEL."""

    called: bool = False


@dataclass
class Trace:
    """Filled in by a model call. reached: our patch on the diffusion model's forward was called."""

    reached: bool = False


@dataclass(frozen=True)
class CallState:
    """What the patched callables know of a model call.

    rung: how it is computed. observer: who looks at its streams. outside: paths of modules that are scaled or counted
    by a wrapper outside another pack's patch, so that the wrapper inside does nothing. own_dtypes: whether the linears
    that were given a dtype of their own compute in it. trace: filled in by the call.
    """

    rung: Rung
    observer: Observer | None = None
    outside: frozenset[str] = frozenset()
    own_dtypes: bool = True
    trace: Trace = field(default_factory=Trace, compare=False)


@dataclass
class Run:
    """One sampling run in progress.

    rung: the one its next call starts on; it only ever climbs. compute_dtype: what the MODEL sampled computes in, which
    a node after the fix may have changed. finite: of the sampled latent, once there is one. error: why it failed.
    """

    counters: Counters
    rung: Rung
    compute_dtype: torch.dtype | None
    prompt_id: str | None = None
    workflow_id: str | None = None
    total_steps: int = 0
    step: int = 0
    model_calls: int = 0
    rescues: list[Rescue] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    notices: set[str] = field(default_factory=set)
    #: the worst that the self-check said of this run's combinations, and how often it compared
    self_check: SelfCheck | None = None
    checks: int = 0
    finite: bool | None = None
    error: Message | None = None
    #: kinds of rungs whose proof failed: they do not exist for this run
    disproved: set[RungKind] = field(default_factory=set)
    #: the MODEL's part of the combinations that the self-check goes by
    model_key: tuple[Hashable, ...] = ()
    #: whether the diffusion model's forward has been ours in this run
    reached: bool = False
    #: the user wants the managed path although its proof failed
    accepted: bool = False
    #: a result that is not finite was kept: later ones grow out of it and are not looked at again
    gave_up: bool = False
    #: items of the batch came in broken and are left out, so that the guard can look after the others
    skips_broken_items: bool = False

    def half_stream(self, rung: Rung) -> bool:
        """Whether a rung stores the streams in fp16."""
        return self.compute_dtype == torch.float16 and rung.dtype is None and not rung.plan.fp32_stream

    def checked(self, found: SelfCheck) -> None:
        """Note a finding of the self-check; the report shows the worst of the run."""
        if self.self_check is None or found.rank >= self.self_check.rank:
            self.self_check = found


@dataclass(eq=False)
class FixState:
    """Shared by every clone of one fixed MODEL. Of its fields only `run`, `call` and those of the last run ever change.

    node: the title of the node that made it. first_rung: what was asked for. compute_dtype: of the MODEL as it was
    fixed. manageable: whether our own forward can run this class of MOSS-Image. own_dtypes: the linears that compute in
    a dtype of their own, by path. param_dtypes: what was asked for single parameters, for the report.
    """

    node_id: str
    node: str
    options: FixOptions
    arch: MossArch
    first_rung: Rung
    path: Path
    compute_dtype: torch.dtype | None
    manageable: bool = True
    notes: tuple[Message, ...] = ()
    own_dtypes: dict[str, DtypeUse] = field(default_factory=dict)
    param_dtypes: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None
    last_report: Report | None = None
    last_prompt_id: str | None = None
    call: CallState = field(init=False)
    #: wrappers put outside other packs' patches, kept for the next call so that compiled code finds the same ones
    outer_wrappers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.call = CallState(self.first_rung)  # for a diffusion model called past ComfyUI's apply_model

    @contextlib.contextmanager
    def during(self, call: CallState) -> Iterator[None]:
        """Lend `call` to the patched callables.

        They stand in the place of modules' forwards, which get no argument of ours (a writer is called with a tensor
        and nothing else), so they read it here. A plain attribute, because torch.compile guards on what it reads
        through one in every version (a ContextVar breaks its graphs) and code compiled for a rung is used again with
        the next call's CallState. It needs no thread's own copy: a loaded module takes one call at a time, since
        ComfyUI itself streams and patches its weights for that call.
        """
        outer, self.call = self.call, call
        try:
            yield
        finally:
            self.call = outer

    @cached_property
    def sites(self) -> dict[str, int]:
        """The blocks' paths and their places in the counters."""
        return {path: site for site, path in enumerate(block_paths(self.arch))}

    @property
    def counting(self) -> bool:
        """Whether the streams are counted: for the panel, and because guard and self-check see no other way."""
        return self.options.counters or self.options.guard != "off" or self.options.self_check

    def new_counters(self) -> Counters:
        return Counters(site_names(self.arch.text_blocks, self.arch.depth))

    def begin_run(
        self,
        compute_dtype: torch.dtype | None,
        total_steps: int = 0,
        prompt_id: str | None = None,
        workflow_id: str | None = None,
    ) -> Run:
        """Start a run on the rung that was asked for."""
        self.run = Run(self.new_counters(), self.first_rung, compute_dtype, prompt_id, workflow_id, total_steps)
        self.run.messages.extend(self.notes)
        if not self.options.self_check:
            self.run.checked(SelfCheck("off"))
        return self.run

    def current_run(self) -> Run:
        """The run in progress; a model called outside a sampler gets one of its own."""
        return self.run or self.begin_run(self.compute_dtype)

    def report(
        self,
        run: Run,
        state: State,
        rows: tuple[BlockStats, ...],
        advise: Callable[[Outcome], Remedy | None] = lambda outcome: None,
    ) -> Report:
        """The report of a run. rows: what was counted per block. advise: the remedy for an outcome."""
        rung = run.rung
        return make_report(
            node_id=self.node_id,
            engine="builtin" if self.path == "builtin" else "managed" if rung.managed else "native",
            plan=rung.plan,
            dtype=rung.dtype or run.compute_dtype,
            rows=rows,
            counted=self.counting,
            shown=self.options.counters,
            finite=run.finite,
            threshold=run.counters.threshold,
            model_calls=run.model_calls,
            steps=run.step,
            total_steps=run.total_steps,
            rescues=run.rescues,
            messages=run.messages,
            advise=advise,
            error=run.error,
            state=state,
            guard=self.options.guard,
            self_check=run.self_check,
            input_dtypes=self.options.inputs.to_json(),
            param_dtypes=self.param_dtypes,
        )


def fix_of(model: ModelPatcher) -> FixState | None:
    """The fix's state that a MODEL carries, or None for one that no node of this pack made."""
    found = model.get_attachment(KEY)
    return found if isinstance(found, FixState) else None
