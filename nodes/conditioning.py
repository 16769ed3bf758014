"""Save and Load MOSS Conditioning: text states as safetensors, so that a rerun needs no text encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io

from ..fold.checkpoint.header import clip
from ..fold.errors import MossError
from ..fold.measure.conditioning import read_conditioning, save_conditioning
from .inputs import CATEGORY, refusal
from .model.comfy_types import Conditioning

FOLDER = "moss_conditioning"
EXTENSION = ".safetensors"


class MossFP16SaveConditioning(io.ComfyNode):
    """CONDITIONING -> output/moss_conditioning/<name>.safetensors with context and attention_mask."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MossFP16SaveConditioning",
            display_name="Save MOSS Conditioning",
            category=CATEGORY,
            description="Writes a text conditioning to the output folder, for reruns and headless jobs without the "
            "text encoder. Copy it to the input folder, or load it from the output list.",
            search_aliases=["moss", "save conditioning", "prompt cache"],
            is_output_node=True,
            inputs=[
                io.Conditioning.Input("conditioning", tooltip="The output of a text encode node."),
                io.String.Input(
                    "filename_prefix", default="moss_conditioning/prompt", tooltip="Place below the output folder."
                ),
            ],
            outputs=[io.Conditioning.Output(tooltip="The same conditioning, unchanged.")],
        )

    @classmethod
    def execute(cls, conditioning: Conditioning, filename_prefix: str) -> io.NodeOutput:
        if len(conditioning) != 1:
            raise MossError(
                f"Save MOSS Conditioning stores one prompt, but this conditioning combines {len(conditioning)}: save "
                "each before they are combined."
            )
        context, extra = conditioning[0]
        dropped = sorted(k for k, v in extra.items() if v is not None and k not in ("attention_mask", "pooled_output"))
        if dropped:
            raise MossError(
                f"Save MOSS Conditioning cannot keep {', '.join(dropped)}: save the plain text conditioning."
            )
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        file = f"{name}_{counter:05}_{EXTENSION}"
        save_conditioning(Path(folder) / file, context, extra.get("attention_mask"))
        shown = {"filename": file, "subfolder": subfolder, "type": "output"}
        return io.NodeOutput(conditioning, ui={"moss_fp16_files": [shown]})


class MossFP16LoadConditioning(io.ComfyNode):
    """A file of the input or output folder -> CONDITIONING."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MossFP16LoadConditioning",
            display_name="Load MOSS Conditioning",
            category=CATEGORY,
            description="Reads a text conditioning that Save MOSS Conditioning wrote: safetensors with context "
            "[1, T, width] and, optionally, attention_mask [1, T].",
            search_aliases=["moss", "load conditioning", "headless"],
            inputs=[
                io.Combo.Input(
                    "file",
                    options=conditioning_files(),
                    tooltip="A .safetensors file of the input folder, or [output] moss_conditioning.",
                )
            ],
            outputs=[io.Conditioning.Output(tooltip="The stored prompt, for a sampler's positive or negative.")],
        )

    @classmethod
    def validate_inputs(cls, file: Any = None) -> bool | str:
        """Checked against the disk, not the list the page had, so that a file made a moment ago counts.

        None comes over a link, later.
        """
        return refusal(lambda: None if file is None else conditioning_path(file))

    @classmethod
    def fingerprint_inputs(cls, file: str) -> Any:
        try:
            state = conditioning_path(file).stat()
        except (MossError, OSError):
            return None
        return (state.st_mtime_ns, state.st_size)

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        context, mask = read_conditioning(conditioning_path(file))
        # as text encoders give it: 1 and 0
        return io.NodeOutput([[context, {} if mask is None else {"attention_mask": mask.long()}]])


def conditioning_files() -> list[str]:
    """Names below the input folder, and below output/moss_conditioning marked as such."""
    places = ((Path(folder_paths.get_input_directory()), ""), (_saved_folder(), OUTPUT_MARK))
    return [
        mark + file.relative_to(root).as_posix()
        for root, mark in places
        if root.is_dir()
        for file in sorted(root.rglob("*"))
        if file.suffix.lower() == EXTENSION and file.is_file() and file.resolve().is_relative_to(root.resolve())
    ]


OUTPUT_MARK = "[output] "


def _saved_folder() -> Path:
    return Path(folder_paths.get_output_directory()) / FOLDER


def conditioning_path(name: str) -> Path:
    """The file of a list entry. Raises MossError for anything outside the two folders, links out of them included."""
    if not isinstance(name, str) or not name.removeprefix(OUTPUT_MARK).strip():
        raise MossError(
            f"No conditioning file is chosen: put one into ComfyUI's input folder, or write one with Save MOSS "
            f"Conditioning ({OUTPUT_MARK}...)."
        )
    inside, shown = name.removeprefix(OUTPUT_MARK), clip(name)
    saved = name.startswith(OUTPUT_MARK)
    folder = f"output/{FOLDER}" if saved else "input"
    root = (_saved_folder() if saved else Path(folder_paths.get_input_directory())).resolve()
    try:
        named = bool(inside) and not Path(inside).is_absolute() and ".." not in Path(inside).parts
        file = (root / inside).resolve()
        leads_out = named and not file.is_relative_to(root)
        there = named and file.suffix.lower() == EXTENSION and file.is_file()
    except (OSError, ValueError):  # too long, a NUL, half a character
        raise MossError(f"{shown!r} is no file name.") from None
    if leads_out:
        raise MossError(
            f"{shown!r} is a link that leads out of ComfyUI's {folder} folder, and a workflow may only name what is in "
            "it: copy the file there."
        )
    if not named:
        raise MossError(f"{shown!r} is not inside ComfyUI's {folder} folder: conditioning is only read from there.")
    if not there:
        raise MossError(f"There is no conditioning file {shown!r} in ComfyUI's {folder} folder.")
    return file
