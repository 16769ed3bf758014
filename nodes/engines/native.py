"""The native path: the uniform fold as object patches on writers and norm eps, with nothing added inside the blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ...fold.arch import MossArch
from ...fold.errors import MossError
from ...fold.model.modules import Modules
from ...fold.names import GATE_ATTN, GATE_FFN, MODULATION
from ...fold.scaling.plan import StreamPlan
from ..model.comfy_types import ModelPatcher
from ..model.foreign import below_replaced, patched_object
from ..model.moss import ROOT, stream_norms, stream_writers
from ..state import CallState, FixState


class ModuleWrapper:
    """Wraps a module's forward: `after` changes or counts what it returned.

    Does nothing while the managed forward runs, and while a wrapper of the same module outside another pack's patch
    (`outer`) is at work (see `wrapped_outside`).
    """

    def __init__(self, inner: Callable[..., Any], fix: FixState, path: str, outer: bool = False) -> None:
        self.inner, self.fix, self.path, self.outer = inner, fix, path, outer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(self.inner(*args, **kwargs), self.fix.call)

    def hook(self, module: nn.Module, args: Any, out: Any) -> Any:
        """The same as a forward hook, for a module on which other packs' hooks come after its forward."""
        return self._wrapped(out, self.fix.call)

    def _wrapped(self, out: Any, call: CallState) -> Any:
        if call.rung.managed or (self.path in call.outside and not self.outer):
            return out
        return self.after(out, call)

    def after(self, out: Any, call: CallState) -> Any:
        """The result in place of `out`, which is what the module returned."""
        raise NotImplementedError

    def on(self, inner: Callable[..., Any]) -> ModuleWrapper:
        """The same around another module's forward."""
        return type(self)(inner, self.fix, self.path, self.outer)


def inside_wrappers(forward: object) -> object:
    """What the wrappers of this pack wrap; any other forward as it is."""
    while isinstance(forward, ModuleWrapper):
        forward = forward.inner
    return forward


class ScaledWriter(ModuleWrapper):
    """A writer's output times c."""

    def after(self, out: Tensor, call: CallState) -> Tensor:
        entry = call.rung.plan.entry
        return out if entry == 1.0 else out * entry


class ScaledGates(ModuleWrapper):
    """The shared modulation's two gates times c / s."""

    def after(self, out: Tensor, call: CallState) -> Tensor:
        f = call.rung.plan.factors
        if f.identity:
            return out
        y = out.clone()
        rows = y.view(*y.shape[:-1], len(MODULATION), -1)
        rows[..., GATE_ATTN, :] *= f.c[0] / f.s_attn[0]
        rows[..., GATE_FFN, :] *= f.c[0] / f.s_ffn[0]
        return y


class CountedBlock(ModuleWrapper):
    """A block's result, the stream, is counted."""

    def after(self, out: Any, call: CallState) -> Any:
        if call.observer is not None:
            stream = out[0] if isinstance(out, (tuple, list)) else out  # torch 2.4 cannot compile a union
            if isinstance(stream, Tensor):
                call.observer.stream(self.fix.sites[self.path], stream)
        return out


#: Modules that some MOSS-Image classes have beside the checkpoint's own and that write onto a stream: the projections
#: of control maps. Where a class has one it is scaled like the embedders; the self-check tells if one is missing here.
EXTRA_WRITERS = ("control_embedder", "control_proj", "control_projection", "control_map_embedder", "map_embedder")

PATCHES = (ScaledWriter, ScaledGates, CountedBlock)


def wrapper_kinds(tree: nn.Module, fix: FixState) -> dict[str, type[ModuleWrapper]]:
    """The wrapper class for every module that the native path wraps, by path: writers, also extra ones of this class,
    and gates, which the fold scales; and blocks, where they are counted."""
    extra = [path for path in EXTRA_WRITERS if isinstance(getattr(tree, path, None), nn.Module)]
    return {
        **dict.fromkeys((*stream_writers(fix.arch), *extra), ScaledWriter),
        fix.arch.names.shared_block_modulation.path: ScaledGates,
        **(dict.fromkeys(fix.sites, CountedBlock) if fix.counting else {}),
    }


