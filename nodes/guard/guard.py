"""Around every model call of a fixed MODEL: count, check, and where it went out of range, compute it again."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...fold.errors import MossError
from ...fold.report.counters import Counters
from ...fold.report.report import Rescue
from ...fold.scaling.plan import StreamPlan
from ..engines.adapters import refuse_unscaled
from ..engines.casting import casting
from ..engines.managed import BYPASSED, left_out, not_understood
from ..engines.native import outermost, retune
from ..panel import publish
from ..state import Handle, Run, Rung
from . import self_check
from .ladder import Evidence, WriterWatch, evidence_of, next_rung


class ModelCall:
    """The APPLY_MODEL wrapper. One device flag is read per call; the rest waits for the end of the run."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __call__(self, executor: Any, x: Tensor, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        handle, run = self.handle, self.handle.current()
        call = _Call(handle, executor, x, t, args, kwargs)
        if run.model_calls == 0:
            call.check_model()
        if run.partly:
            call.leave_out_broken()
        out = call.compute()
        if handle.rung.managed and not handle.entered:
            raise MossError(BYPASSED)
        if handle.options.guard != "off" and call.is_bad(out):
            out = self._bad(call, run, out)
        if handle.options.self_check:
            out = self._check(call, run, out)
        run.model_calls += 1
        run.counters.commit()
        return call.with_broken(out)

    def _bad(self, call: _Call, run: Run, out: Tensor) -> Tensor:
        if run.broken:
            return out  # an earlier call's result was kept as it was, and this one has grown out of it
        if (fault := call.input_fault()) is not None:
            return self._faulty(call, run, out, fault)
        evidence = evidence_of(run.counters.read_call(), None)
        if self.handle.options.guard == "report":
            run.broken = True  # said once; the counts tell the rest
            sentence = f"Step {run.step + 1}: {evidence.reason()} in fp16 (guard = report, so it was kept)."
            run.warn(sentence)
            publish.notice(self.handle, run, "non_finite", "warn", sentence)
            return out
        return self._rescue(call, run, out, evidence)

    def _faulty(self, call: _Call, run: Run, out: Tensor, fault: str) -> Tensor:
        """The input was broken before. Where only some items of a batch are, the others go on without them."""
        partly = self.handle.options.guard == "rescue" and call.some_are_broken()
        fault = fault + _OTHERS if partly else fault
        publish.notice(self.handle, run, "non_finite", "error", fault)
        run.warn(fault)
        if not partly:
            run.broken = True
            return out
        run.partly = True
        call.leave_out_broken()
        out = call.compute()
        return self._bad(call, run, out) if call.is_bad(out) else out

    def _rescue(self, call: _Call, run: Run, out: Tensor, evidence: Evidence) -> Tensor:
        """Climb until the call is in range; the run stays on that rung."""
        handle, first = self.handle, evidence.reason()
        while True:
            if call.manageable:
                evidence = call.look_closer(run.counters.read_call())
            rung = next_rung(handle.rung, evidence, manageable=call.manageable)
            if rung is None:
                run.broken = True
                sentence = "The output is not finite even in fp32: the model, an adapter or the conditioning is broken."
                run.warn(sentence)
                publish.notice(handle, run, "non_finite", "error", sentence)
                return out
            handle.rung = rung
            run.counters.alert()
            again = call.again()
            out = out if again is None else again
            if again is not None and not call.is_bad(out):
                break
            evidence = evidence_of(run.counters.read_call(), None)
        run.rescues.append(Rescue(run.step + 1, call.sigma, handle.rung.label, first))
        publish.notice(
            handle, run, "rescue", "warn", f"Step {run.step + 1} was computed again with {handle.rung.label}: {first}."
        )
        return out

    def _check(self, call: _Call, run: Run, out: Tensor) -> Tensor:
        """Once per combination: the same call at c/2 must agree."""
        handle = self.handle
        plan = handle.rung.plan
        if handle.rung.full or (plan.factors.c == (1.0,) and plan.baked.c == (1.0,)):
            return out
        key = call.combination()
        if self_check.seen(key) or run.checks >= self_check.MOST:
            run.checked("remembered")
            return out
        if call.is_bad(out):
            return out  # out of range: the two sides would differ for that reason alone
        difference = self._compare(call, run, out)
        run.checks += 1
        if difference is None:
            return out
        if difference <= self_check.BOUND:
            self_check.remember(key)
            run.checked("passed", difference)
            return out
        return self._distrust(call, run, difference)

    def _compare(self, call: _Call, run: Run, out: Tensor) -> float | None:
        """How far the same call at c/2 is from `out`; None where the model could not be asked again.

        The rung, the counters and the norms' eps end as they were.
        """
        handle, counted, chosen = self.handle, run.counters, self.handle.rung
        run.counters = Counters(counted.names, counted.threshold)  # the second call is not part of the run
        handle.rung = replace(chosen, plan=chosen.plan.halved())
        try:
            other = call.again()
            return None if other is None else self_check.disagreement(out, other, call.x)
        finally:
            run.counters, handle.rung = counted, chosen
            call.settle()

    def _distrust(self, call: _Call, run: Run, difference: float) -> Tensor:
        """Something else writes to the stream: go on without the fold, one in the weights taken out at run time."""
        handle, who = self.handle, call.suspects()
        plan = handle.rung.plan
        # what s moves stays inside a block, where an unknown writer of the stream does not matter
        plain = replace(plan, factors=replace(plan.factors, c=(1.0 / plan.baked.c[0],)))
        if call.manageable:
            handle.rung = Rung(replace(plain, mode="fp32_residual"), managed=True)
        else:
            handle.rung = Rung(replace(plain, mode="none"), managed=handle.rung.managed, full=True)
        sentence = (
            f"The fold was left off: the same call at c and c/2 differed by {difference:.1e}, so something else writes "
            f"to the stream ({who}). The run went on with {handle.rung.label}."
        )
        run.counters.alert()
        run.checked("failed", difference, who)
        run.warn(sentence)
        publish.notice(handle, run, "self_check", "warn", sentence)
        out = call.compute()
        if handle.options.guard == "off" or not call.is_bad(out):
            return out
        return self._bad(call, run, out)


