"""Load MOSS-Image (FP16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..fold.errors import MossError
from .apply import apply_fix
from .inputs import CATEGORY, accept_unproven_input, check_texts, compute_dtype_input, fix_inputs, read_options
from .loading.files import model_names, model_path
from .loading.load import load_moss
from .model.stored_fold import stored_fold_of

TITLE = "Load MOSS-Image (FP16)"


class MossFP16Loader(io.ComfyNode):
    """A checkpoint file or HF folder -> MODEL that runs in fp16 in range."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MossFP16Loader",
            display_name=TITLE,
            category=CATEGORY,
            description="Loads a MOSS-Image checkpoint and keeps its residual stream within fp16's range, with the "
            "saturation counts shown on the node.",
            search_aliases=["moss", "fp16", "load moss", "overflow", "black image", "nan", "inf"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=model_names(),
                    tooltip="A .safetensors file of diffusion_models or checkpoints, or an HF folder of diffusers.",
                ),
                compute_dtype_input(
                    "auto",
                    "auto: what ComfyUI was started with (--fp16-unet and its like), else fp16 where the device is "
                    "good at it, else bf16, else fp32. Weights are stored in it.",
                ),
                *fix_inputs(["auto", "native", "builtin"]),
                io.Combo.Input(
                    "unfold",
                    options=["auto", "keep"],
                    default="auto",
                    advanced=True,
                    optional=True,
                    tooltip="A file that carries a fold: auto takes it out at load and applies it online (every LoRA "
                    "fits); keep leaves it in the weights.",
                ),
                accept_unproven_input(),
            ],
            outputs=[io.Model.Output(tooltip="A MODEL like any other: for LoRA, guidance, sampling and saving nodes.")],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # two nodes with the same inputs must not share a result: the report is per node
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> Any:
        """A file that changed on disk is loaded anew."""
        try:
            path = Path(model_path(inputs["model_name"]))
            files = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
            return [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        except (MossError, OSError, KeyError):
            return None

    @classmethod
    def validate_inputs(
        cls, c: Any = None, s_attn: Any = None, s_ffn: Any = None, param_dtypes: Any = None
    ) -> bool | str:
        """What was typed is checked when the workflow is queued."""
        return check_texts(c, s_attn, s_ffn, param_dtypes)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        options = read_options(inputs)
        path = model_path(inputs["model_name"])
        unfold, rules = inputs.get("unfold", "auto") == "auto", inputs.get("param_dtypes", "")
        model = load_moss(path, inputs["compute_dtype"], unfold, options.engine, rules)
        fixed = apply_fix(
            model,
            options,
            node=TITLE,
            node_id=str(cls.hidden.unique_id),
            stored=stored_fold_of(model),
        )
        return io.NodeOutput(fixed)
