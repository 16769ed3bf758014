"""MOSS Saturation Report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from ..fold.errors import MossError
from .inputs import CATEGORY
from .model.comfy_types import ModelPatcher
from .panel import publish
from .state import fix_of
from .ui import image_of

TITLE = "MOSS Saturation Report"


class MossFP16Report(io.ComfyNode):
    """The report of the run that just ended: as JSON, as a picture, in /history, and on the panel."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        anything = io.MatchType.Template("passthrough")
        return io.Schema(
            node_id="MossFP16Report",
            display_name=TITLE,
            category=CATEGORY,
            description="Shows whether the image is affected by fp16's range, where the run came closest to it, what "
            "was done, and what to do. The report is also in /history for API runs.",
            search_aliases=[
                "moss",
                "fp16",
                "saturation",
                "report",
                "headroom",
                "black image",
                "overflow",
                "nan",
                "inf",
            ],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The MODEL that was sampled (from a MOSS loader or Fix node)."),
                io.MatchType.Input(
                    "passthrough",
                    template=anything,
                    tooltip="Anything after the sampler, such as its LATENT: it makes this node wait.",
                ),
            ],
            outputs=[
                io.MatchType.Output(template=anything, display_name="passthrough", tooltip="The same, unchanged."),
                io.String.Output(display_name="report", tooltip="moss_fp16.report/1 as JSON."),
                io.Image.Output(display_name="chart", tooltip="The peaks per block as a picture."),
            ],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # two nodes with the same inputs must not share a result: the report is per node
        )

    @classmethod
    def execute(cls, model: ModelPatcher, passthrough: Any) -> io.NodeOutput:
        from ..fold.report.chart import render_chart  # in here: what draws and measures is no part of ComfyUI's start

        fix = fix_of(model)
        if fix is None:
            raise MossError(
                f"{TITLE} needs a MODEL that went through Load MOSS-Image (FP16) or MOSS FP16 Fix; this one did not."
            )
        if fix.last_report is None:
            raise MossError(
                f"{TITLE} has nothing to report yet: its MODEL was not sampled. Connect passthrough to something that "
                "comes after the sampler that uses this MODEL."
            )
        prompt_id, workflow_id = publish.where_now()
        # where another prompt sampled, the sampler's result came from the cache too
        report = replace(fix.last_report, cached=fix.last_prompt_id != prompt_id)
        publish.publish(str(cls.hidden.unique_id), prompt_id, workflow_id, report)
        found = report.to_json()
        text = json.dumps(found, indent=1, allow_nan=False)
        return io.NodeOutput(passthrough, text, image_of(render_chart(found)), ui={"moss_fp16_report": [found]})
