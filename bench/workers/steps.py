"""Worker: seconds per model call inside ComfyUI's own sampler, the fix off and on in turns.

job: {comfyui, cpu, measurements: [{file, dtype, tokens: [h, w], text, batch, rounds, variants: {name: options,
or null for off}}]}, options being fields of FixOptions. result: {seconds: [{variant: [...]}], import}.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import comfy_process


def main() -> None:
    job = comfy_process.job()
    started = comfy_process.enter(job["comfyui"], cpu=job.get("cpu", True))
    comfy_process.foreign_class()
    import logging

    logging.disable(logging.WARNING)
    comfy_process.answer({"seconds": [measure(one) for one in job["measurements"]], "import": started})


def measure(job: dict[str, Any]) -> dict[str, list[float]]:
    import comfy.sd
    import torch

    comfy_process.load_module("moss_bench", comfy_process.ROOT / "bench")
    from moss_bench.stats import interleave

    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[job["dtype"]]
    stock = comfy.sd.load_diffusion_model(job["file"], {"dtype": dtype})
    stock.set_model_compute_dtype(dtype)
    models = {name: variant(stock, name, options) for name, options in job["variants"].items()}
    calls = Calls(job, stock)
    return interleave({name: lambda m=model: calls.once(m) for name, model in models.items()}, job["rounds"])


def variant(stock: Any, name: str, options: dict[str, Any] | None) -> Any:
    """The MODEL under one set of options; a clone of the same weights."""
    from moss_fp16_pack.fold.scaling.factors import GivenFactors
    from moss_fp16_pack.nodes.apply import apply_fix
    from moss_fp16_pack.nodes.inputs import FixOptions

    if options is None:
        return stock.clone()
    factors = GivenFactors((options["c"],)) if "c" in options else None
    rest = {key: value for key, value in options.items() if key != "c"}
    return apply_fix(stock, FixOptions(factors=factors, **rest), node="bench", node_id=name)


class Calls:
    """Runs one-step samplings and times the model call in them, with everything a step does around it."""

    def __init__(self, job: dict[str, Any], stock: Any) -> None:
        import torch

        h, w = job["tokens"]
        self.device = stock.load_device
        generator = torch.Generator().manual_seed(0)
        self.latent = torch.zeros(job["batch"], 128, h, w)
        self.noise = torch.randn(self.latent.shape, generator=generator)
        width = stock.model.diffusion_model.text_embedder.proj.weight.shape[1]
        self.prompt = [[torch.randn(1, job["text"], width, generator=generator), {}]]
        self.sigmas = torch.tensor([0.9, 0.8])
        self.seconds = 0.0
        self.watch: Any = None  # a context around the model call, for casts.py

    def once(self, model: Any) -> float:
        import comfy.sample
        import comfy.samplers
        import torch

        sampler = comfy.samplers.KSAMPLER(self._step)
        with torch.inference_mode():
            comfy.sample.sample_custom(
                model, self.noise, 1.0, sampler, self.sigmas, self.prompt, self.prompt, self.latent,
                callback=lambda *_: None, disable_pbar=True, seed=0,
            )  # fmt: skip
        return self.seconds

    def _step(self, model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any, disable: Any) -> Any:
        self._wait()
        started = time.perf_counter()
        with self.watch() if self.watch else contextlib.nullcontext():
            denoised = model(x, sigmas[:1].expand(x.shape[0]), **extra_args)
        callback({"i": 0, "x": x, "denoised": denoised, "sigma": sigmas[0]})
        self._wait()
        self.seconds = time.perf_counter() - started
        return denoised

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
