"""Load MOSS-Image (FP16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io

from ..fold.checkpoint.header import clip
from ..fold.errors import MossError
from .apply import apply_fix
from .inputs import CATEGORY, check_texts, compute_dtype_input, fix_inputs, read_options
from .loading.load import load_moss
from .model.stored_fold import stored_fold_of

TITLE = "Load MOSS-Image (FP16)"
HF_MARKS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json")


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
                    "auto", "auto: fp16 where the device is good at it, else bf16, else fp32. Weights are stored in it."
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


def model_names() -> list[str]:
    """What the list offers: diffusion_models plain, the others behind their folder's name."""
    names = [n for n in folder_paths.get_filename_list("diffusion_models") if n.endswith(".safetensors")]
    names += [f"checkpoints/{n}" for n in folder_paths.get_filename_list("checkpoints") if n.endswith(".safetensors")]
    return names + [f"diffusers/{n}" for n in _hf_folders()]


def _hf_folders() -> list[str]:
    """Folders below models/diffusers that hold a transformer."""
    if "diffusers" not in folder_paths.folder_names_and_paths:
        return []
    found: list[str] = []
    for root in map(Path, folder_paths.get_folder_paths("diffusers")):
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if any((place / mark).exists() for place in (folder, folder / "transformer") for mark in HF_MARKS):
                found.append(folder.name)
    return found


def model_path(name: str) -> str:
    """The path of a name from the list. Raises MossError for any other name (nothing outside the folders is opened)."""
    if name not in model_names():
        raise MossError(f"{clip(name)} is not among the models of this ComfyUI: press R to refresh the list.")
    folder, _, rest = name.partition("/")
    if folder == "diffusers" and rest in _hf_folders():
        return next(
            str(Path(root) / rest)
            for root in folder_paths.get_folder_paths("diffusers")
            if (Path(root) / rest).is_dir()
        )
    if folder == "checkpoints" and rest in folder_paths.get_filename_list("checkpoints"):
        return str(folder_paths.get_full_path_or_raise("checkpoints", rest))
    return str(folder_paths.get_full_path_or_raise("diffusion_models", name))
