"""Worker: the pack's loader and ComfyUI's own on the same file.

job: {comfyui, file, dtype, rounds}: seconds of both in turns. With `only` ("stock" or "ours") in place of rounds: one
load, and what it added to the process's peak memory, in MB.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import comfy_process


def main() -> None:
    job = comfy_process.job()
    started = comfy_process.enter(job["comfyui"])
    comfy_process.foreign_class()
    import logging

    logging.disable(logging.WARNING)
    comfy_process.load_module("moss_bench", comfy_process.ROOT / "bench")
    things = {"stock": lambda: stock(job), "ours": lambda: ours(job, "auto"), "builtin": lambda: ours(job, "builtin")}
    if only := job.get("only"):
        from moss_bench.memory import peak_mb

        before = peak_mb()
        kept = things[only]()
        comfy_process.answer({"added": peak_mb() - before, "before": before, "kept": type(kept).__name__})
        return
    from moss_bench.stats import interleave

    seconds = interleave({name: lambda load=load: timed(load) for name, load in things.items()}, job["rounds"])
    comfy_process.answer({"seconds": seconds, "import": started})


def stock(job: dict[str, Any]) -> Any:
    """ComfyUI's Load Diffusion Model."""
    import comfy.sd
    import torch

    return comfy.sd.load_diffusion_model(job["file"], {"dtype": dtypes(torch)[job["dtype"]]})


def ours(job: dict[str, Any], engine: str) -> Any:
    """Load MOSS-Image (FP16): the file and the fix."""
    from moss_fp16_pack.nodes.apply import apply_fix
    from moss_fp16_pack.nodes.inputs import FixOptions
    from moss_fp16_pack.nodes.loading.load import load_moss

    model = load_moss(job["file"], job["dtype"], True, engine)
    return apply_fix(model, FixOptions(), node="bench", node_id="1")


def dtypes(torch: Any) -> dict[str, Any]:
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def timed(load: Callable[[], Any]) -> float:
    gc.collect()
    started = time.perf_counter()
    model = load()
    seconds = time.perf_counter() - started
    del model
    return seconds


if __name__ == "__main__":
    main()
