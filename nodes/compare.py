"""MOSS Precision Compare."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import comfy.model_management as mm
import comfy.sample
import comfy.samplers
from comfy_api.latest import io
from torch import Tensor

from ..fold.dtypes import dtype_name
from ..fold.measure import NOISE_LEVEL
from .inputs import CATEGORY
from .model.comfy_types import Conditioning, ModelPatcher
from .model.moss import compute_dtype_of, moss_tree
from .state import fix_of
from .ui import cancellable, cancelled, image_of, progress_bar

if TYPE_CHECKING:  # else where it is used: what measures is no part of ComfyUI's start
    from ..fold.measure.recording import RecordedRun

TITLE = "MOSS Precision Compare"


class MossFP16Compare(io.ComfyNode):
    """Two MODELs on the same inputs over sigmas -> the differences of their outputs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MossFP16Compare",
            display_name=TITLE,
            category=CATEGORY,
            description="Runs two MODELs on the same latents and prompts, step by step, and says how far apart their "
            "outputs are: plain and guided, and as the log-probability of an SDE step.",
            search_aliases=["moss", "compare", "precision", "parity"],
            is_output_node=True,
            inputs=[
                io.Model.Input("reference", tooltip="The MODEL to measure against; its steps make the latents."),
                io.Model.Input("other", tooltip="The MODEL that is measured, on the reference's latents."),
                io.Conditioning.Input("positive", tooltip="The prompt."),
                io.Conditioning.Input("negative", tooltip="The negative prompt, used above guidance 1."),
                io.Latent.Input("latent_image", tooltip="Gives size and batch; an empty latent for text to image."),
                io.Int.Input("steps", default=8, min=1, max=1000, tooltip="Steps of the simple schedule."),
                io.Float.Input("cfg", default=3.0, min=0.0, max=100.0, step=0.1, tooltip="Guidance scale."),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**64 - 1, control_after_generate=False, tooltip="Seed of the noise."
                ),
                io.Float.Input(
                    "noise_level",
                    default=NOISE_LEVEL,
                    min=0.0,
                    max=10.0,
                    step=0.05,
                    advanced=True,
                    optional=True,
                    tooltip="Noise level of the SDE step for the log-probability figures (Flow-GRPO); 0 leaves it out.",
                ),
                io.Sigmas.Input("sigmas", optional=True, tooltip="Own noise levels; they replace steps."),
            ],
            outputs=[
                io.String.Output(display_name="table", tooltip="A line per step, and the overall figures."),
                io.String.Output(display_name="report", tooltip="moss_fp16.compare/1 as JSON."),
                io.Image.Output(display_name="chart", tooltip="Relative L2 per step."),
            ],
        )

    @classmethod
    def execute(
        cls,
        reference: ModelPatcher,
        other: ModelPatcher,
        positive: Conditioning,
        negative: Conditioning,
        latent_image: dict[str, Any],
        steps: int,
        cfg: float,
        seed: int,
        noise_level: float = NOISE_LEVEL,
        sigmas: Tensor | None = None,
    ) -> io.NodeOutput:
        from ..fold.measure.compare import compare_runs, comparison_table
        from ..fold.measure.compare_chart import render_comparison

        for model in (reference, other):
            moss_tree(model, TITLE)
        if sigmas is None:
            sigmas = comfy.samplers.calculate_sigmas(reference.get_model_object("model_sampling"), "simple", steps)
        prompts, latent = (positive, negative), latent_image["samples"]
        with cancellable():
            first = record(reference, prompts, latent, sigmas, cfg, seed)
            second = record(other, prompts, latent, sigmas, cfg, seed, along=first)
        found = compare_runs(first, second, noise_level=noise_level, seed=seed % 2**63).to_json()
        lines, text = comparison_table(found), json.dumps(found, indent=1, allow_nan=False)
        chart = image_of(render_comparison(found))
        return io.NodeOutput("\n".join(lines), text, chart, ui={"moss_fp16_compare": [found], "text": lines})


def record(
    model: ModelPatcher,
    prompts: tuple[Conditioning, Conditioning],
    latent: Tensor,
    sigmas: Tensor,
    cfg: float,
    seed: int,
    along: RecordedRun | None = None,
) -> RecordedRun:
    """A MODEL's run through ComfyUI's own machinery. along: the run whose latents every step is given."""
    recorder = Recorder(cfg, describe(model), along)
    latent = comfy.sample.fix_empty_latent_channels(model, latent)
    noise = comfy.sample.prepare_noise(latent, seed)
    comfy.sample.sample_custom(
        model, noise, cfg, recorder, sigmas, prompts[0], prompts[1], latent, disable_pbar=True, seed=seed
    )
    assert recorder.run is not None
    return recorder.run


def describe(model: ModelPatcher) -> dict[str, Any]:
    """How this MODEL runs, as JSON-able facts: name, model, compute_dtype, mode."""
    fix, dtype = fix_of(model), dtype_name(compute_dtype_of(model))
    mode = "no fix" if fix is None else fix.first_rung.label
    return {"name": f"{dtype}, {mode}", "model": type(model.model).__name__, "compute_dtype": dtype, "mode": mode}


class Recorder(comfy.samplers.Sampler):
    """A sampler that records what the model answers at every step: Euler steps, or along another run's latents."""

    def __init__(self, cfg: float, info: dict[str, Any], along: RecordedRun | None) -> None:
        self.cfg, self.info, self.along = cfg, info, along
        self.run: RecordedRun | None = None

    def sample(
        self,
        model_wrap: Any,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        callback: Any,
        noise: Tensor,
        latent_image: Tensor | None = None,
        denoise_mask: Tensor | None = None,
        disable_pbar: bool = False,
    ) -> Tensor:
        """Called by ComfyUI's guider with the model loaded and the conditionings ready."""
        from ..fold.measure.recording import record_run

        model, options = model_wrap.inner_model, extra_args["model_options"]
        conds = {"cond": model_wrap.conds["positive"], "uncond": model_wrap.conds["negative"]}
        full = self.max_denoise(model_wrap, sigmas)
        start: Tensor = model.model_sampling.noise_scaling(sigmas[0], noise, latent_image, full)

        def velocity(x: Tensor, sigma: Tensor, branch: str) -> Tensor:
            mm.throw_exception_if_processing_interrupted()
            x0: Tensor = comfy.samplers.calc_cond_batch(model, [conds[branch]], x, sigma, options)[0]
            return (x - x0) / sigma.view(-1, 1, 1, 1)

        bar, total = progress_bar(), len(sigmas) - 1

        def progress(done: int, total: int) -> None:
            bar(done, total)
            if callback is not None:
                callback(done - 1, None, None, total)

        latents = start if self.along is None else [step.x for step in self.along.steps]
        self.run = record_run(
            velocity,
            latents,
            [min(level, 1.0) for level in sigmas.tolist()],
            cfg=self.cfg,
            info=self.info,
            device=noise.device,
            progress=progress,
            cancel=cancelled,
        )
        assert len(self.run.steps) == total
        return start
