"""Every node of the running ComfyUI that takes and gives a MODEL, found in its registry, and run with its defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import nodes

#: What a node's input of a kind is given: (kind, name of the input) -> value. LookupError where there is none.
Supply = Callable[[str, str], Any]

_PLAIN: dict[str, Any] = {"INT": 0, "FLOAT": 0.0, "BOOLEAN": False, "STRING": ""}


def model_nodes() -> dict[str, Any]:
    """The classes of ComfyUI's own nodes that take a MODEL and give one, by their ids."""
    asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    found = {name: cls for name, cls in sorted(nodes.NODE_CLASS_MAPPINGS.items()) if "MODEL" in cls.RETURN_TYPES}
    return {name: cls for name, cls in found.items() if "MODEL" in [kind for _, kind, _ in inputs_of(cls)]}


def inputs_of(cls: Any) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """(name, kind, options) of each required input, then of each optional one."""
    types = cls.INPUT_TYPES()
    specs = [item for group in ("required", "optional") for item in types.get(group, {}).items()]
    return [(name, spec[0], spec[1] if len(spec) > 1 else {}) for name, spec in specs]


def apply_node(cls: Any, supply: Supply) -> Any:
    """The MODEL that a node gives when all its inputs have their defaults, and `supply` the rest."""
    required = set(cls.INPUT_TYPES().get("required", {}))
    values: dict[str, Any] = {}
    for name, kind, options in inputs_of(cls):
        try:
            values[name] = _value(name, kind, options, supply)
        except LookupError:
            if name in required:
                raise
    out = _execute(cls, values)
    return out[list(cls.RETURN_TYPES).index("MODEL")]


def _value(name: str, kind: Any, options: Mapping[str, Any], supply: Supply) -> Any:
    choices = kind if isinstance(kind, list | tuple) else options.get("options") if kind == "COMBO" else None
    if choices is not None:
        if not choices:
            raise LookupError(f"a file for {name}")
        return options.get("default", choices[0])
    return options.get("default", _PLAIN[kind]) if kind in _PLAIN else supply(kind, name)


def _execute(cls: Any, values: dict[str, Any]) -> Any:
    if hasattr(cls, "GET_NODE_INFO_V1"):
        out = cls.PREPARE_CLASS_CLONE(None).EXECUTE_NORMALIZED(**values)
        return getattr(out, "result", out)
    return getattr(cls(), cls.FUNCTION)(**values)
