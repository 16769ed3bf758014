"""The built-in class without ComfyUI, on any device: each mode against the fix off, random weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fold.arch import MossArch
from fold.dtypes import stored_dtype
from fold.model.forward import MossDiT
from fold.model.observer import Observer
from fold.report.counters import Counters, site_names
from fold.scaling.factors import DEFAULT
from fold.scaling.plan import FP16_MAX, StreamPlan

from .stats import Once, interleave, ratio
from .table import Row

ONLINE = StreamPlan("online", DEFAULT)
AGAIN = "fix off against fix off (the noise of this run)"
#: row -> (plan, counters, guard flag read, target on a CPU, target on a GPU)
MODES: dict[str, tuple[StreamPlan, bool, bool, float | None, float | None]] = {
    "online uniform": (ONLINE, False, False, 1.005, 1.005),
    "online + counters": (ONLINE, True, False, 1.03, 1.02),
    "online + counters + guard's flag": (ONLINE, True, True, 1.04, 1.03),
    "fp32_residual": (StreamPlan("fp32_residual"), False, False, 1.10, 1.06),
    "clamp with counts": (StreamPlan("online", DEFAULT, clamp=FP16_MAX), True, False, 1.05, 1.03),
}


@dataclass(frozen=True)
class Inputs:
    """One call: latent [B, C, h, w], sigma [B], context [B, T, text_dim]."""

    latent: Tensor
    sigma: Tensor
    context: Tensor


def random_model(arch: MossArch, device: torch.device, dtype: torch.dtype) -> MossDiT:
    """The model with weights of ordinary size, made on the device; norms, conditioning and head in fp32 as always."""
    model = MossDiT(arch, fused=True, device=device, dtype=dtype).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in model.named_parameters():
        assert weight.dtype == stored_dtype(name, dtype)
        if weight.dim() == 2:
            weight.normal_(0.0, 1.0 / math.sqrt(weight.shape[1]), generator=generator)
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def random_inputs(
    arch: MossArch, size: tuple[int, int], text: int, batch: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    generator = torch.Generator(device).manual_seed(1)
    latent = torch.randn(batch, arch.latent_channels, *size, generator=generator, device=device)
    context = torch.randn(batch, text, arch.text_dim, generator=generator, device=device)
    return Inputs(latent.to(dtype), torch.full((batch,), 0.9, device=device), context.to(dtype))


def timer(device: torch.device, call: Callable[[], object]) -> Once:
    """Seconds of one call: by events on a GPU, so that launching and waiting are not in it twice."""

    def on_gpu() -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    def on_cpu() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return on_gpu if device.type == "cuda" else on_cpu


def call(model: MossDiT, inputs: Inputs, dtype: torch.dtype, plan: StreamPlan, *, counted: bool, flag: bool) -> Once:
    """One model call as a node's run makes it: counters committed, the guard's flag read where asked."""
    names = site_names(model.arch.text_blocks, model.arch.depth)
    counters = Counters(names)

    def run() -> None:
        with torch.inference_mode():
            counters.begin()
            observer: Observer = counters if counted else Observer()
            out = model(inputs.latent, inputs.sigma, inputs.context, plan=plan, dtype=dtype, observer=observer)
            if flag:
                bool(~out.isfinite().all() | counters.bad_flag())
            counters.commit()

    return timer(inputs.latent.device, run)


def rows(model: MossDiT, inputs: Inputs, dtype: torch.dtype, rounds: int, where: str) -> list[Row]:
    """Every mode over "off"."""
    gpu = inputs.latent.device.type == "cuda"
    things = {"off": call(model, inputs, dtype, StreamPlan(), counted=False, flag=False)}
    for name, (plan, counted, flag, *_) in MODES.items():
        things[name] = call(model, inputs, dtype, plan, counted=counted, flag=flag)
    # "off" is the first and the last of every round: a machine that gets slower or faster in between evens out
    things[AGAIN] = call(model, inputs, dtype, StreamPlan(), counted=False, flag=False)
    seconds = interleave(things, rounds, warm_up=2 if gpu else 1)
    base = [(first + last) / 2 for first, last in zip(seconds["off"], seconds[AGAIN], strict=True)]
    out = [Row.of(AGAIN, where, ratio(seconds[AGAIN], seconds["off"]))]
    for name, (*_, on_cpu, on_gpu) in MODES.items():
        out.append(Row.of(name, where, ratio(seconds[name], base), on_gpu if gpu else on_cpu))
    return out
