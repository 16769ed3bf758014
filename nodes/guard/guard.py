"""After every model call of a fixed MODEL: look at it, and where it left fp16's range, compute it again. Policy only:
one call is in call.py, the rungs are in ladder.py, what is compared in self_check.py."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ...fold.dtypes import dtype_name
from ...fold.errors import MossError
from ...fold.report.messages import Message, message, named
from ...fold.report.report import CheckResult, Remedy, Rescue, SelfCheck
from ..engines.adapters import refuse_unscaled
from ..engines.router import OURS
from ..model.comfy_types import BaseModel, Executor
from ..panel import publish
from ..panel.publish import Kind
from ..panel.remedy import remedy_for
from ..state import FixState, Rung
from . import self_check
from .call import ModelCall
from .inputs_check import (
    broken_weights,
    conditioning_fault,
    finite_items,
    nan_for_broken,
    zeros_for_broken,
)
from .ladder import (
    Evidence,
    WriterWatch,
    evidence_of,
    halved,
    kind_of,
    next_rung,
    rungs_without_fold,
    writers_watched,
)
from .proof import Prover, eagerly

BYPASSED = (
    "Another node has put a forward of its own in the place of the diffusion model's, after the MOSS fp16 fix and past "
    "it. Connect the MOSS node after that node."
)


class Guard:
    """The APPLY_MODEL wrapper. It waits for the device once per call, for one flag; counters are read after the run."""

    def __init__(self, fix: FixState) -> None:
        self.fix = fix

    def __call__(self, executor: Executor[BaseModel], x: Tensor, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        run = self.fix.current_run()
        watched = WatchedCall(ModelCall(self.fix, run, executor.class_obj, executor, x, t, args, kwargs))
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
        #: whether the run's rung could not be proven for want of memory or of a class that runs in fp32
        self.unproven = False

    def check_model(self) -> None:
        """MossError for what other nodes have done to the MODEL that a kept fold or the managed forward would lose."""
        first, call = self.fix.first_rung, self.call
        if not first.plan.baked.identity:
            refuse_unscaled(call.tree, call.patcher, self.fix.arch, first.plan.baked)
        if first.managed and (problem := call.lost_changes()):
            raise MossError(problem)

    def run_checked(self) -> Tensor:
        """The denoised x [B, C, h, w]: proven, in range where a rung can bring it there. MossError as `settle_rung`."""
        if self.run.skips_broken_items:
            self.leave_out_broken_items()
        self.settle_rung()
        out = self.compute()
        if self.run.rung.managed and not self.run.reached:
            raise MossError(BYPASSED)
        out = self.in_range(out)
        if not self.halves_agree(out):
            out = self.in_range(self.compute())
        return out if self.kept_items is None else nan_for_broken(out, self.kept_items)

    def compute(self) -> Tensor:
        """The denoised x [B, C, h, w] on the run's rung, counted."""
        self.run.counters.begin()
        return self.call.compute(self.run.rung, self.run.counters)

    # ---- in range ---------------------------------------------------------------------------------------------------

    def in_range(self, out: Tensor) -> Tensor:
        """`out` where it is in range, or where inputs or the guard's setting forbid a rescue; else see `rescue`."""
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
        """Keep results that are out of range for the rest of the run, and report why, once."""
        self.run.gave_up = True
        self.say(kind, said, remedy_for(self.fix, self.run, "broken"))

    def say(self, kind: Kind, said: Message, remedy: Remedy | None = None) -> None:
        """Add a message to the report, and send it as a toast with the remedy."""
        self.run.messages.append(said)
        publish.notice(self.fix, self.run, kind, said, remedy)

    def without_broken_items(self, out: Tensor) -> Tensor:
        """The result for a latent that came in not finite.

        Where some items of the batch are finite it is computed again with zeros for the others; else it is `out`.
        """
        if self.fix.options.guard != "rescue" or not bool(finite_items(self.call.x).any()):
            self.give_up("input_fault", self.latent_fault())
            return out
        self.say("input_fault", self.latent_fault(some=True))
        self.run.skips_broken_items = True
        self.leave_out_broken_items()
        return self.compute()

    def latent_fault(self, *, some: bool = False) -> Message:
        """A message: a latent that is not finite came from a node before the sampler, or from between two calls."""
        end = "_some" if some else ""
        if self.run.model_calls == 0:
            return message(f"input_fault_latent{end}")
        return message(f"input_fault_between{end}", call=self.run.model_calls)

    def leave_out_broken_items(self) -> None:
        """Replace items of x that are not finite by zeros, for this call."""
        self.kept_items = finite_items(self.call.x)
        self.call = replace(self.call, x=zeros_for_broken(self.call.x, self.kept_items))

    def rescue(self, out: Tensor, evidence: Evidence) -> Tensor:
        """The call on the first higher rung that is in range, on which the run stays; `out` where there is none.

        There is none for a model with broken weights, which is found out by one look at them.
        """
        run, first = self.run, evidence.reason()
        if not bool(out.isfinite().all()) and (broken := self.weights_fault):
            self.give_up("model_broken", broken)
            return out
        while True:
            manageable = self.call.manageable and "managed" not in run.disproved
            if manageable:
                evidence = self.closer_look()
            rung = self.next_proven_rung(evidence, manageable)
            if rung is None:
                self.give_up("model_broken", self.weights_fault or message("model_broken"))
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

    @cached_property
    def weights_fault(self) -> Message | None:
        """A message naming the weights that are not finite, if any is."""
        broken = broken_weights(self.call.tree, self.fix.arch.names)
        if not broken:
            return None
        dtype = dtype_name(next(iter(broken.values())).dtype)
        return message("weights_broken", weights=named(tuple(broken)), dtype=dtype)

    def closer_look(self) -> Evidence:
        """Compute the failed call again, watching o and ffn_down of the blocks: which of them overflowed first."""
        run, blocks = self.run, self.run.counters.read_call()
        if run.rung.dtype is not None:
            return evidence_of(blocks, None)
        watch = WriterWatch()
        with eagerly():
            self.call.recompute_stripping_wrappers(writers_watched(run.rung), watch)
        run.counters.drop()
        return evidence_of(blocks, watch)

    # ---- the self-check ---------------------------------------------------------------------------------------------

    @cached_property
    def prover(self) -> Prover:
        return Prover(self.call)

    def settle_rung(self) -> None:
        """Before the first result of a combination is kept: its rung is proven, or another one takes its place."""
        rung = self.run.rung
        verdict = self.verdict_on(rung)
        if verdict is not None and verdict.result == "failed":
            self.refuse(rung, verdict)

    def verdict_on(self, rung: Rung) -> SelfCheck | None:
        """The self-check's verdict on a rung for this call, which is proven where it is new.

        None where nothing is to prove, or where the latent is not finite.
        """
        run, fix, kind = self.run, self.fix, kind_of(rung, self.fix.path)
        if not fix.options.self_check or kind is None or (kind == "managed" and run.accepted):
            return None
        if fix.path == "builtin" and not self_check.foreign_parts(self.call, OURS):
            verdict = SelfCheck("nothing to prove")
        elif (passed := self_check.remembered(key := self.combination(rung, wrappers=False))) is not None:
            verdict = replace(passed, result="remembered")
        elif run.checks >= self_check.MOST:
            verdict = SelfCheck("remembered")
        elif not bool(finite_items(self.call.x).all()):
            return None
        else:
            run.checks += 1
            verdict = self.prover.prove(rung)
            if verdict.result == "passed":
                self_check.remember(key, verdict)
        self.unproven = verdict.result == "not proven"
        if verdict.result != "failed":
            run.checked(verdict)
        return verdict

    def next_proven_rung(self, evidence: Evidence, manageable: bool) -> Rung | None:
        """The next rung of the ladder that is not disproved."""
        run, path = self.run, self.fix.path
        while True:
            rung = next_rung(run.rung, evidence, manageable=manageable, path=path, disproved=run.disproved)
            verdict = None if rung is None else self.verdict_on(rung)
            if rung is None or verdict is None or verdict.result != "failed":
                return rung
            self.disprove(rung, verdict, self.finding("rung_left_out", rung, verdict))

    def refuse(self, rung: Rung, verdict: SelfCheck) -> None:
        """The run's rung is not what the class computes: go on without the fix, or not at all where the user asked for
        just this."""
        run, fix = self.run, self.fix
        if kind_of(rung, fix.path) == "managed" and fix.options.managed_by_hand and rung == fix.first_rung:
            if not fix.options.accept_unproven:
                raise MossError(self.finding("self_check_refused", rung, verdict).text)
            run.accepted = True
            run.checked(replace(verdict, result="accepted"))
            self.say("self_check", self.finding("self_check_accepted", rung, verdict))
            return
        run.disproved.add(kind_of(rung, fix.path) or "fold")
        for other in rungs_without_fold(rung, fix.path, run.compute_dtype, has_bf16=self.call.has_bf16):
            found = self.verdict_on(other)
            if found is None or found.result != "failed":
                run.rung = other
                break
        bare = run.rung.plan.mode == "none"
        instead = dtype_name(run.rung.dtype or run.compute_dtype) if bare else run.rung.label
        self.disprove(rung, verdict, self.finding("self_check_failed", rung, verdict, instead=instead))

    def disprove(self, rung: Rung, verdict: SelfCheck, said: Message) -> None:
        """Leave a kind of rung out for the rest of this run, and report why."""
        self.run.disproved.add(kind_of(rung, self.fix.path) or "fold")
        self.run.checked(replace(verdict, detail=", ".join(one.text for one in self.suspects())))
        self.say("self_check", said)

    def finding(self, key: str, rung: Rung, verdict: SelfCheck, **values: str) -> Message:
        """A message naming the class, the rung, its relative difference and what could cause it."""
        managed, difference = rung.managed and self.fix.path != "builtin", verdict.difference or 0.0
        return message(
            key,
            name=type(self.call.tree).__name__,
            suspects=self.suspects(),
            rung=f"{rung.label} (managed)" if managed else rung.label,
            off=f"{difference:.1%}" if difference >= 1e-3 else f"{difference:.1e}",
            **values,
        )

    def suspects(self) -> tuple[Message, ...]:
        return self_check.suspects(self.call)[:4] or (message("suspect_class"),)

    def halves_agree(self, out: Tensor) -> bool:
        """Where there is no proof, or other packs' wrappers had no part in it: the same call at c/2 must agree, or the
        run goes on without the fold."""
        run, rung, options = self.run, self.run.rung, self.fix.options
        folds = rung.dtype is None and (rung.plan.factors.c != (1.0,) or rung.plan.baked.c != (1.0,))
        if not options.self_check or not folds or kind_of(rung, self.fix.path) is None:
            return True
        if rung.plan.loses_bits:
            return True  # at c / 2 fp16 loses one bit more, so that the two sides differ for that reason alone
        if not self.unproven and not self.call.has_wrappers:
            return True
        key = self.combination(rung, wrappers=True)
        if self_check.remembered(key) or run.checks >= self_check.MOST or self.is_bad(out):
            return True  # out of range, the two sides would differ for that reason alone
        run.checks += 1
        # that call is not part of the run and is not counted in it
        other = self.call.recompute_stripping_wrappers(halved(rung), self.fix.new_counters())
        if other is None:
            return True
        x = self.call.x.float()
        difference = self_check.relative_difference(x - out.float(), x - other.float())
        agree = difference <= self_check.HALVED_BOUND
        good: CheckResult = "not proven" if self.unproven else "passed"
        verdict = SelfCheck(good if agree else "failed", difference, self_check.HALVED_BOUND, "the call at c and c/2")
        if agree:
            self_check.remember(key, verdict)
            run.checked(verdict)
            if self.unproven:
                run.messages.append(message("not_proven"))
        else:
            self.refuse(rung, verdict)
        return agree

    def combination(self, rung: Rung, *, wrappers: bool) -> self_check.Combination:
        """The key that a check is remembered by: all that its verdict depends on."""
        run, call = self.run, self.call
        run.model_key = run.model_key or self_check.of_model(call.tree, call.patcher)
        return (*run.model_key, *self_check.of_call(call, rung, wrappers=wrappers), wrappers)