def patch_native(model: ModelPatcher, tree: nn.Module, fix: FixState) -> None:
    """Put the native path's object patches on a MODEL clone. Raises MossError for a norm without a plain eps."""
    for path, kind in wrapper_kinds(tree, fix).items():
        name = f"{ROOT}.{path}.forward"
        if not below_replaced(model, name):  # there `wrapped_outside` does it, call by call
            model.add_object_patch(name, kind(model.get_model_object(name), fix, path))
    for path, eps in eps_values(tree, fix.arch, fix.first_rung.plan).items():
        name = f"{ROOT}.{path}.eps"
        patched_object(model, name)  # says in words where a module put in another's place has no such norm
        model.add_object_patch(name, eps)


@contextlib.contextmanager
def wrapped_outside(tree: nn.Module, fix: FixState) -> Iterator[frozenset[str]]:
    """Until this ends our wrappers are the outermost ones on modules that others changed; gives those modules' paths.

    Bypass adapters, other packs' patches and hooks, and modules put in the place of others are there when the MODEL is
    loaded. What they add is a part of the module's output, so the factor has to come after it: the wrapper inside does
    nothing (`CallState.outside`) and one outside takes its place.
    """
    with contextlib.ExitStack() as undo:
        outside = set()
        for path, kind in wrapper_kinds(tree, fix).items():
            module = tree.get_submodule(path)
            current, hooked = module.forward, bool(module._forward_hooks)
            if isinstance(current, kind) and current.fix is fix and not hooked:
                fix.outer_wrappers.pop(path, None)  # it would keep alive what another pack has taken off again
                continue
            outside.add(path)
            outer = fix.outer_wrappers.get(path)
            if outer is None or outer.inner != current:  # the same one again, or compiled code would be built anew
                outer = fix.outer_wrappers[path] = kind(current, fix, path, outer=True)
            if hooked:
                undo.callback(module.register_forward_hook(outer.hook).remove)
            else:
                undo.callback(_restore_forward, module, current if "forward" in module.__dict__ else None)
                module.forward = outer
        yield frozenset(outside)


def _restore_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del module.forward  # the class's own
    else:
        module.forward = forward


def eps_values(tree: nn.Module, arch: MossArch, plan: StreamPlan) -> dict[str, float]:
    """The eps of every stream norm under a plan: stock times the square of the stream's scale."""
    unscale = plan.unscale(plan.entry)
    return {path: base / unscale**2 for path, base in base_eps(tree, arch).items()}


def base_eps(tree: nn.Module, arch: MossArch) -> dict[str, float]:
    """The model's own eps, which is the same for all its stream norms and is never patched on q_norm."""
    stock = getattr(Modules(tree, arch.names).joint_block(0).q_norm, "eps", None)
    if not isinstance(stock, float) or not all(hasattr(tree.get_submodule(p), "eps") for p in stream_norms(arch)):
        raise MossError(
            f"The norms of this MOSS-Image class ({type(tree).__name__}) have no plain eps, which the native path "
            "scales with c^2. Use engine = managed in MOSS FP16 Fix, or engine = builtin in Load MOSS-Image (FP16)."
        )
    return dict.fromkeys(stream_norms(arch), stock)


@contextlib.contextmanager
def norms_for(tree: nn.Module, arch: MossArch, plan: StreamPlan) -> Iterator[None]:
    """The loaded module's stream norms with the eps of another plan, until this ends."""
    # Any: each has an eps, which torch's Module does not say
    norms: dict[Any, float] = {tree.get_submodule(path): eps for path, eps in eps_values(tree, arch, plan).items()}
    before = {norm: norm.eps for norm in norms}
    try:
        for norm, eps in norms.items():
            norm.eps = eps
        yield
    finally:
        for norm, eps in before.items():
            norm.eps = eps
