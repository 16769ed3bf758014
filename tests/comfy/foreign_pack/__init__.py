"""A custom node pack for tests: gives ComfyUI a MOSS-Image class of its own, as native support would.

The class is written in the style that breaks naive patches (see `model.py`); it shares nothing with the pack itself.
"""

from __future__ import annotations

from typing import ClassVar

import comfy.latent_formats
import comfy.model_base
import comfy.model_detection
import comfy.supported_models
import comfy.supported_models_base
import torch

from .model import Built, ForeignMoss

NODE_CLASS_MAPPINGS: dict[str, type] = {}
chosen: Built | None = None


class ForeignMossModel(comfy.model_base.BaseModel):
    def __init__(self, model_config, device=None):
        flow = comfy.model_base.ModelType.FLOW
        super().__init__(model_config, flow, device=device, unet_model=ForeignMoss)

    def extra_conds(self, **kwargs):
        out = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            out["c_crossattn"] = comfy.conds.CONDRegular(kwargs["cross_attn"])
        if kwargs.get("attention_mask") is not None:
            out["attention_mask"] = comfy.conds.CONDRegular(kwargs["attention_mask"])
        if kwargs.get("moss_control_map") is not None:
            out["control_map"] = comfy.conds.CONDRegular(kwargs["moss_control_map"])
        if kwargs.get("moss_control_hint") is not None:
            out["control_hint"] = comfy.conds.CONDRegular(kwargs["moss_control_hint"])
        return out


class ForeignMossConfig(comfy.supported_models_base.BASE):
    unet_config: ClassVar = {"image_model": "foreign_moss"}
    sampling_settings: ClassVar = {"shift": 5.0, "multiplier": 1.0}
    unet_extra_config: ClassVar = {}
    latent_format = comfy.latent_formats.Flux2
    memory_usage_factor = 1.0
    supported_inference_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    vae_key_prefix: ClassVar = ["vae."]
    text_encoder_key_prefix: ClassVar = ["text_encoders."]

    def get_model(self, state_dict, prefix="", device=None):
        return ForeignMossModel(self, device=device)

    def inpaint_model(self):
        return False

    def process_unet_state_dict(self, sd):
        for i in range(0 if self.unet_config["built"].plain else self.unet_config["depth"]):
            parts = [sd.pop(f"layers.{i}.proj.{n}.weight", None) for n in "qkv"]
            if parts[0] is not None:
                sd[f"layers.{i}.proj.qkv.weight"] = torch.cat(parts)
        sd.pop("rope.bands", None)
        return sd


def register(built: Built | None = None) -> None:
    """Teach ComfyUI's detection about the class, built in this way (else as `Built.from_environment` says)."""
    global chosen
    chosen = built
    if ForeignMossConfig in comfy.supported_models.models:
        return
    comfy.supported_models.models.append(ForeignMossConfig)
    original = comfy.model_detection.detect_unet_config

    def detect(state_dict, key_prefix, metadata=None):
        if f"{key_prefix}shared_block_modulation.weight" in state_dict:
            return _read_config(state_dict, key_prefix)
        return original(state_dict, key_prefix, metadata=metadata)

    comfy.model_detection.detect_unet_config = detect
    register.undo = lambda: _undo(original)


def _undo(original) -> None:
    comfy.model_detection.detect_unet_config = original
    comfy.supported_models.models.remove(ForeignMossConfig)


def _read_config(sd, prefix):
    def shape(name):
        return sd[f"{prefix}{name}.weight"].shape

    def count(name):
        return len({k.split(".")[name.count(".") + 1] for k in sd if k.startswith(f"{name}.")})

    return {
        "image_model": "foreign_moss",
        "built": chosen or Built.from_environment(),
        "dim": shape("layers.0.norm1")[0],
        "head_dim": shape("layers.0.q_norm")[0],
        "ffn": shape("layers.0.proj.ffn_down")[1],
        "text_dim": shape("text_embedder.proj")[1],
        "text_ffn": shape("text_embedder.blocks.0.ffn_up")[0],
        "text_blocks": count(f"{prefix}text_embedder.blocks"),
        "channels": shape("video_embedder")[1],
        "depth": count(f"{prefix}layers"),
    }


def comfy_entry() -> None:
    """As a custom node pack in a real server."""
    register()


if __name__.rpartition(".")[2] != "foreign_moss_pack":
    comfy_entry()
