"""The native path: the uniform fold as object patches on writers and norm eps, with nothing added inside the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..fold.arch import MossArch
from ..fold.errors import MossError
from ..fold.stream import StreamPlan
from .handle import Handle
from .tree import ROOT, blocks, stream_norms, stream_writers


class ScaledWriter:
    """A writer's forward with its output times c. Inert while the managed forward runs, which scales for itself."""

    def __init__(self, inner: Callable[..., Tensor], handle: Handle) -> None:
        self.inner, self.handle = inner, handle

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        y = self.inner(*args, **kwargs)
        rung = self.handle.rung
        return y if rung.managed or rung.plan.entry == 1.0 else y * rung.plan.entry


class ScaledGates:
    """The shared modulation's forward with its two gates, rows [2D:3D] and [5D:6D], times c / s."""

    def __init__(self, inner: Callable[..., Tensor], handle: Handle) -> None:
        self.inner, self.handle = inner, handle

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        y = self.inner(*args, **kwargs)
        rung = self.handle.rung
        if rung.managed or rung.plan.factors.identity:
            return y
        f, y, d = rung.plan.factors, y.clone(), y.shape[-1] // 6
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


PATCHES = (ScaledWriter, ScaledGates, CountedBlock)


def patch_native(model: Any, tree: nn.Module, handle: Handle) -> None:
    """Put the native path's object patches on a MODEL clone. Raises MossError for a norm without a plain eps."""
    arch = handle.arch
    for path in stream_writers(arch):
        _wrap(model, path, lambda inner: ScaledWriter(inner, handle))
    _wrap(model, "shared_block_modulation", lambda inner: ScaledGates(inner, handle))
    if handle.options.counters:
        for site, path in enumerate(blocks(arch)):
            _wrap(model, path, lambda inner, site=site: CountedBlock(inner, handle, site))
    for path, eps in eps_values(tree, arch, handle.start.plan).items():
        model.add_object_patch(f"{ROOT}.{path}.eps", eps)


def _wrap(model: Any, path: str, make: Callable[[Any], Any]) -> None:
    name = f"{ROOT}.{path}.forward"
    model.add_object_patch(name, make(model.get_model_object(name)))


def eps_values(tree: nn.Module, arch: MossArch, plan: StreamPlan) -> dict[str, float]:
    """The eps of every stream norm under a plan: stock times the square of the stream's scale."""
    unscale = plan.unscale(plan.entry)
    return {path: base / unscale**2 for path, base in base_eps(tree, arch).items()}


def base_eps(tree: nn.Module, arch: MossArch) -> dict[str, float]:
    """The model's own eps, which is the same for all its stream norms and is never patched on q_norm."""
    stock = getattr(tree.layers[0].q_norm, "eps", None)
    if not isinstance(stock, float) or not all(hasattr(tree.get_submodule(p), "eps") for p in stream_norms(arch)):
        raise MossError(
            f"The norms of this MOSS-Image class ({type(tree).__name__}) have no plain eps, which the native path "
            "scales with c^2. Use engine = managed, or eps = stock."
        )
    return dict.fromkeys(stream_norms(arch), stock)


def retune(tree: nn.Module, arch: MossArch, plan: StreamPlan) -> None:
    """Set the norms' eps on the loaded module for another plan; ComfyUI's unpatching puts the originals back."""
    for path, eps in eps_values(tree, arch, plan).items():
        tree.get_submodule(path).eps = eps
