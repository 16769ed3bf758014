"""The native path: the uniform fold as object patches on writers and norm eps, with nothing added inside the blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..fold.arch import MossArch
from ..fold.errors import MossError
from ..fold.stream import StreamPlan
from .handle import Handle
from .tree import ROOT, Tree, blocks, stream_norms, stream_writers


class ScaledWriter:
    """A writer's forward with its output times c. Inert while the managed forward runs, which scales for itself."""

    def __init__(self, inner: Callable[..., Tensor], handle: Handle, path: str, outer: bool = False) -> None:
        self.inner, self.handle, self.path, self.outer = inner, handle, path, outer

    @property
    def active(self) -> bool:
        return not self.handle.rung.managed and (self.outer or self.path not in self.handle.covered)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        y = self.inner(*args, **kwargs)
        entry = self.handle.rung.plan.entry
        return y if entry == 1.0 or not self.active else y * entry


class ScaledGates(ScaledWriter):
    """The shared modulation's forward with its two gates, rows [2D:3D] and [5D:6D], times c / s."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        y = self.inner(*args, **kwargs)
        f = self.handle.rung.plan.factors
        if f.identity or not self.active:
            return y
        y, d = y.clone(), y.shape[-1] // 6
        y[..., 2 * d : 3 * d] *= f.c[0] / f.s_attn[0]
        y[..., 5 * d :] *= f.c[0] / f.s_ffn[0]
        return y


class CountedBlock:
    """A block's forward whose result, the stream, is counted."""

    def __init__(self, inner: Callable[..., Any], handle: Handle, site: int) -> None:
        self.inner, self.handle, self.site = inner, handle, site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        observer = self.handle.observer
        if observer is not None and not self.handle.rung.managed:
            stream = out[0] if isinstance(out, tuple | list) else out
            if isinstance(stream, Tensor):
                observer.stream(self.site, stream)
        return out


#: Modules that some MOSS-Image classes have beside the checkpoint's own and that write onto a stream: the projections
#: of control maps. Where a class has one it is scaled like the embedders; the self-check tells if one is missing here.
EXTRA_WRITERS = ("control_embedder", "control_proj", "control_projection", "control_map_embedder", "map_embedder")

PATCHES = (ScaledWriter, ScaledGates, CountedBlock)


def scaled_modules(tree: nn.Module, arch: MossArch) -> dict[str, type[ScaledWriter]]:
    """Every module whose output the fold scales, by path: MOSS-Image's own, and the extra ones this class has."""
    extra = [path for path in EXTRA_WRITERS if isinstance(getattr(tree, path, None), nn.Module)]
    return {
        **dict.fromkeys((*stream_writers(arch), *extra), ScaledWriter),
        "shared_block_modulation": ScaledGates,
    }


def patch_native(model: Any, tree: nn.Module, handle: Handle) -> None:
    """Put the native path's object patches on a MODEL clone. Raises MossError for a norm without a plain eps."""
    arch = handle.arch
    for path, kind in scaled_modules(tree, arch).items():
        _wrap(model, path, partial(kind, handle=handle, path=path))
    if handle.counting:
        for site, path in enumerate(blocks(arch)):
            _wrap(model, path, partial(CountedBlock, handle=handle, site=site))
    for path, eps in eps_values(tree, arch, handle.start.plan).items():
        model.add_object_patch(f"{ROOT}.{path}.eps", eps)


@contextlib.contextmanager
def outermost(tree: nn.Module, handle: Handle) -> Iterator[None]:
    """Scaling stands outside whatever else has wrapped a writer's forward, for the length of a call.

    Bypass adapters and other packs' patches are put around ours when the MODEL is loaded. What they add is a part of
    the writer's output, so the factor has to come after it: ours inside stands still and one outside takes its place.
    """
    moved: dict[str, tuple[nn.Module, Any]] = {}
    for path, kind in scaled_modules(tree, handle.arch).items():
        module = tree.get_submodule(path)
        current = module.forward
        if not (isinstance(current, ScaledWriter) and current.handle is handle):
            moved[path] = (module, current)
            module.forward = kind(current, handle, path, outer=True)
    handle.covered = frozenset(moved)
    try:
        yield
    finally:
        handle.covered = frozenset()
        for module, current in moved.values():
            module.forward = current


def _wrap(model: Any, path: str, make: Callable[[Any], Any]) -> None:
    name = f"{ROOT}.{path}.forward"
    model.add_object_patch(name, make(model.get_model_object(name)))


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
