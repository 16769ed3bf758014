"""The native path: the uniform fold as object patches on writers and norm eps, with nothing added inside the blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ...fold.arch import MossArch
from ...fold.errors import MossError
from ...fold.scaling.plan import StreamPlan
from ..model.moss import ROOT, Tree, below_replaced, patched_object, stream_norms, stream_writers
from ..state import Handle


class Around:
    """Stands around a module's forward: `after` gets what it returned. Inert while the managed forward runs, and while
    another one of these stands further out (see `outermost`)."""

    def __init__(self, inner: Callable[..., Any], handle: Handle, path: str, outer: bool = False) -> None:
        self.inner, self.handle, self.path, self.outer = inner, handle, path, outer

    @property
    def active(self) -> bool:
        return not self.handle.rung.managed and (self.outer or self.path not in self.handle.covered)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return self.after(out) if self.active else out

    def after(self, out: Any) -> Any:
        raise NotImplementedError

    def on(self, inner: Callable[..., Any]) -> Around:
        """The same around another module's forward."""
        return type(self)(inner, self.handle, self.path, self.outer)

    def hook(self, module: nn.Module, args: Any, out: Any) -> Any:
        """The same as a forward hook, for a module on which other packs' hooks come after its forward."""
        return self.after(out) if self.active else out


class ScaledWriter(Around):
    """A writer's output times c."""

    def after(self, out: Tensor) -> Tensor:
        entry = self.handle.rung.plan.entry
        return out if entry == 1.0 else out * entry


class ScaledGates(Around):
    """The shared modulation's two gates, rows [2D:3D] and [5D:6D], times c / s."""

    def after(self, out: Tensor) -> Tensor:
        f = self.handle.rung.plan.factors
        if f.identity:
            return out
        y, d = out.clone(), out.shape[-1] // 6
        y[..., 2 * d : 3 * d] *= f.c[0] / f.s_attn[0]
        y[..., 5 * d :] *= f.c[0] / f.s_ffn[0]
        return y


class CountedBlock(Around):
    """A block's result, the stream, is counted."""

    def after(self, out: Any) -> Any:
        observer = self.handle.observer
        if observer is not None:
            stream = out[0] if isinstance(out, (tuple, list)) else out  # torch 2.4 cannot compile a union
            if isinstance(stream, Tensor):
                observer.stream(self.handle.sites[self.path], stream)
        return out


#: Modules that some MOSS-Image classes have beside the checkpoint's own and that write onto a stream: the projections
#: of control maps. Where a class has one it is scaled like the embedders; the self-check tells if one is missing here.
EXTRA_WRITERS = ("control_embedder", "control_proj", "control_projection", "control_map_embedder", "map_embedder")

PATCHES = (ScaledWriter, ScaledGates, CountedBlock)


def wrapped_modules(tree: nn.Module, handle: Handle) -> dict[str, type[Around]]:
    """Every module that the native path stands around, by path: MOSS-Image's own writers and the extra ones that this
    class has, which the fold scales; and its blocks, where they are counted."""
    extra = [path for path in EXTRA_WRITERS if isinstance(getattr(tree, path, None), nn.Module)]
    return {
        **dict.fromkeys((*stream_writers(handle.arch), *extra), ScaledWriter),
        "shared_block_modulation": ScaledGates,
        **(dict.fromkeys(handle.sites, CountedBlock) if handle.counting else {}),
    }


def patch_native(model: Any, tree: nn.Module, handle: Handle) -> None:
    """Put the native path's object patches on a MODEL clone. Raises MossError for a norm without a plain eps."""
    for path, kind in wrapped_modules(tree, handle).items():
        name = f"{ROOT}.{path}.forward"
        if not below_replaced(model, name):  # there `outermost` stands around it, call by call
            model.add_object_patch(name, kind(model.get_model_object(name), handle, path))
    for path, eps in eps_values(tree, handle.arch, handle.start.plan).items():
        name = f"{ROOT}.{path}.eps"
        patched_object(model, name)  # says in words where a module put in another's place has no such norm
        model.add_object_patch(name, eps)


@contextlib.contextmanager
def outermost(tree: nn.Module, handle: Handle) -> Iterator[None]:
    """Scaling and counting stand outside whatever else has changed a module, for the length of a call.

    Bypass adapters, other packs' patches and hooks, and modules put in the place of others are there when the MODEL is
    loaded. What they add is a part of the module's output, so the factor has to come after it: ours inside stands still
    and one outside takes its place.
    """
    with contextlib.ExitStack() as undo:
        covered = set()
        for path, kind in wrapped_modules(tree, handle).items():
            module = tree.get_submodule(path)
            current, hooked = module.forward, bool(module._forward_hooks)
            if isinstance(current, kind) and current.handle is handle and not hooked:
                handle.outer.pop(path, None)  # it would keep alive what another pack has taken off again
                continue
            covered.add(path)
            outer = handle.outer.get(path)
            if outer is None or outer.inner != current:  # the same one again, or compiled code would be built anew
                outer = handle.outer[path] = kind(current, handle, path, outer=True)
            if hooked:
                undo.callback(module.register_forward_hook(outer.hook).remove)
            else:
                undo.callback(_put_back, module, current if "forward" in module.__dict__ else None)
                module.forward = outer
        undo.callback(setattr, handle, "covered", frozenset())
        handle.covered = frozenset(covered)
        yield


def _put_back(module: nn.Module, forward: Any) -> None:
    if forward is None:
        del module.forward  # the class's own
    else:
        module.forward = forward


def eps_values(tree: nn.Module, arch: MossArch, plan: StreamPlan) -> dict[str, float]:
    """The eps of every stream norm under a plan: stock times the square of the stream's scale."""
    unscale = plan.unscale(plan.entry)
    return {path: base / unscale**2 for path, base in base_eps(tree, arch).items()}


def base_eps(tree: Tree, arch: MossArch) -> dict[str, float]:
    """The model's own eps, which is the same for all its stream norms and is never patched on q_norm."""
    stock = getattr(tree.layers[0].q_norm, "eps", None)
    if not isinstance(stock, float) or not all(hasattr(tree.get_submodule(p), "eps") for p in stream_norms(arch)):
        raise MossError(
            f"The norms of this MOSS-Image class ({type(tree).__name__}) have no plain eps, which the native path "
            "scales with c^2. Use engine = managed."
        )
    return dict.fromkeys(stream_norms(arch), stock)


def retune(tree: Tree, arch: MossArch, plan: StreamPlan) -> None:
    """Set the norms' eps on the loaded module for another plan; ComfyUI's unpatching puts the originals back."""
    for path, eps in eps_values(tree, arch, plan).items():
        tree.get_submodule(path).eps = eps


def restore_eps(handle: Handle, model: Any) -> None:
    """After a run that ended on another rung: the norms' eps as the object patches had set it."""
    if handle.retuned and handle.path == "native" and handle.rung == handle.start:
        retune(getattr(model.model, ROOT), handle.arch, handle.start.plan)
        handle.retuned = False
