"""ComfyUI's types as far as this pack uses them: a MODEL, the model in it, and what calls a wrapper's original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class BaseModel(Protocol):
    """comfy.model_base.BaseModel."""

    diffusion_model: Any
    manual_cast_dtype: torch.dtype | None
    model_sampling: Any

    def get_dtype(self) -> torch.dtype: ...

    def get_dtype_inference(self) -> torch.dtype: ...


class ModelPatcher(Protocol):
    """comfy.model_patcher.ModelPatcher: what a MODEL socket carries."""

    model: BaseModel
    patches: dict[str, list[Any]]
    patches_uuid: Any
    object_patches: dict[str, Any]
    object_patches_backup: dict[str, Any]
    load_device: torch.device
    cached_patcher_init: Any

    def clone(self) -> Any: ...

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


class Executor(Protocol):
    """comfy.patcher_extension.WrapperExecutor: what a wrapper gets to call on. class_obj: whose method is wrapped."""

    class_obj: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...
