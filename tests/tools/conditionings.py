"""Saved conditionings for the page's tests: what the example workflow expects in ComfyUI's input folder."""

from __future__ import annotations

from pathlib import Path

from repo import DATA


def save_conditionings(folder: Path) -> None:
    """The golden contexts as files for MossFP16LoadConditioning, under the example workflow's names."""
    from safetensors.torch import load_file, save_file

    golden = load_file(DATA / "hot_io.safetensors")
    for name in ("moss_positive", "moss_negative"):
        save_file({"context": golden["case0.context"].contiguous()}, folder / f"{name}.safetensors")
