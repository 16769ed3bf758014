"""One model call of a fixed MODEL, as ComfyUI's apply_model gets it; it can be computed on any rung, any number of
times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import comfy.model_management
from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from ...fold.model.observer import CallObserver, Observer
from ...fold.scaling.plan import StreamPlan
from ..engines.casting import casting
from ..engines.managed import lost_changes, not_understood
from ..engines.native import norms_for, wrapped_outside
from ..model.comfy_types import BaseModel, ModelPatcher
from ..model.foreign import unwrapped
from ..state import CallState, FixState, Run, Rung

_POSITIONAL = ("c_concat", "c_crossattn", "control", "transformer_options")
_OPTIONS = _POSITIONAL.index("transformer_options")


@dataclass(frozen=True)
class ModelCall:
    """x [B, C, h, w] and sigma t [B] with the rest of apply_model's arguments.

    base: ComfyUI's BaseModel. go_on: what apply_model goes on with (other packs' wrappers, then the model); its result
    is the denoised x.
    """

    fix: FixState
    run: Run
    base: BaseModel
    go_on: Callable[..., Tensor]
    x: Tensor
    t: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def _named(self) -> dict[str, Any]:
        # apply_model(x, t, c_concat, c_crossattn, control, transformer_options, **conds): named or by position
        return dict(zip(_POSITIONAL, self.args, strict=False)) | self.kwargs

    @cached_property
    def options(self) -> dict[str, Any]:
        """The transformer_options."""
        return self._named.get("transformer_options") or {}

    @property
    def control(self) -> Any:
        return self._named.get("control")

    @cached_property
    def conds(self) -> dict[str, Any]:
        """The conditionings by name."""
        return {key: value for key, value in self._named.items() if key not in ("control", "transformer_options")}

    @property
    def tree(self) -> nn.Module:
        # with torch.compile the attribute is swapped for the call; the modules below it are the same
        return unwrapped(self.base.diffusion_model)

    @property
    def patcher(self) -> ModelPatcher | None:
        """The MODEL clone that is being sampled."""
        found: ModelPatcher | None = getattr(self.base, "current_patcher", None)
        return found

    @property
    def has_bf16(self) -> bool:
        """Whether the device is good at bf16."""
        device = getattr(self.patcher, "load_device", self.x.device)
        return bool(comfy.model_management.should_use_bf16(device))

    @property
    def sigma(self) -> float:
        return float(self.t.flatten()[0])

    def compute(self, rung: Rung, observer: Observer | None = None, *, exact: bool = False) -> Tensor:
        """The denoised x [B, C, h, w] on a rung. observer: looks at the streams. exact: all of it in the rung's dtype,
        quantized weights and the parameters with a dtype of their own, too.

        Whatever the rung needs on the loaded module is there for the length of the call only.
        """
        fix = self.fix
        native = fix.path == "native"
        with contextlib.ExitStack() as stack:
            if native and rung != fix.first_rung:  # whose eps the object patches have set
                # the managed forward wants the stock eps
                stack.enter_context(norms_for(self.tree, fix.arch, StreamPlan() if rung.managed else rung.plan))
            if rung.dtype is not None or (rung.managed and native):
                stack.enter_context(casting(self.base, self.tree, rung.dtype, exact=exact))
            outside = frozenset[str]() if rung.managed else stack.enter_context(wrapped_outside(self.tree, fix))
            call = CallState(rung, observer if fix.counting else None, outside, own_dtypes=not exact)
            stack.enter_context(fix.during(call))
            out = self.go_on(self.x, self.t, *self.args, **self.kwargs)
        self.run.reached = self.run.reached or call.trace.reached
        return out

    def recompute_stripping_wrappers(self, rung: Rung, observer: CallObserver) -> Tensor | None:
        """Compute it once more; where something answers for the model, without other packs' DIFFUSION_MODEL wrappers.

        Step caches (EasyCache and its like) know a call by its sigma: asked again, they give the result that was just
        found wanting, or compare it with itself. None where the model was not reached even so.
        """
        for call in (self, self.without_wrappers()):
            observer.begin()
            out = call.compute(rung, observer)
            if observer.saw_anything():
                return out
        return None

    def without_wrappers(self) -> ModelCall:
        """The same call without the DIFFUSION_MODEL wrappers (the MODEL keeps them)."""
        kept = {k: v for k, v in self.options.get("wrappers", {}).items() if k != WrappersMP.DIFFUSION_MODEL}
        options = {**self.options, "wrappers": kept}
        if len(self.args) > _OPTIONS:
            return replace(self, args=(*self.args[:_OPTIONS], options, *self.args[_OPTIONS + 1 :]))
        return replace(self, kwargs={**self.kwargs, "transformer_options": options})

    def bare(self) -> ModelCall:
        """The same call without any wrapper of another pack: what counts calls or keeps results does not see it."""
        original = getattr(self.go_on, "original", None)
        return replace(self.without_wrappers(), go_on=self.go_on if original is None else original)

    @property
    def has_wrappers(self) -> bool:
        """Whether other packs' wrappers stand between this call and the model."""
        inside = getattr(self.go_on, "wrappers", [])[getattr(self.go_on, "idx", 0) + 1 :]
        return bool(inside) or any(self.options.get("wrappers", {}).get(WrappersMP.DIFFUSION_MODEL, {}).values())

    def with_conds(self, **conds: Any) -> ModelCall:
        """The same call with other conditionings by these names."""
        return replace(self, args=(), kwargs={**self._named, **conds}) if conds else self

    @property
    def manageable(self) -> bool:
        """Whether the managed forward can run this call, and this class as other nodes have left it."""
        if not self.fix.manageable or not self.run.reached or self.lost_changes():
            return False
        if self.conds.get("c_concat") is not None:
            return False
        rest = {k: v for k, v in self.conds.items() if k not in ("c_crossattn", "c_concat")}
        return not_understood(self.conds.get("c_crossattn"), self.control, self.options, rest) is None

    def lost_changes(self) -> str | None:
        """A sentence about what other packs changed and our forward would lose; the built-in class's own is ours."""
        return None if self.fix.path == "builtin" else lost_changes(self.tree, self.fix.arch, self.patcher)
