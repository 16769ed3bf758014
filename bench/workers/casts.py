"""Worker: a MODEL of the stock loader in bf16 that computes in fp16, against the pack's loader, which stores fp16.

job: as steps.py without variants. result: {seconds: {stock, loader}, converted: the same, in MB of weights that one
call converts}.
"""

from __future__ import annotations

from typing import Any

import comfy_process
from steps import Calls


def main() -> None:
    job = comfy_process.job()
    comfy_process.enter(job["comfyui"], cpu=job.get("cpu", True))
    comfy_process.foreign_class()
    import logging

    logging.disable(logging.WARNING)
    comfy_process.load_module("moss_bench", comfy_process.ROOT / "bench")
    from moss_bench.stats import interleave

    models = both(job["file"])
    calls = Calls(job, models["stock"])
    converted = {name: converted_mb(calls, model) for name, model in models.items()}
    seconds = interleave({name: lambda m=model: calls.once(m) for name, model in models.items()}, job["rounds"])
    comfy_process.answer({"seconds": seconds, "converted": converted})


def both(file: str) -> dict[str, Any]:
    import comfy.sd
    import torch
    from moss_fp16_pack.nodes.apply import apply_fix
    from moss_fp16_pack.nodes.inputs import FixOptions
    from moss_fp16_pack.nodes.loading.load import load_moss

    stock = comfy.sd.load_diffusion_model(file, {"dtype": torch.bfloat16})
    options = FixOptions(fix="online")
    return {
        "stock": apply_fix(stock, options, node="bench", node_id="1", compute_dtype=torch.float16),
        "loader": apply_fix(load_moss(file, "fp16", True, "auto"), options, node="bench", node_id="2"),
    }


def converted_mb(calls: Calls, model: Any) -> float:
    """The weights that a call brings to another dtype, told by what is copied: MB of them as stored."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls.once(model)  # the self-check's second call is over after this
    weights = {p.untyped_storage().data_ptr() for p in model.model.diffusion_model.parameters()}
    found: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if name in ("copy_", "_to_copy", "to"):  # under inference mode `to` arrives whole
                source = args[1] if name == "copy_" else args[0]
                if out.dtype != source.dtype and source.untyped_storage().data_ptr() in weights:
                    found.append(source.nbytes)
            return out

    calls.watch = Watch
    try:
        calls.once(model)
    finally:
        calls.watch = None
    return sum(found) / 1e6


if __name__ == "__main__":
    main()
