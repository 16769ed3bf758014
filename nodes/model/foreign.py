"""What other packs put on a MODEL: modules in the place of others, forwards of their own, hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CellType
from typing import Any, TypeVar

from torch import nn

from ...fold.errors import MossError
from .comfy_types import ModelPatcher
from .moss import ROOT

_T = TypeVar("_T")


def unwrapped(module: _T) -> _T:
    """A module without torch.compile around it."""
    inner: _T = getattr(module, "_orig_mod", module)
    return inner


def below_replaced(model: ModelPatcher, name: str) -> bool:
    """Whether another node's object patch has put a module in the place of one that `name` is below."""
    return any(name.startswith(f"{key}.") for key in model.object_patches)


def patched_object(model: ModelPatcher, name: str) -> Any:
    """`get_model_object` for a name below a module that another node's object patch has replaced, too."""
    owner = None
    for key in model.object_patches:
        if key == name or name.startswith(f"{key}."):
            owner = key  # patches are put on in this order, so the last one counts
    if owner is None or owner == name:
        return model.get_model_object(name)
    if name in model.object_patches:
        # a second patch of that name would take the first one's place, on the module that was there before
        raise MossError(
            f"Another node has patched {name}, and one after it has put a {type(model.object_patches[owner]).__name__} "
            f"in the place of {owner}. Connect the MOSS node before these nodes."
        )
    found = model.object_patches[owner]
    for part in name.removeprefix(f"{owner}.").split("."):
        if not hasattr(found, part):
            raise MossError(
                f"Another node has put a {type(model.object_patches[owner]).__name__} in the place of {owner}, and it "
                f"has no {part}. Connect the MOSS node before that node."
            )
        found = getattr(found, part)
    return found


def changed_modules(
    tree: nn.Module, patcher: ModelPatcher | None, paths: Iterable[str], own_forward: Callable[[object], object]
) -> list[str]:
    """Those of the modules at `paths` that another pack has changed as a whole.

    own_forward: gives what a forward of this pack wraps, and any other forward as it is.
    """
    patches, backup = getattr(patcher, "object_patches", {}), getattr(patcher, "object_patches_backup", {})

    def changed(path: str) -> bool:
        key = f"{ROOT}.{path}"
        replaced = key in patches and _is_another_class(patches[key], backup.get(key))
        return replaced or _has_foreign_forward(tree.get_submodule(path), own_forward)

    return [path for path in paths if changed(path)]


def _is_another_class(patch: object, original: object) -> bool:
    """Whether a module put in the place of another is of another class (and not that one compiled)."""
    return type(unwrapped(patch)) is not type(original)


def _has_foreign_forward(module: nn.Module, own_forward: Callable[[object], object]) -> bool:
    """Whether a forward of another pack, or a hook, is on a module."""
    module = unwrapped(module)
    forward = own_forward(module.__dict__.get("forward"))
    own = forward is None or getattr(forward, "__func__", None) is type(module).forward
    return not own or bool(module._forward_hooks) or bool(module._forward_pre_hooks)


def held_by(thing: object) -> list[object]:
    """What a callable of another pack holds, in its attributes and its closure."""
    held = list(getattr(thing, "__dict__", {}).values())
    return held + [cell_contents(cell) for cell in getattr(thing, "__closure__", None) or ()]


def cell_contents(cell: CellType) -> object:
    """What a closure's cell holds; None for one that is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
