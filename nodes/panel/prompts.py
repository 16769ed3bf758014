"""Which nodes of a queued workflow belong together: the Report nodes of a MOSS Loader or Fix node, and the reverse.

A prompt is ComfyUI's API format: {node id: {class_type, inputs}}, a link being [node id, output's place].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import nodes as comfy_nodes

SOURCES = ("MossFP16Loader", "MossFP16Fix")
REPORT = "MossFP16Report"

Prompt = Mapping[str, Any]


def report_nodes_of(prompt: Prompt, node_id: str) -> list[str]:
    """The ids of the Report nodes whose MODEL comes from this Loader or Fix node."""
    reports = [name for name, node in prompt.items() if _kind(node) == REPORT]
    return [name for name in reports if source_of_report(prompt, name) == node_id]


def source_of_report(prompt: Prompt, node_id: str) -> str | None:
    """The Loader or Fix node whose MODEL a Report node was given, through any nodes between; None where there is none.

    The nearest counts: a Fix node replaces the settings of what is before it.
    """
    seen, level = {node_id}, [node_id]
    while level:
        before = [name for found in level for name in _models_into(prompt, found) if name not in seen]
        for name in before:
            if _kind(prompt[name]) in SOURCES:
                return name
        seen.update(before)
        level = before
    return None


def _models_into(prompt: Prompt, node_id: str) -> Iterator[str]:
    """The nodes that give this one a MODEL, or something whose type is not known."""
    node = prompt.get(node_id)
    inputs = node.get("inputs") if isinstance(node, Mapping) else None
    for value in inputs.values() if isinstance(inputs, Mapping) else ():
        match value:
            case [str(name), int(place)] if name in prompt and _gives_model(prompt[name], place):
                yield name


def _gives_model(node: object, place: int) -> bool:
    known = comfy_nodes.NODE_CLASS_MAPPINGS.get(_kind(node))
    types = getattr(known, "RETURN_TYPES", ())
    return not 0 <= place < len(types) or str(types[place]) in ("MODEL", "*")


def _kind(node: object) -> str:
    return str(node.get("class_type")) if isinstance(node, Mapping) else ""