_INPUT_FAULT = (
    "The latent held NaN or infinity before the model was called: a node before the sampler made it, not the fp16 fix."
)
_OTHERS = " The other images of the batch go on without it."
_COND_FAULT = (
    "The conditioning {name} held NaN or infinity before the model was called: the node that made it is to blame, not "
    "the fp16 fix."
)


_POSITIONAL = ("c_concat", "c_crossattn", "control", "transformer_options")
_OPTIONS = _POSITIONAL.index("transformer_options")


def _eagerly() -> contextlib.AbstractContextManager[None]:
    """Without torch.compile: compiling takes minutes, and what is looked at here runs but once. torch 2.6 and newer."""
    stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if stance is None else stance("force_eager")


class _Call:
    """One model call that can be computed again on another rung."""

    def __init__(
        self, handle: Handle, executor: Any, x: Tensor, t: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.handle, self.executor, self.x, self.t, self.args, self.kwargs = handle, executor, x, t, args, kwargs
        self.base = executor.class_obj
        # apply_model(x, t, c_concat, c_crossattn, control, transformer_options, **conds): named or by position
        named = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
        self.options: dict[str, Any] = named.pop("transformer_options", None) or {}
        self.control = named.pop("control", None)
        self.conds = named
        self.sound: Tensor | None = None  # [B, 1, 1, 1]: items whose latent is finite, once the others are left out

    @property
    def tree(self) -> Any:
        # with torch.compile the attribute is swapped for the call; the modules below it are the same
        found = self.base.diffusion_model
        return getattr(found, "_orig_mod", found)

    @property
    def sigma(self) -> float:
        return float(self.t.flatten()[0])

    @property
    def manageable(self) -> bool:
        """Whether the managed forward can run this call, and this class as other nodes have left it."""
        if not self.handle.manageable or not self.handle.entered or self._left_out():
            return False
        rest = {k: v for k, v in self.conds.items() if k not in ("c_crossattn", "c_concat")}
        if self.conds.get("c_concat") is not None:
            return False
        return not_understood(self.conds.get("c_crossattn"), self.control, self.options, rest) is None

    def check_model(self) -> None:
        """MossError for what other nodes have done to the MODEL that a kept fold or the managed forward would lose."""
        handle = self.handle
        if not handle.start.plan.baked.identity:
            refuse_unscaled(self.tree, self.patcher, handle.arch, handle.start.plan.baked)
        if handle.start.managed and (problem := self._left_out()):
            raise MossError(problem)

    def _left_out(self) -> str | None:
        # the built-in class's own forward is ours too
        return None if self.handle.path == "builtin" else left_out(self.tree, self.handle.arch, self.patcher)

    def input_fault(self) -> str | None:
        """A sentence where the call was not finite before the model saw it: no rung helps there."""
        if not bool(self.x.isfinite().all()):
            return _INPUT_FAULT
        for name, value in self.conds.items():
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(self._finite(name, value).all()):
                return _COND_FAULT.format(name="text" if name == "c_crossattn" else name)
        return None

    def some_are_broken(self) -> bool:
        """Whether the latents of some items of the batch are not finite, but not those of all."""
        count = int(self._sound_items().sum())
        return 0 < count < self.x.shape[0]

    def leave_out_broken(self) -> None:
        """Put zeros in the place of latents that are not finite. Without a wait for the device."""
        self.sound = self._sound_items()
        self.x = torch.where(self.sound, self.x, 0.0)

    def with_broken(self, out: Tensor) -> Tensor:
        """The result, not finite again for the items that were left out: they must not look like pictures."""
        return out if self.sound is None else torch.where(self.sound, out, torch.nan)

    def _sound_items(self) -> Tensor:
        return self.x.isfinite().flatten(1).all(dim=1).reshape(-1, *[1] * (self.x.dim() - 1))

    def _finite(self, name: str, value: Tensor) -> Tensor:
        """Where a conditioning is finite; what pads a text is of no account."""
        mask = self.conds.get("attention_mask") if name == "c_crossattn" else None
        finite = value.isfinite()
        if mask is None or value.dim() != 3 or mask.numel() != value.shape[0] * value.shape[1]:
            return finite
        return finite | (mask.reshape(*value.shape[:2], 1) == 0)

    def compute(self) -> Tensor:
        """Run it on the handle's rung."""
        self.handle.current().counters.begin()
        self.settle()
        rung = self.handle.rung
        with contextlib.ExitStack() as around:
            if rung.full or (rung.managed and self.handle.path == "native"):
                around.enter_context(casting(self.base, self.tree, full=rung.full))
            if not rung.managed:
                around.enter_context(outermost(self.tree, self.handle))
            out: Tensor = self.executor(self.x, self.t, *self.args, **self.kwargs)
        return out

    def again(self) -> Tensor | None:
        """Run it once more, past whatever would answer for the model; None where that is not possible.

        Step caches (EasyCache and its like) wrap the diffusion model and know a call by its sigma: asked again, they
        give the result that was just found wanting, or compare it with itself.
        """
        for bare in (False, True):
            if bare:
                self._leave_out_wrappers()
            out = self.compute()
            if self.handle.current().counters.saw_anything():
                return out
        return None

    def _leave_out_wrappers(self) -> None:
        """Take the DIFFUSION_MODEL wrappers out of this call (not of the MODEL)."""
        kept = {k: v for k, v in self.options.get("wrappers", {}).items() if k != WrappersMP.DIFFUSION_MODEL}
        options = {**self.options, "wrappers": kept}
        if len(self.args) > _OPTIONS:
            self.args = (*self.args[:_OPTIONS], options, *self.args[_OPTIONS + 1 :])
        else:
            self.kwargs = {**self.kwargs, "transformer_options": options}

    def settle(self) -> None:
        """On the native path the norms' eps belongs to the rung; the managed forward wants the stock one."""
        handle = self.handle
        if handle.path == "native" and (handle.rung != handle.start or handle.retuned):
            retune(self.tree, handle.arch, StreamPlan() if handle.rung.managed else handle.rung.plan)
            handle.retuned = handle.rung != handle.start

    def is_bad(self, out: Tensor) -> bool:
        """The guard's one flag: not finite anywhere, or an fp16 stream that saturated.

        In a wider stream that is fine, and under the clamp it is what the user asked for.
        """
        bad = ~out.isfinite().all()
        if self.handle.counting and self.handle.half_stream and self.handle.rung.plan.clamp is None:
            bad = bad | self.handle.current().counters.bad_flag().to(bad.device)
        return bool(bad)

    def look_closer(self, blocks: Any) -> Evidence:
        """The failed call once more with an eye on the blocks' own writers."""
        handle, watch, run = self.handle, WriterWatch(), self.handle.current()
        chosen = handle.rung
        if chosen.full:
            return evidence_of(blocks, None)
        handle.rung, handle.watch = replace(chosen, managed=True), watch
        try:
            with _eagerly():
                self.compute()
                if not watch.asked:
                    self._leave_out_wrappers()
                    self.compute()
        finally:
            handle.rung, handle.watch = chosen, None
            run.counters.drop()
        return evidence_of(blocks, watch)

    @property
    def patcher(self) -> Any:
        """The MODEL clone that is being sampled."""
        return getattr(self.base, "current_patcher", None)

    def combination(self) -> tuple[Any, ...]:
        run = self.handle.current()
        run.model_key = run.model_key or self_check.of_model(self.tree, self.patcher)
        return (*run.model_key, *self_check.of_call(self.options, self.conds, self.handle.rung.managed))

    def suspects(self) -> str:
        return self_check.suspects(self.conds, self.options, self.control)
