"""The built-in MOSS-Image class, for a ComfyUI that has none of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.ops
import comfy.supported_models_base
import torch

from ...fold.arch import MossArch
from ...fold.model.forward import MossDiT
from ...fold.scaling.plan import StreamPlan
from ..engines.managed import managed_forward, sigma_of
from ..engines.memory import memory_required
from ..model.moss import small_modules
from .qkv_names import NamedWeights, add_joined, other_names


class BuiltinDiT(MossDiT):
    """MossDiT under ComfyUI's call: (x, timesteps, context, control, transformer_options, attention_mask)."""

    def __init__(
        self, *, arch: MossArch, fused: bool, dtype: Any, device: Any = None, operations: Any = None, **_: Any
    ):
        # Norms, conditioning and head keep fp32 weights and take fp32 inputs: they go through the casting layers.
        layers = SimpleNamespace(Linear=operations.Linear, RMSNorm=comfy.ops.manual_cast.RMSNorm)
        super().__init__(arch, fused=fused, device=device, dtype=dtype, operations=layers)
        # what guidance and sampling nodes read of a diffusion model
        self.in_channels = self.out_channels = arch.latent_channels
        self.patch_size, self.hidden_size, self.num_heads = 1, arch.dim, arch.heads
        for path in small_modules(arch):
            module: Any = self.get_submodule(path)
            if hasattr(module, "comfy_cast_weights"):
                module.comfy_cast_weights = True
        if not fused:
            add_joined(self, arch)

    def forward(self, x: Any, timesteps: Any, context: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """As ComfyUI calls it; without a fix node the plan is "none"."""
        return managed_forward(self, self.arch, StreamPlan(), None, x, timesteps, context, *args, **kwargs)


class MossModelConfig(comfy.supported_models_base.BASE):
    """What ComfyUI needs to know of the model to build, place and sample it."""

    unet_config: ClassVar[dict[str, Any]] = {}
    unet_extra_config: ClassVar[dict[str, Any]] = {}
    sampling_settings: ClassVar[dict[str, float]] = {"shift": 5.0, "multiplier": 1.0}
    latent_format = comfy.latent_formats.Flux2
    supported_inference_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    vae_key_prefix: ClassVar[list[str]] = ["vae."]
    text_encoder_key_prefix: ClassVar[list[str]] = ["text_encoders."]

    def __init__(self, unet_config: dict[str, Any]):
        arch: MossArch = unet_config["arch"]
        # under the names that nodes read in ComfyUI's own configs
        known = {"image_model": "moss_image", "in_channels": arch.latent_channels, "model_channels": arch.dim}
        super().__init__(known | unet_config)

    def get_model(self, state_dict: Any, prefix: str = "", device: Any = None) -> comfy.model_base.BaseModel:
        return MossImage(self, device=device)

    def inpaint_model(self) -> bool:
        return False


class MossImage(comfy.model_base.BaseModel):
    """MOSS-Image as a ComfyUI model: flow matching, shift 5, called with sigma itself."""

    def __init__(self, model_config: MossModelConfig, device: Any = None):
        super().__init__(model_config, comfy.model_base.ModelType.FLOW, device=device, unet_model=BuiltinDiT)
        tree = self.diffusion_model
        self.other_names = other_names(tree.arch, tree.fused)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights by name, known by the names of the other layout of q, k, v as well (see `layouts`)."""
        found = super().state_dict(*args, **kwargs)
        return found if args or kwargs else NamedWeights(found, self.other_names)

    def process_timestep(self, timestep: torch.Tensor, **_: Any) -> torch.Tensor:
        """Sigma, whatever multiplier a ModelSampling node has put in."""
        return sigma_of(timestep, self)

    def memory_required(self, input_shape: Any, cond_shapes: Any = None) -> float:
        """Bytes of activations; without a fix node the plan is "none"."""
        return memory_required(self, self.diffusion_model.arch, StreamPlan(), input_shape, cond_shapes)

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, Any]:
        """The text's length counts for `memory_required`."""
        context = kwargs.get("cross_attn")
        return {} if context is None else {"c_crossattn": list(context.shape)}

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Context and its mask; as CONDRegular, prompts of unequal length run apart, not padded by repetition."""
        out: dict[str, Any] = super().extra_conds(**kwargs)
        context, mask = kwargs.get("cross_attn"), kwargs.get("attention_mask")
        if context is not None:
            out["c_crossattn"] = comfy.conds.CONDRegular(context)
        if mask is not None and not bool((mask != 0).all()):
            out["attention_mask"] = comfy.conds.CONDRegular(mask)
        for key in ("reference_latents", "control_map"):
            if kwargs.get(key) is not None:
                # handed on so that the forward can refuse it by name instead of ignoring it
                out[key] = comfy.conds.CONDConstant(True)
        return out
