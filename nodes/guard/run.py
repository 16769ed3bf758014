"""One sampling run of a fixed MODEL: begins its counters, follows its steps, closes its report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import comfy.model_management
from torch import Tensor

from ...fold.errors import MossError
from ...fold.report.messages import Message, message
from ...fold.report.report import State
from ..engines.memory import told_to_comfyui
from ..model.comfy_types import Executor, Guider
from ..model.moss import compute_dtype_of
from ..panel import publish
from ..state import FixState, Run
from .inputs_check import unusable_text

log = logging.getLogger(__name__)

#: (index, x0, x, total steps)
OnStep = Callable[[int, Tensor, Tensor, int], object]

_POSITIONAL = ("noise", "latent_image", "sampler", "sigmas", "denoise_mask", "callback")
_CALLBACK = _POSITIONAL.index("callback")


class SamplingRun:
    """The OUTER_SAMPLE wrapper. Raises MossError for a conditioning that no call could use."""

    def __init__(self, fix: FixState) -> None:
        self.fix = fix

    def __call__(self, executor: Executor[Guider], *args: Any, **kwargs: Any) -> Tensor:
        # outer_sample(noise, latent_image, sampler, sigmas, denoise_mask, callback, ...): named or by position
        call = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
        fix = self.fix
        dtype = compute_dtype_of(executor.class_obj.model_patcher)  # a node after the fix may have changed it
        run = fix.begin_run(dtype, max(len(call["sigmas"]) - 1, 0), *publish.where_now())
        panel = publish.LivePanel(fix, run)
        following = _following(run, panel, call.get("callback"))
        if len(args) > _CALLBACK:
            args = (*args[:_CALLBACK], following, *args[_CALLBACK + 1 :])
        else:
            kwargs["callback"] = following
        publish.publish_running(fix, run, run.counters.read())
        state: State = "failed"
        try:
            problem = unusable_text(fix.arch, executor.class_obj, managed=fix.first_rung.managed)
            if problem is not None:
                raise MossError(problem)
            with told_to_comfyui(executor.class_obj.model_patcher.model, fix):
                out: Tensor = executor(*args, **kwargs)
            run.finite = bool(out.isfinite().all())
            explained = run.gave_up or run.skips_broken_items or fix.options.guard == "off"
            if not run.finite and run.model_calls and not explained:
                # every call was looked at, so it was made after the last one
                run.messages.append(message("input_fault_between", call=run.model_calls))
            state = "done"
            return out
        except comfy.model_management.InterruptProcessingException:
            state = "interrupted"
            raise
        except Exception as error:
            run.error = _why(error)
            raise
        finally:
            _close(fix, run, state)
            fix.run = None


def _why(error: Exception) -> Message:
    """An exception as one sentence of the report."""
    if isinstance(error, comfy.model_management.OOM_EXCEPTION):
        return message("error_memory")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return message("error", error=first if isinstance(error, MossError) else f"{type(error).__name__}: {first[:300]}")


def _close(fix: FixState, run: Run, state: State) -> None:
    """The last report; reading it from a device that just failed must not hide why it failed."""
    try:
        publish.finish(fix, run, state)
    except RuntimeError:
        if state == "done":
            raise
        log.warning("The report of a run that failed could not be read from the device.", exc_info=True)


def _following(run: Run, panel: publish.LivePanel, callback: OnStep | None) -> OnStep:
    """The sampler's step callback, which also counts steps."""

    def step(index: int, x0: Tensor, x: Tensor, total: int) -> object:
        run.step, run.total_steps = index + 1, total
        panel.update()
        return None if callback is None else callback(index, x0, x, total)

    return step
