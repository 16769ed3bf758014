"""After every model call of a fixed MODEL: look at it, and where it left fp16's range, compute it again. Policy only:
one call is in call.py, the rungs are in ladder.py, what is compared in self_check.py."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...fold.errors import MossError
from ...fold.report.messages import Message, message
from ...fold.report.report import Remedy, Rescue, SelfCheck
from ..engines.adapters import refuse_unscaled
from ..model.comfy_types import Executor
from ..panel import publish
from ..panel.publish import Kind
from ..panel.remedy import remedy_for
from ..state import FixState, Rung
from . import self_check
from .call import ModelCall
from .inputs_check import (
    conditioning_fault,
    finite_items,
    nan_for_broken,
    zeros_for_broken,
)
from .ladder import Evidence, WriterWatch, evidence_of, halved, next_rung, without_fold, writers_watched

BYPASSED = (
    "Another node has put a forward of its own in the place of the diffusion model's, after the MOSS fp16 fix and past "
    "it. Connect the MOSS node after that node."
)


class Guard:
    """The APPLY_MODEL wrapper. One device flag is read per call; the rest waits for the end of the run."""

    def __init__(self, fix: FixState) -> None:
        self.fix = fix

    def __call__(self, executor: Executor, x: Tensor, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        run = self.fix.current_run()
        watched = WatchedCall(ModelCall(self.fix, run, executor, x, t, args, kwargs))
        if run.model_calls == 0:
            watched.check_model()
        out = watched.run_checked()
        run.model_calls += 1
        run.counters.commit()
        return out


class WatchedCall:
    """One model call under the guard: its result is on the rung that the run ends up on."""

    def __init__(self, call: ModelCall) -> None:
        self.call, self.fix, self.run = call, call.fix, call.run
        #: [B, 1, 1, 1]: the items that are finite, where broken ones of the batch are left out
        self.kept_items: Tensor | None = None

    def check_model(self) -> None:
        """MossError for what other nodes have done to the MODEL that a kept fold or the managed forward would lose."""
        first, call = self.fix.first_rung, self.call
        if not first.plan.baked.identity:
            refuse_unscaled(call.tree, call.patcher, self.fix.arch, first.plan.baked)
        if first.managed and (problem := call.lost_changes()):
            raise MossError(problem)

    def run_checked(self) -> Tensor:
        """The call's result: in range as far as a rung can bring it there, and self-checked."""
        if self.run.skips_broken_items:
            self.leave_out_broken_items()
        out = self.compute()
        if self.run.rung.managed and not self.run.reached:
            raise MossError(BYPASSED)
        out = self.in_range(out)
        if self.fix.options.self_check and self.writers_are_known(out) is False:
            out = self.in_range(self.compute())
        return out if self.kept_items is None else nan_for_broken(out, self.kept_items)

    def compute(self) -> Tensor:
        """On the run's rung, counted."""
        self.run.counters.begin()
        return self.call.compute(self.run.rung, self.run.counters)

    # ---- in range ---------------------------------------------------------------------------------------------------

    def in_range(self, out: Tensor) -> Tensor:
        """`out`, or what a higher rung gives where it is out of range and a rung can help."""
        if self.fix.options.guard == "off" or not self.is_bad(out):
            return out
        if self.run.gave_up:
            return out  # an earlier call's result was kept as it was, and this one has grown out of it
        if not bool(finite_items(self.call.x).all()):
            out = self.without_broken_items(out)
            if self.run.gave_up or not self.is_bad(out):
                return out
        if (fault := conditioning_fault(self.call.conds)) is not None:
            self.give_up("input_fault", fault)
            return out
        evidence = evidence_of(self.run.counters.read_call(), None)
        if self.fix.options.guard == "report":
            self.give_up("out_of_range", message("out_of_range", step=self.run.step + 1, reason=evidence.reason()))
            return out
        return self.rescue(out, evidence)

    def is_bad(self, out: Tensor) -> bool:
        """The guard's one flag: not finite anywhere, or an fp16 stream that saturated.

        In a wider stream that is fine, and under the clamp it is what the user asked for.
        """
        bad, rung = ~out.isfinite().all(), self.run.rung
        if self.fix.counting and self.run.half_stream(rung) and rung.plan.clamp is None:
            bad = bad | self.run.counters.bad_flag().to(bad.device)
        return bool(bad)

    def give_up(self, kind: Kind, said: Message) -> None:
        """Keep what is not finite, and say why, once: the counts tell the rest."""
        self.run.gave_up = True
        self.say(kind, said, remedy_for(self.fix, self.run, "broken"))

    def say(self, kind: Kind, said: Message, remedy: Remedy | None = None) -> None:
        """In the report, and as a toast, which has the remedy in it."""
        self.run.messages.append(said)
        publish.notice(self.fix, self.run, kind, said, remedy)

    def without_broken_items(self, out: Tensor) -> Tensor:
        """The latent came in broken. Where only some items of the batch are, the others go on without them."""
        if self.fix.options.guard != "rescue" or not bool(finite_items(self.call.x).any()):
            self.give_up("input_fault", self.latent_fault())
            return out
        self.say("input_fault", self.latent_fault(some=True))
        self.run.skips_broken_items = True
        self.leave_out_broken_items()
        return self.compute()

    def latent_fault(self, *, some: bool = False) -> Message:
        """Who made a latent that is not finite: a node before the sampler, or whatever came after a finite call."""
        end = "_some" if some else ""
        if self.run.model_calls == 0:
            return message(f"input_fault_latent{end}")
        return message(f"input_fault_between{end}", call=self.run.model_calls)

    def leave_out_broken_items(self) -> None:
        """Zeros in the place of latents that are not finite."""
        self.kept_items = finite_items(self.call.x)
        self.call = replace(self.call, x=zeros_for_broken(self.call.x, self.kept_items))

    def rescue(self, out: Tensor, evidence: Evidence) -> Tensor:
        """Climb until the call is in range; the run stays on that rung."""
        run, first = self.run, evidence.reason()
        while True:
            manageable = self.call.manageable
            if manageable:
                evidence = self.closer_look()
            rung = next_rung(run.rung, evidence, manageable=manageable)
            if rung is None:
                self.give_up("model_broken", message("model_broken"))
                return out
            run.rung = rung
            again = self.call.recompute_stripping_wrappers(rung, run.counters)
            out = out if again is None else again
            if again is not None and not self.is_bad(out):
                break
            evidence = evidence_of(run.counters.read_call(), None)
        run.rescues.append(Rescue(run.step + 1, self.call.sigma, run.rung.label, first))
        said = message("rescued", step=run.step + 1, rung=run.rung.label, reason=first)
        publish.notice(self.fix, run, "rescue", said, remedy_for(self.fix, run, "rescued"))
        return out

    def closer_look(self) -> Evidence:
        """The failed call once more with an eye on the blocks' own writers."""
        run, blocks = self.run, self.run.counters.read_call()
        if run.rung.full:
            return evidence_of(blocks, None)
        watch = WriterWatch()
        with _eagerly():
            self.call.recompute_stripping_wrappers(writers_watched(run.rung), watch)
        run.counters.drop()
        return evidence_of(blocks, watch)

    # ---- the self-check ---------------------------------------------------------------------------------------------

    def writers_are_known(self, out: Tensor) -> bool | None:
        """Once per combination: the same call at c/2 must agree, or the run goes on without the fold (False).

        None where there was nothing to compare.
        """
        run, plan = self.run, self.run.rung.plan
        if run.rung.full or (plan.factors.c == (1.0,) and plan.baked.c == (1.0,)):
            return None
        key = self.combination()
        if self_check.seen(key) or run.checks >= self_check.MOST:
            run.checked(SelfCheck("remembered"))
            return None
        if self.is_bad(out):
            return None  # out of range: the two sides would differ for that reason alone
        difference = self.difference_to(halved(run.rung), out)
        run.checks += 1
        if difference is None:
            return None
        if difference <= self_check.BOUND:
            self_check.remember(key)
            run.checked(SelfCheck("passed", difference))
            return True
        self.leave_off_fold(difference)
        return False

    def combination(self) -> tuple[Any, ...]:
        """What a check holds for."""
        run, call = self.run, self.call
        run.model_key = run.model_key or self_check.of_model(call.tree, call.patcher)
        return (*run.model_key, *self_check.of_call(call.options, call.conds, run.rung.managed))

    def difference_to(self, rung: Rung, out: Tensor) -> float | None:
        """How far the same call on another rung is from `out`; None where the model could not be asked again.

        That call is not part of the run and is not counted in it.
        """
        other = self.call.recompute_stripping_wrappers(rung, self.fix.new_counters())
        return None if other is None else self_check.disagreement(out, other, self.call.x)

    def leave_off_fold(self, difference: float) -> None:
        """Something else writes to the stream: the run goes on without the fold."""
        run = self.run
        who = self_check.suspects(self.call.conds, self.call.options, self.call.control)
        run.rung = without_fold(run.rung, manageable=self.call.manageable)
        said = message("self_check_failed", difference=f"{difference:.1e}", suspects=who, rung=run.rung.label)
        run.checked(SelfCheck("failed", difference, ", ".join(one.text for one in who)))
        self.say("self_check", said)


def _eagerly() -> contextlib.AbstractContextManager[None]:
    """Without torch.compile: compiling takes minutes, and what is looked at here runs but once. torch 2.6 and newer."""
    stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if stance is None else stance("force_eager")
