"""Save MOSS FP16-Fix Checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io

from ..fold.checkpoint.keys import LAYOUTS
from ..fold.scaling.factors import DEFAULT, IDENTITY
from .inputs import CATEGORY, FACTOR_HINT_UNIFORM, MossFactors, check_texts, read_factors
from .loading.files import model_names, model_path
from .ui import cancellable, cancelled, progress_bar


class MossFP16Export(io.ComfyNode):
    """A checkpoint -> a file whose weights carry the fold, with the record; or the fold taken out again."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MossFP16Export",
            display_name="Save MOSS FP16-Fix Checkpoint",
            category=CATEGORY,
            description="Writes an fp16-fix checkpoint that any runtime loads as an ordinary one: the fold is in the "
            "weights and recorded in the metadata. It also takes a recorded fold out again. The file is streamed: "
            "memory does not depend on its size.",
            search_aliases=["moss", "fp16", "export", "save checkpoint", "unfold"],
            is_output_node=True,
            inputs=[
                io.Combo.Input("model_name", options=model_names(), tooltip="The source file or HF folder."),
                io.Combo.Input(
                    "action", options=["fold", "unfold"], default="fold", tooltip="Put the fold in, or take it out."
                ),
                io.String.Input("c", default="1/16", tooltip=f"Stream factor c. {FACTOR_HINT_UNIFORM}"),
                io.String.Input(
                    "s_attn", default="1", advanced=True, optional=True, tooltip="Factor on the attention outputs (o)."
                ),
                io.String.Input(
                    "s_ffn", default="1", advanced=True, optional=True, tooltip="Factor on the FFN outputs (ffn_down)."
                ),
                io.Combo.Input(
                    "dtype",
                    options=["fp16", "bf16", "fp32", "keep"],
                    default="fp16",
                    tooltip="Dtype of the stored weights; rope.bands stays fp32, quantized weights stay as they are.",
                ),
                io.Combo.Input(
                    "layout",
                    options=list(LAYOUTS),
                    default="keep",
                    advanced=True,
                    optional=True,
                    tooltip="q, k, v of each block as three matrices, as one, or as in the source.",
                ),
                io.String.Input(
                    "filename_prefix",
                    default="diffusion_models/MOSS-Image-fp16fix",
                    tooltip="Place below the output folder.",
                ),
                MossFactors.Input("factors", optional=True, tooltip="Measured factors; they replace c, s_attn, s_ffn."),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="The file that was written.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, c: Any = None, s_attn: Any = None, s_ffn: Any = None) -> bool | str:
        """What was typed is checked when the workflow is queued."""
        return check_texts(c, s_attn, s_ffn)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        from ..fold.checkpoint.export import export_checkpoint  # in here: no part of ComfyUI's start

        unfold = inputs["action"] == "unfold"
        given = None if unfold else read_factors(inputs)
        factors = IDENTITY if unfold else given.with_c(DEFAULT.c) if given is not None else DEFAULT
        source = model_path(inputs["model_name"])
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            inputs["filename_prefix"], folder_paths.get_output_directory()
        )
        file = f"{name}_{counter:05}_.safetensors"
        with cancellable():
            result = export_checkpoint(
                source,
                Path(folder) / file,
                factors,
                dtype=inputs["dtype"],
                fused=LAYOUTS[inputs.get("layout", "keep")],
                unfold=unfold,
                progress=progress_bar(),
                cancel=cancelled,
            )
        shown = {"filename": file, "subfolder": subfolder, "type": "output"}
        text = "\n".join([f"{result.tensors} tensors, {result.nbytes / 1e9:.2f} GB: {file}", *result.notes])
        return io.NodeOutput(str(result.target), ui={"moss_fp16_files": [shown], "text": [text]})
