"""The ComfyUI layer: nodes, MODEL patching, the report store and its routes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .compare import MossFP16Compare
from .conditioning import MossFP16LoadConditioning, MossFP16SaveConditioning
from .export import MossFP16Export
from .fix import MossFP16Fix
from .loader import MossFP16Loader
from .panel import routes
from .probe import MossFP16Probe
from .report import MossFP16Report

NODES: list[type[io.ComfyNode]] = [
    MossFP16Loader,
    MossFP16Fix,
    MossFP16Report,
    MossFP16SaveConditioning,
    MossFP16LoadConditioning,
    MossFP16Probe,
    MossFP16Compare,
    MossFP16Export,
]


class MossFP16Extension(ComfyExtension):
    """What ComfyUI asks the pack for."""

    async def on_load(self) -> None:
        routes.register()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
