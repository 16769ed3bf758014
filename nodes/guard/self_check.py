"""What a proof holds for, and how two results are compared.

Where a proof is not to be had, there is the check by c and c/2: with powers of two the fold is invariant, so the same
call at both must agree. It does not see a writer so large at both that it drowns the rest.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn

from ...fold.report.messages import Message, message
from ...fold.report.report import SelfCheck
from ..model.comfy_types import ModelPatcher
from ..model.foreign import cell_contents
from ..model.moss import ROOT
from ..state import KEY, Rung
from .call import ModelCall

#: Of the check by c and c/2. Measured: 0 to 1e-3 from fp16 subnormals, 1e-2 and more from a writer that is not scaled.
HALVED_BOUND = 4e-3

#: Checks in one run. A patch that counts its own calls looks like another one each time, and shall not double a run.
MOST = 8

#: What a check holds for.
Combination = tuple[Hashable, ...]

_passed: dict[Combination, SelfCheck] = {}


def of_model(tree: nn.Module, patcher: ModelPatcher | None) -> Combination:
    """The part of a combination that a MODEL gives: its class, adapters, object patches and injections.

    It is the same for a whole run, and the slowest part to compute.
    """
    objects = {f"{name}:{_name(patch)}" for name, patch in getattr(patcher, "object_patches", {}).items()}
    injected = {f"injection:{name}" for name, found in getattr(patcher, "injections", {}).items() if found}
    return (
        f"{type(tree).__module__}.{type(tree).__qualname__}",
        frozenset(getattr(patcher, "patches", {})),
        frozenset(objects | injected),
    )


def of_call(call: ModelCall, rung: Rung, *, wrappers: bool) -> Combination:
    """The part of a combination that a call gives: conditioning keys, block patches and the rung.

    On our own forward the latent's size, too, as a class's positions may depend on it. wrappers: include other packs'.
    """
    options = call.options
    patches = {f"{name}:{_name(p)}" for name, found in options.get("patches", {}).items() for p in found}
    replaced = {
        f"{group}:{key[0] if isinstance(key, tuple) else key}:{_name(patch)}"
        for group, found in options.get("patches_replace", {}).items()
        for key, patch in found.items()
    }
    around = {
        f"{kind}:{key}:{_name(w)}"
        for kind, keyed in (options.get("wrappers", {}) if wrappers else {}).items()
        for key, found in keyed.items()
        for w in found
    }
    return (
        frozenset(key for key, value in call.conds.items() if value is not None),
        frozenset(patches | replaced | around),
        (rung.managed, rung.plan.factors, rung.plan.baked),
        tuple(call.x.shape[-2:]) if rung.managed else (),
    )


def _name(thing: object) -> str:
    """A patch's code and its plain settings, not its identity: the same node applied again is the same combination.

    The settings count because a patch of strength 0 passes for one that writes nothing.
    """
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    held = {str(n): cell_contents(c) for n, c in enumerate(getattr(thing, "__closure__", None) or ())}
    owner = getattr(thing, "__self__", thing)
    held |= getattr(owner, "__dict__", None) or {}
    plain = sorted((k, repr(v)) for k, v in held.items() if isinstance(v, bool | int | float | str))
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}{plain or ''}"


def remembered(key: Combination) -> SelfCheck | None:
    """The proof of a combination that passed earlier in this process."""
    return _passed.get(key)


def remember(key: Combination, verdict: SelfCheck) -> None:
    """Keep the proof of a combination that passed."""
    _passed[key] = verdict


def forget_all() -> None:
    """For tests."""
    _passed.clear()


def foreign_parts(call: ModelCall, ours: tuple[type, ...]) -> bool:
    """Whether other packs have put anything on a MODEL or a call that could change the built-in class's function.

    ours: the types of this pack's object patches. Adapters in the weights do not count.
    """
    patches = getattr(call.patcher, "object_patches", {}).items()
    placed = any(
        key == ROOT or (key.startswith(f"{ROOT}.") and not isinstance(patch, (*ours, bool, float)))
        for key, patch in patches
    )
    injected = any(put for key, put in getattr(call.patcher, "injections", {}).items() if key != KEY)
    return placed or injected or call.has_wrappers or bool(suspects(call))


def suspects(call: ModelCall) -> tuple[Message, ...]:
    """Messages naming what in a call may write to the stream without our knowledge: conditionings, patches, control."""
    options = call.options
    found = [
        message("suspect_conditioning", name=key)
        for key, value in call.conds.items()
        if value is not None and key not in _PLAIN
    ]
    found += [message("suspect_control")] if call.control is not None else []
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
    return tuple(found)


_PLAIN = frozenset({"c_crossattn", "attention_mask"})


def relative_difference(v: Tensor, w: Tensor) -> float:
    """Relative L2 of w to v, both [B, C, h, w]: per sample, the worst of the batch; inf where it is not finite."""
    v, w = v.flatten(1), w.flatten(1)
    worst = float(((v - w).norm(dim=1) / v.norm(dim=1).clamp_min(1e-20)).max())
    return worst if worst == worst else float("inf")


def middle_difference(v: Tensor, w: Tensor) -> float:
    """The same per latent pixel, its median, the worst of the batch: pixels that flip one by one do not count."""
    scale = v.flatten(1).norm(dim=1) / v[0, 0].numel() ** 0.5
    found = ((v - w).norm(dim=1).flatten(1) / scale.clamp_min(1e-20)[:, None]).median(dim=1).values
    return float(found.max())
