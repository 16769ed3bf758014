"""Applies the user's dtypes to a MODEL: to the inputs of each call, and to single parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...fold.dtypes import (
    NOTHING_APPLIED,
    AppliedDtypes,
    DtypeRule,
    InputPolicy,
    apply_rules,
    in_own_dtype,
    stored_dtype,
)
from ...fold.names import ModuleNames
from ...fold.report.messages import Message, message, named
from ..model.comfy_types import ModelPatcher
from ..model.foreign import patched_object
from ..model.moss import ROOT
from ..state import DtypeUse, FixState
from .casting import FLAG


def at_boundary(
    policy: InputPolicy, x: Tensor, timesteps: Tensor, context: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Latents [B, C, h, w], timestep [B] and cond [B, T, D] rounded as the policy says.

    Latents and cond are then cast back to the dtype they came in, the compute dtype: the layers take no other.
    """
    if policy.plain or context is None:
        return x, timesteps, context
    latents, timestep, cond = policy.apply(x, timesteps, context, x.dtype)
    return latents.to(x.dtype), timestep, cond.to(context.dtype)


class OwnDtype:
    """A linear's forward in a dtype of its own. `use` shows whether the model's class calls it at all.

    fix: whose model call may leave it out (a proof does, which is computed in fp32 throughout).
    """

    def __init__(self, inner: Callable[..., Tensor], dtype: torch.dtype, fix: FixState, use: DtypeUse) -> None:
        self.inner, self.dtype, self.fix, self.use = inner, dtype, fix, use
        self.run = in_own_dtype(inner, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        self.use.called = True
        out: Tensor = self.run(x) if self.fix.call.own_dtypes else self.inner(x)
        return out

    def on(self, inner: Callable[..., Tensor]) -> OwnDtype:
        """The same around another module's forward."""
        return OwnDtype(inner, self.dtype, self.fix, self.use)


def rules_on(
    tree: nn.Module, names: ModuleNames, rules: tuple[DtypeRule, ...], dtype: torch.dtype, *, own: bool
) -> AppliedDtypes:
    """The rules applied to the parameters of a module. own: our forward runs it, so norms and conditioning are fp32."""
    if not rules:
        return NOTHING_APPLIED
    parameters = [name for name, _ in tree.named_parameters()]
    return apply_rules(rules, parameters, lambda name: stored_dtype(name, dtype, names) if own else dtype, names)


def patch_parameters(model: ModelPatcher, tree: nn.Module, applied: AppliedDtypes, fix: FixState) -> None:
    """Object patches so that the linears named compute in their own dtype; their use is in `fix.own_dtypes`."""
    for path, dtype in applied.modules(fix.arch.names).items():
        name, use = f"{ROOT}.{path}.forward", fix.own_dtypes.setdefault(path, DtypeUse())
        model.add_object_patch(name, OwnDtype(patched_object(model, name), dtype, fix, use))
        if getattr(tree.get_submodule(path), FLAG, True) is False:
            model.add_object_patch(f"{ROOT}.{path}.{FLAG}", True)


def unused_dtypes(uses: dict[str, DtypeUse]) -> Message | None:
    """After a run: a message naming the linears that the class never called, so that their dtype had no effect."""
    idle = [path for path, use in uses.items() if not use.called]
    if not idle:
        return None
    return message("param_dtypes_unused", parameters=named(idle))


def store_parameters(tree: nn.Module, applied: AppliedDtypes) -> None:
    """Before the weights are loaded: make room for the parameters named in their own dtype."""
    for name, dtype in applied.parameters.items():
        parameter = tree.get_parameter(name)
        parameter.data = torch.empty_like(parameter.data, dtype=dtype)
