"""MOSS FP16 Fix."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..fold.dtypes import DTYPES
from .apply import apply_fix
from .inputs import CATEGORY, accept_unproven_input, check_texts, compute_dtype_input, fix_inputs, read_options
from .model.stored_fold import stored_fold_of

TITLE = "MOSS FP16 Fix"


class MossFP16Fix(io.ComfyNode):
    """The fix on any MOSS-Image MODEL: of a stock loader, int8, GGUF, with LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MossFP16Fix",
            display_name=TITLE,
            category=CATEGORY,
            description="Keeps the residual stream of any MOSS-Image MODEL within fp16's range. It replaces the "
            "settings of a MOSS loader or Fix node before it.",
            search_aliases=["moss", "fp16", "overflow", "saturation", "black image", "nan", "inf"],
            inputs=[
                io.Model.Input("model", tooltip="A MOSS-Image MODEL of any loader."),
                compute_dtype_input(
                    "keep",
                    "keep: what the MODEL computes in. fp16 on a MODEL stored in bf16 converts every weight on every "
                    "call; Load MOSS-Image (FP16) stores fp16 instead.",
                ),
                *fix_inputs(["auto", "native", "managed"]),
                accept_unproven_input(),
            ],
            outputs=[io.Model.Output(tooltip="The same MODEL under the fix; the one given stays as it was.")],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # two nodes with the same inputs must not share a result: the report is per node
        )

    @classmethod
    def validate_inputs(
        cls, c: Any = None, s_attn: Any = None, s_ffn: Any = None, param_dtypes: Any = None
    ) -> bool | str:
        """What was typed is checked when the workflow is queued."""
        return check_texts(c, s_attn, s_ffn, param_dtypes)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        model, options = inputs["model"], read_options(inputs)
        fixed = apply_fix(
            model,
            options,
            node=TITLE,
            node_id=str(cls.hidden.unique_id),
            compute_dtype=DTYPES.get(inputs.get("compute_dtype", "keep")),
            stored=stored_fold_of(model),
        )
        return io.NodeOutput(fixed)
