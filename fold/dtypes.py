"""Which dtype is used where: names, the rule for stored parameters, and what a user may set otherwise.

Two things can be set: the dtype that each input of a model call is brought to (`InputPolicy`), and the dtype of
single parameters (`DtypeRules`, lines of `glob = dtype`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from .errors import MossError
from .names import OFFICIAL, ModuleNames
from .qkv import keys_with

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

INPUT_CHOICES = ("default", *DTYPES, "passthrough")
_SHOWN = 3
#: Each line is held against every parameter; no model has this many parameters.
MOST_RULES = 4096


def parse_dtype(name: str) -> torch.dtype:
    """fp32, fp16 or bf16."""
    if name not in DTYPES:
        raise MossError(f"The dtype is one of {', '.join(DTYPES)}, not {name!r}.")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype | None) -> str:
    """The short name, for people: "fp16"."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch.")) if dtype is not None else "unknown"


def stored_dtype(name: str, dtype: torch.dtype, names: ModuleNames = OFFICIAL) -> torch.dtype:
    """The dtype in which parameter `name` (bare key) is kept when the model computes in `dtype`."""
    return torch.float32 if names.is_fp32(name.rpartition(".")[0]) else dtype


@dataclass(frozen=True)
class InputPolicy:
    """What each input of a model call is brought to at the model's boundary; inside, the model keeps its own rule.

    default: latents and cond in the compute dtype, timestep in fp32. fp32, bf16, fp16: rounded to that dtype.
    passthrough: left as it came.
    """

    latents: str = "default"
    cond: str = "default"
    timestep: str = "default"

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) not in INPUT_CHOICES:
                shown = getattr(self, one.name)
                raise MossError(f"The {one.name} dtype is one of {', '.join(INPUT_CHOICES)}, not {shown!r}.")

    @property
    def plain(self) -> bool:
        """Whether nothing was set."""
        return self == InputPolicy()

    def apply(
        self, latents: Tensor, timestep: Tensor, cond: Tensor, compute: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Latents, timestep and cond as the model gets them when it computes in `compute`."""
        return (
            _cast(latents, self.latents, compute),
            _cast(timestep, self.timestep, torch.float32),
            _cast(cond, self.cond, compute),
        )

    def to_json(self) -> dict[str, str]:
        """For the report: {"latents": ..., "cond": ..., "timestep": ...}."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def _cast(tensor: Tensor, choice: str, default: torch.dtype) -> Tensor:
    match choice:
        case "passthrough":
            return tensor
        case "default":
            return tensor.to(default)
        case _:
            return tensor.to(DTYPES[choice])


@dataclass(frozen=True)
class DtypeRule:
    """One line: parameters whose root-relative name matches `pattern` (`*` also matches dots) get `dtype`."""

    pattern: str
    dtype: torch.dtype


@dataclass(frozen=True)
class AppliedDtypes:
    """The rules as applied to one model.

    parameters: those whose dtype is not the default one, by name. record: for the report, per pattern in the order
    given {"dtype", "matched", "changed"}, changed counting the parameters it is the last word on.
    """

    parameters: Mapping[str, torch.dtype]
    record: Mapping[str, Mapping[str, Any]]

    def modules(self, names: ModuleNames = OFFICIAL) -> dict[str, torch.dtype]:
        """Linear modules (by path) that compute in a dtype of their own: the widest of their parameters set.

        Norms are not among them: they compute in fp32 whatever they store.
        """
        found: dict[str, torch.dtype] = {}
        for name, dtype in self.parameters.items():
            path, _, _leaf = name.rpartition(".")
            if not names.is_norm(path):
                before = found.get(path)
                found[path] = dtype if before is None else torch.promote_types(before, dtype)
        return found


NOTHING_APPLIED = AppliedDtypes({}, {})


def parse_rules(lines: str | Iterable[str]) -> tuple[DtypeRule, ...]:
    """Lines of `glob = dtype`, such as `layers.*.proj.o.weight = fp32`; blank lines and `# comments` are left out."""
    parts = lines.splitlines() if isinstance(lines, str) else [line for text in lines for line in text.splitlines()]
    rules = []
    for line in parts:
        text = line.partition("#")[0].strip()
        if not text:
            continue
        pattern, equals, name = (part.strip() for part in text.partition("="))
        if not equals or not pattern or name not in DTYPES:
            raise MossError(
                f"A parameter dtype is a line like 'layers.*.proj.o.weight = fp32' with one of {', '.join(DTYPES)}, "
                f"not {line.strip()[:80]!r}."
            )
        rules.append(DtypeRule(pattern, DTYPES[name]))
    if len(rules) > MOST_RULES:
        raise MossError(
            f"There are {len(rules)} lines of parameter dtypes, but more than {MOST_RULES} are not looked at."
        )
    return tuple(rules)


def apply_rules(
    rules: Iterable[DtypeRule],
    parameters: Iterable[str],
    default: Callable[[str], torch.dtype],
    names: ModuleNames = OFFICIAL,
) -> AppliedDtypes:
    """Match the rules, in order, against the names of a model's parameters; a later rule overrides an earlier one.

    default: what a parameter has without any rule; a rule that says the same costs nothing. Where q, k, v are one
    matrix they may still be named one by one, and where they are three, by `proj.qkv`. Raises MossError for a pattern
    that matches nothing (naming the nearest real names), and for q, k, v of one matrix set to different dtypes.
    """
    rules = tuple(rules)
    if not rules:
        return NOTHING_APPLIED
    real = [name for name in parameters if name != names.rope_bands]
    aliases, fused = _qkv_aliases(real, names)
    chosen: dict[str, DtypeRule] = {}
    matched: dict[DtypeRule, set[str]] = {}
    for rule in rules:
        hits = {name for name in aliases if fnmatchcase(name, rule.pattern)}
        if not hits:
            raise MossError(_no_match(rule.pattern, real))
        matched[rule] = {part for name in hits for part in aliases[name]}
        chosen.update(dict.fromkeys(matched[rule], rule))
    for name, parts in fused.items():
        _fuse(name, parts, chosen, default(name))
    changed = {name: chosen[name] for name in real if name in chosen and chosen[name].dtype != default(name)}
    owner = {part: name for name, parts in fused.items() for part in parts}
    record = {
        rule.pattern: {
            "dtype": dtype_name(rule.dtype),
            "matched": len({owner.get(part, part) for part in matched[rule]}),
            "changed": sum(last is rule for last in changed.values()),
        }
        for rule in rules
    }
    return AppliedDtypes({name: rule.dtype for name, rule in changed.items()}, record)


def _qkv_aliases(real: list[str], names: ModuleNames) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Every name a pattern may match -> the smallest named parts it stands for; and fused weight -> q, k, v."""
    aliases: dict[str, tuple[str, ...]] = {}
    fused: dict[str, tuple[str, ...]] = {}
    for name in real:
        keys = keys_with(name, names)
        if keys is None:
            aliases[name] = (name,)
            continue
        aliases[keys.fused] = keys.split
        aliases |= {part: (part,) for part in keys.split}
        if name == keys.fused:
            fused[name] = keys.split
    return aliases, fused


def _fuse(name: str, parts: tuple[str, ...], chosen: dict[str, DtypeRule], default: torch.dtype) -> None:
    """Settle the one dtype of a fused matrix, or refuse."""
    dtypes = {part: chosen[part].dtype if part in chosen else default for part in parts}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{part.split('.')[-2]} {dtype_name(dtype)}" for part, dtype in dtypes.items())
        raise MossError(
            f"{name} holds q, k and v in one matrix, but dtypes {listed} were asked for: give all three the same."
        )
    for part in parts:
        if part in chosen:
            chosen[name] = chosen[part]


def _no_match(pattern: str, real: list[str]) -> str:
    # any wildcard is nearest to a block's number
    bare = re.sub(r"[*?]|\[[^\]]*\]", "0", pattern)
    words = set(bare.split("."))

    def nearness(name: str) -> tuple[int, float]:
        return len(words & set(name.split("."))), difflib.SequenceMatcher(None, bare, name).ratio()

    near = sorted(real, key=nearness, reverse=True)[:_SHOWN]
    return f"No parameter of this model matches {pattern!r}; the nearest are {', '.join(near)}."


def in_own_dtype(forward: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """`forward` of a linear, computed in `dtype`; its result is rounded to the input's dtype.

    For any layer that casts its weights to its input's dtype, as this package's and ComfyUI's do.
    """

    def call(x: Tensor) -> Tensor:
        return forward(x.to(dtype)).to(x.dtype)

    return call
