"""Writes the English locale files from what the code says: node texts from a running ComfyUI, messages from fold/.

PYTHONPATH=. python tests/tools/english_locale.py http://127.0.0.1:8188
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

from repo import ROOT

ENGLISH = ROOT / "locales" / "en"


def node_defs(info: dict[str, Any]) -> dict[str, Any]:
    """The locale table of this pack's nodes, from /object_info."""
    return {name: node_def(node) for name, node in sorted(info.items()) if name.startswith("MossFP16")}


def node_def(node: dict[str, Any]) -> dict[str, Any]:
    inputs = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
    tooltips = node.get("output_tooltips") or [None] * len(node["output_name"])
    return {
        "display_name": node["display_name"],
        "description": node["description"],
        "inputs": {name: {"name": name, "tooltip": spec[1]["tooltip"]} for name, spec in inputs.items()},
        "outputs": {
            str(i): {"name": name, **({"tooltip": tip} if tip else {})}
            for i, (name, tip) in enumerate(zip(node["output_name"], tooltips, strict=True))
        },
    }


def main(url: str) -> None:
    from fold.report.messages import TEXTS  # in a process that imports ComfyUI, fold is the pack's alone

    with urllib.request.urlopen(f"{url.rstrip('/')}/object_info", timeout=60) as answer:
        info = json.load(answer)
    write("nodeDefs.json", node_defs(info))
    panel = json.loads((ENGLISH / "main.json").read_text("utf-8"))
    panel["mossFP16"]["message"] = {key: text for key, (_, text) in TEXTS.items()}
    write("main.json", panel)


def write(name: str, table: dict[str, Any]) -> None:
    """One of the locale's files."""
    (ENGLISH / name).write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
