"""A custom node pack for the page tests: no step is over in less than a tenth of a second, on any machine.

Without it a fast machine is through a small model's run before the page has drawn its second frame, and what the tests
look for (live steps, a reload or an interrupt in mid-run) never gets a chance to be seen.
"""

from __future__ import annotations

import time
from typing import Any

import comfy.samplers

NODE_CLASS_MAPPINGS: dict[str, type] = {}
SECONDS_PER_STEP = 0.1

_sample = comfy.samplers.KSAMPLER.sample


def _paced(self: Any, model_wrap: Any, sigmas: Any, extra_args: Any, callback: Any, *rest: Any, **named: Any) -> Any:
    ended = time.monotonic()

    def after_step(*values: Any) -> None:
        nonlocal ended
        if callback is not None:
            callback(*values)
        time.sleep(max(0.0, ended + SECONDS_PER_STEP - time.monotonic()))
        ended = time.monotonic()

    return _sample(self, model_wrap, sigmas, extra_args, after_step, *rest, **named)


comfy.samplers.KSAMPLER.sample = _paced
