"""MOSS Activation Probe."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import comfy.model_management as mm
import torch
from comfy_api.latest import io

from ..fold.errors import MossError
from ..fold.parsing import parse_numbers, parse_sizes
from ..fold.scaling.plan import plan_for
from .apply import remove_fix
from .engines.casting import casting
from .engines.managed import wrong_text
from .engines.patches import attention_of
from .inputs import CATEGORY, MossFactors, refusal
from .model.comfy_types import Conditioning, ModelPatcher
from .model.moss import arch_of, moss_tree
from .model.stored_fold import stored_fold_of
from .ui import cancellable, cancelled, progress_bar

if TYPE_CHECKING:  # else where it is used: what measures is no part of ComfyUI's start
    from ..fold.measure.probe import ProbeResult, ProbeSettings, Prompt

TITLE = "MOSS Activation Probe"


class MossFP16Probe(io.ComfyNode):
    """MODEL + CONDITIONING -> peaks in fp32 and the factors chosen from them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MossFP16Probe",
            display_name=TITLE,
            category=CATEGORY,
            description="Measures how large the model's activations become, in fp32 where nothing overflows, and "
            "chooses the fold's factors from them. Adapters on the MODEL are measured with it.",
            search_aliases=["moss", "fp16", "peaks", "calibrate", "factors"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="A MOSS-Image MODEL; a fix on it is left off for the measurement."),
                io.Conditioning.Input("conditioning", tooltip="The prompts to measure with; combine them for several."),
                io.String.Input(
                    "sizes", default="1024x1024", tooltip="Widths x heights in pixels, such as 1024x1024, 832x1216."
                ),
                io.String.Input("sigmas", default="1, 0.5, 0.02", tooltip="Noise levels above 0 and at most 1."),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**64 - 1, control_after_generate=False, tooltip="Seed of the noise."
                ),
                io.Boolean.Input(
                    "per_block",
                    default=False,
                    advanced=True,
                    optional=True,
                    tooltip="One c, s_attn and s_ffn per block (managed path only), instead of one for all.",
                ),
                io.Float.Input(
                    "target",
                    default=4096.0,
                    min=1.0,
                    max=65504.0,
                    step=1.0,
                    advanced=True,
                    optional=True,
                    tooltip="The peak that the factors are chosen for. 4096 leaves four bits below fp16's maximum.",
                ),
            ],
            outputs=[
                MossFactors.Output(display_name="factors", tooltip="For the Loader, Fix and Save nodes."),
                io.String.Output(display_name="report", tooltip="Peaks, factors and advice as JSON."),
            ],
        )

    @classmethod
    def validate_inputs(cls, sizes: Any = None, sigmas: Any = None) -> bool | str:
        """What was typed is checked when the workflow is queued; None comes over a link, later."""
        given = ("1024x1024" if sizes is None else sizes, "1" if sigmas is None else sigmas)
        return refusal(lambda: settings_of(*given))

    @classmethod
    def execute(
        cls,
        model: ModelPatcher,
        conditioning: Conditioning,
        sizes: str,
        sigmas: str,
        seed: int = 0,
        per_block: bool = False,
        target: float = 4096.0,
    ) -> io.NodeOutput:
        settings = settings_of(sizes, sigmas, seed, per_block, target)
        with cancellable():
            result = measure(model, prompts_of(conditioning), settings)
        found = result.to_json()
        text = json.dumps(found, indent=1, allow_nan=False)
        return io.NodeOutput(result.factors, text, ui={"moss_fp16_probe": [found], "text": found["advice"]})


def settings_of(sizes: str, sigmas: str, *others: Any) -> ProbeSettings:
    """The settings that were typed; others: seed, per_block, target. MossError for what cannot be read."""
    from ..fold.measure.probe import ProbeSettings

    return ProbeSettings(parse_sizes(sizes, "sizes"), parse_numbers(sigmas, "sigmas"), *others)


def measure(model: ModelPatcher, prompts: list[Prompt], settings: ProbeSettings) -> ProbeResult:
    """Probe a MODEL, adapters included, on the device that ComfyUI runs it on."""
    from ..fold.measure.probe import probe

    tree = moss_tree(model, TITLE)
    arch, clone = arch_of(tree), remove_fix(model.clone())
    for prompt in prompts:
        if problem := wrong_text(arch, prompt.context, prompt.mask):
            raise MossError(problem)
    # a fold still in the weights stays there, and its stream is what is measured
    plan = plan_for("none", half=False, stored=stored_fold_of(model))
    largest = max(settings.sizes, key=lambda size: size[0] * size[1])
    shape = [1, arch.latent_channels, largest[1] // 16, largest[0] // 16]
    # in fp32 the activations take twice the room that ComfyUI plans for
    mm.load_models_gpu([clone], memory_required=2 * clone.memory_required(shape))
    with casting(clone.model, tree, torch.float32):
        return probe(
            tree,
            arch,
            prompts,
            settings,
            device=clone.load_device,
            plan=plan,
            attention=attention_of(arch, {}),
            progress=progress_bar(),
            cancel=cancelled,
        )


def prompts_of(conditioning: Conditioning) -> list[Prompt]:
    """Every prompt of a CONDITIONING, by its place in it."""
    from ..fold.measure.probe import Prompt

    found = []
    for index, (context, extra) in enumerate(conditioning):
        mask = extra.get("attention_mask")
        for row in range(context.shape[0]):
            keep = None if mask is None else mask[row : row + 1] != 0
            found.append(Prompt(context[row : row + 1], keep, f"prompt {index + 1}"))
    return found
