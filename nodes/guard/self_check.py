"""The self-check: with powers of two the fold is invariant, so the same call at c and at c/2 must agree.

If they do not, something this pack does not know of writes to the stream, and the fold would be quietly wrong.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...fold.report.messages import Message, message
from ..model.comfy_types import ModelPatcher
from ..model.foreign import cell_contents

#: Relative L2 of the two calls' velocities. Measured: 0 to 1e-3 from fp16 subnormals, 1e-2 and more from a writer
#: that is not scaled.
BOUND = 4e-3

#: Checks in one run. A patch that counts its own calls looks like another one each time, and shall not double a run.
MOST = 8

_passed: set[tuple[Any, ...]] = set()


def of_model(tree: nn.Module, patcher: ModelPatcher | None) -> tuple[Any, ...]:
    """What of a MODEL decides whether every writer is accounted for: class, adapters, what is put on the modules.

    It stays as it is for a run, and takes longer to put together than the rest.
    """
    objects = {f"{name}:{_name(patch)}" for name, patch in getattr(patcher, "object_patches", {}).items()}
    injected = {f"injection:{name}" for name, found in getattr(patcher, "injections", {}).items() if found}
    return (
        f"{type(tree).__module__}.{type(tree).__qualname__}",
        frozenset(getattr(patcher, "patches", {})),
        frozenset(objects | injected),
    )


def of_call(options: dict[str, Any], conds: dict[str, Any], managed: bool) -> tuple[Any, ...]:
    """What of a call decides it: conditioning keys, block patches, wrappers, path."""
    patches = {f"{name}:{_name(p)}" for name, found in options.get("patches", {}).items() for p in found}
    replaced = {
        f"{group}:{key[0] if isinstance(key, tuple) else key}:{_name(patch)}"
        for group, found in options.get("patches_replace", {}).items()
        for key, patch in found.items()
    }
    wrappers = {
        f"{kind}:{key}:{_name(w)}"
        for kind, keyed in options.get("wrappers", {}).items()
        for key, found in keyed.items()
        for w in found
    }
    return (
        frozenset(key for key, value in conds.items() if value is not None),
        frozenset(patches | replaced | wrappers),
        managed,
    )


def _name(thing: Any) -> str:
    """A patch's code and its plain settings, not its identity: the same node applied again is the same combination.

    The settings count because a patch of strength 0 passes for one that writes nothing.
    """
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    held = {str(n): cell_contents(c) for n, c in enumerate(getattr(thing, "__closure__", None) or ())}
    owner = getattr(thing, "__self__", thing)
    held |= getattr(owner, "__dict__", None) or {}
    plain = sorted((k, repr(v)) for k, v in held.items() if isinstance(v, bool | int | float | str))
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}{plain or ''}"


def seen(key: tuple[Any, ...]) -> bool:
    return key in _passed


def remember(key: tuple[Any, ...]) -> None:
    _passed.add(key)


def forget_all() -> None:
    """For tests."""
    _passed.clear()


def suspects(conds: dict[str, Any], options: dict[str, Any], control: Any) -> tuple[Message, ...]:
    """What in the call could be the unknown writer, for the report."""
    found = [
        message("suspect_conditioning", name=key)
        for key, value in conds.items()
        if value is not None and key not in _PLAIN
    ]
    found += [message("suspect_control")] if control is not None else []
    found += [
        message("suspect_patch", name=f"{name} ({_name(p)})")
        for name, ps in options.get("patches", {}).items()
        for p in ps
    ]
    found += [
        message("suspect_replace", name=f"{key} ({_name(p)})")
        for ps in options.get("patches_replace", {}).values()
        for key, p in ps.items()
    ]
    return tuple(found[:4]) or (message("suspect_module"),)


_PLAIN = frozenset({"c_crossattn", "attention_mask", "transformer_options"})


def disagreement(a: Tensor, b: Tensor, x: Tensor) -> float:
    """Relative L2 between two denoised results [B, C, h, w] of input x, measured on x - result (sigma x velocity).

    Per sample, the worst of the batch; inf where it is not finite.
    """
    v, w = (x.float() - a.float()).flatten(1), (x.float() - b.float()).flatten(1)
    worst = float(((v - w).norm(dim=1) / v.norm(dim=1).clamp_min(1e-20)).max())
    return worst if worst == worst else float("inf")
