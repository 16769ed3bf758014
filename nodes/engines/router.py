"""Sends each call of the diffusion model to the class's own forward, or to ours where the rung is managed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...fold.errors import MossError
from ..model.comfy_types import BaseModel
from ..model.foreign import unwrapped
from ..state import FixState
from .dtypes import OwnDtype, at_boundary
from .managed import managed_forward, no_tokens, sigma_of
from .native import PATCHES
from .patches import needs_unet


class Router:
    """The object patch on the diffusion model's forward. inner: the forward that was there. base: the BaseModel."""

    def __init__(self, inner: Callable[..., Tensor], fix: FixState, base: BaseModel) -> None:
        self.inner, self.fix, self.base = inner, fix, base

    def on(self, inner: Callable[..., Tensor], base: BaseModel) -> Router:
        """The same on another module."""
        return Router(inner, self.fix, base)

    def __call__(
        self, x: Tensor, timesteps: Tensor, context: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        fix, call = self.fix, self.fix.call
        call.trace.reached = True
        x, timesteps, context = at_boundary(fix.options.inputs, x, timesteps, context)
        options = kwargs.get("transformer_options") or (args[1] if len(args) > 1 else None) or {}
        if problem := no_tokens(context) or needs_unet(options):
            raise MossError(problem)
        if not call.rung.managed:
            return self.inner(x, timesteps, context, *args, **kwargs)
        tree = unwrapped(self.base.diffusion_model)
        sigma = timesteps if fix.path == "builtin" else sigma_of(timesteps, self.base)
        return managed_forward(tree, fix.arch, call.rung.plan, call.observer, x, sigma, context, *args, **kwargs)


#: The callables of this pack that stand in a MODEL's object patches; each has what it wraps as `inner`.
OURS = (*PATCHES, Router, OwnDtype)
