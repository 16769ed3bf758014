"""`python tests/tools/refresh_workflows.py`: bring the example workflows up to the nodes' present inputs.

The API files in example_workflows/api are the source. Inputs that a node gained get their default there; the UI twins
keep their layout and get the same values. Run it after changing a node's inputs, with ComfyUI's requirements installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from comfy_server import ComfyServer
from repo import NO_COMFYUI, ROOT, find_comfyui

EXAMPLES = ROOT / "example_workflows"
#: UI workflow -> API twin. A UI workflow's file name is its title in the page's template browser.
TWINS = {
    "MOSS-Image fp16 - text to image": "moss_fp16_text_to_image",
    "MOSS-Image fp16 - without text encoder": "moss_fp16_headless",
}
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}

Json = dict[str, Any]
#: (name, type, options) in the order the page shows them
Schema = list[tuple[str, Any, Json]]


def schemas(server: ComfyServer) -> dict[str, Schema]:
    """Per node class, its inputs in order."""
    info = server.client.call("GET", "/object_info")
    return {
        kind: [
            (name, entry["input"][group][name][0], (entry["input"][group][name][1:] or [{}])[0])
            for group in ("required", "optional")
            for name in entry["input_order"].get(group, [])
        ]
        for kind, entry in info.items()
    }


def is_widget(kind: Any, options: Json) -> bool:
    """Whether an input is a value on the node, not a socket."""
    return (isinstance(kind, list) or kind in WIDGETS) and not options.get("forceInput")


def refresh_api(prompt: Json, known: dict[str, Schema]) -> None:
    """Give each node of this pack the inputs it lacks, drop those it no longer has, in the schema's order."""
    for node in prompt.values():
        if node["class_type"].startswith("MossFP16"):
            old = node["inputs"]
            node["inputs"] = {
                name: old.get(name, default(kind, options))
                for name, kind, options in known[node["class_type"]]
                if name in old or is_widget(kind, options)
            }


def default(kind: Any, options: Json) -> Any:
    """What the page would fill in."""
    choices = kind if isinstance(kind, list) else options.get("options")
    return options.get("default", choices[0] if choices else None)


def refresh_ui(ui: Json, prompt: Json, known: dict[str, Schema]) -> None:
    """Write the API twin's values into the widgets, and check that the sockets are still the schema's."""
    for node in ui["nodes"]:
        twin = prompt.get(str(node["id"]))
        if twin is None:
            continue  # a note, or a muted node that is the page's alone
        schema, values = known[node["type"]], []
        for name, kind, options in schema:
            if is_widget(kind, options):
                values.append(twin["inputs"].get(name, default(kind, options)))
                values += ["fixed"] if options.get("control_after_generate") else []
        node["widgets_values"] = values
        sockets = [name for name, kind, options in schema if not is_widget(kind, options)]
        if sockets != [socket["name"] for socket in node["inputs"]]:
            print(f"{node['type']}: its sockets are now {sockets}; mend the UI workflow's links in ComfyUI.")


def main() -> int:
    """Rewrite all example workflows; 0 when done."""
    comfyui = find_comfyui()
    if comfyui is None:
        print(f"There is {NO_COMFYUI}.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as base, ComfyServer(comfyui, Path(base)) as server:
        known = schemas(server)
    for name, twin in TWINS.items():
        path, api = EXAMPLES / f"{name}.json", EXAMPLES / "api" / f"{twin}.json"
        ui, prompt = json.loads(path.read_text("utf-8")), json.loads(api.read_text("utf-8"))
        refresh_api(prompt, known)
        refresh_ui(ui, prompt, known)
        path.write_text(json.dumps(ui, indent=1, ensure_ascii=False) + "\n", "utf-8")
        api.write_text(json.dumps(prompt, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
