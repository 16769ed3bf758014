"""ComfyUI's types as far as this pack uses them: a MODEL, the model in it, and what calls a wrapper's original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

import torch
from torch import Tensor, nn

#: A CONDITIONING: one pair for each prompt that is combined, the text states [B, T, width] and what goes with them.
Conditioning = Sequence[tuple[Tensor, dict[str, Any]]]


class ModelSampling(Protocol):
    """comfy.model_sampling's parametrization of one model."""

    def timestep(self, sigma: Tensor) -> Tensor: ...

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent: Tensor, max_denoise: bool = ..., /) -> Tensor: ...


class BaseModel(Protocol):
    """comfy.model_base.BaseModel."""

    diffusion_model: nn.Module
    manual_cast_dtype: torch.dtype | None
    model_sampling: ModelSampling
    memory_required: Callable[..., float]

    def get_dtype(self) -> torch.dtype: ...

    def get_dtype_inference(self) -> torch.dtype: ...


class ModelPatcher(Protocol):
    """comfy.model_patcher.ModelPatcher: what a MODEL socket carries."""

    model: BaseModel
    patches: dict[str, list[Any]]
    patches_uuid: UUID
    object_patches: dict[str, Any]
    object_patches_backup: dict[str, Any]
    load_device: torch.device
    offload_device: torch.device
    cached_patcher_init: Any

    def is_dynamic(self) -> bool: ...

    def clone(self) -> ModelPatcher: ...

    def get_model_object(self, name: str) -> Any: ...

    def add_object_patch(self, name: str, obj: Any) -> None: ...

    def set_model_compute_dtype(self, dtype: torch.dtype) -> None: ...

    def memory_required(self, input_shape: Sequence[int]) -> float: ...

    def get_attachment(self, key: str) -> Any: ...

    def set_attachments(self, key: str, attachment: Any) -> None: ...

    def remove_attachments(self, key: str) -> None: ...

    def set_injections(self, key: str, injections: list[Any]) -> None: ...

    def remove_injections(self, key: str) -> None: ...

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Callable[..., Any]) -> None: ...

    def remove_wrappers_with_key(self, wrapper_type: str, key: str) -> None: ...

    def add_callback_with_key(self, call_type: str, key: str, callback: Callable[..., Any]) -> None: ...

    def remove_callbacks_with_key(self, call_type: str, key: str) -> None: ...

    def get_additional_models_with_key(self, key: str) -> list[Any]: ...


class Guider(Protocol):
    """comfy.samplers.CFGGuider and its heirs: what samples. conds: by name, as ComfyUI has converted them."""

    model_patcher: ModelPatcher
    conds: dict[str, list[dict[str, Any]]]


Owner = TypeVar("Owner", covariant=True)


class Executor(Protocol, Generic[Owner]):
    """comfy.patcher_extension.WrapperExecutor: what a wrapper gets to call on. class_obj: whose method is wrapped."""

    @property
    def class_obj(self) -> Owner: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...
