"""The golden models and cases in tests/data: loaded once, run in one line, compared by relative L2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from repo import DATA
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fold.checkpoint.load import load_model
from fold.checkpoint.reader import Checkpoint, open_checkpoint
from fold.model.forward import BlockReplacement, MossDiT, skip_block
from fold.model.observer import Observer
from fold.names import OFFICIAL, ModuleNames
from fold.report.counters import BlockStats, Counters, site_names
from fold.scaling.factors import Factors
from fold.scaling.plan import StreamPlan
from fold.scaling.record import StoredFold

MODELS = ("cool", "warm", "hot", "burst")
SKIP_1: Mapping[int, BlockReplacement] = {1: skip_block}
UNIFORM = Factors((1 / 16,))
#: A folder with the same files under other module names, and with those names in names.json: see test_names.
RENAMED = os.environ.get("MOSS_GOLDEN_RENAMED")


@dataclass(frozen=True)
class Case:
    """One golden case: inputs, expected velocities by name, and the scalars of expected.json."""

    model: str
    name: str
    latent: Tensor
    context: Tensor
    sigma: Tensor
    expected: dict[str, Tensor]
    scalars: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.model}-{self.name}"


@cache
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "expected.json").read_text("utf-8"))
    return found


@cache
def cases() -> tuple[Case, ...]:
    return tuple(_case(entry) for entry in expected()["cases"])


def cases_of(model: str) -> tuple[Case, ...]:
    return tuple(case for case in cases() if case.model == model)


def _case(entry: dict[str, Any]) -> Case:
    prefix = entry["case"] + "."
    found = {k.removeprefix(prefix): t for k, t in _io(entry["model"]).items() if k.startswith(prefix)}
    latent, context = found.pop("latent"), found.pop("context")
    sigma = torch.full((latent.shape[0],), entry["sigma"])
    return Case(entry["model"], entry["case"], latent, context, sigma, found, entry)


@cache
def _io(model: str) -> dict[str, Tensor]:
    return load_file(DATA / f"{model}_io.safetensors")


@cache
def model(name: str, dtype: torch.dtype = torch.float32, unfold: bool = True) -> MossDiT:
    """A checkpoint of tests/data as the built-in model, shared by all tests: do not change it."""
    with opened(name) as checkpoint:
        return load_model(checkpoint, dtype, unfold=unfold)


@cache
def names() -> ModuleNames:
    """What the modules are called in the files that the tests load."""
    return OFFICIAL.renamed(json.loads((Path(RENAMED) / "names.json").read_text())) if RENAMED else OFFICIAL


def opened(name: str) -> Checkpoint:
    """A file of tests/data, or of the folder where its modules have other names."""
    return open_checkpoint((Path(RENAMED) if RENAMED else DATA) / f"{name}.safetensors", names())


def stored(name: str, unfolded: bool) -> StoredFold:
    """The fold of a file of tests/data, as it is after loading."""
    with opened(name) as checkpoint:
        return StoredFold(checkpoint.record, unfolded=unfolded and checkpoint.record is not None)


def factors(name: str) -> Factors:
    """The factors expected.json gives for a model, or "per_block"."""
    table = expected()
    return Factors.from_json(table["per_block"] if name == "per_block" else table["factors"][name])


@torch.no_grad()
def velocity(
    case: Case,
    plan: StreamPlan | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    weights: str | MossDiT | None = None,
    unfold: bool = True,
    replace: Mapping[int, BlockReplacement] | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """The velocity of a case; `weights`: another file of tests/data, or a model."""
    tree = weights if isinstance(weights, MossDiT) else model(weights or case.model, dtype, unfold)
    return tree(
        case.latent,
        case.sigma,
        case.context,
        plan=plan or StreamPlan(),
        dtype=dtype,
        replace=replace,
        observer=observer,
    )


def counted(case: Case, plan: StreamPlan, dtype: torch.dtype = torch.float32) -> dict[str, BlockStats]:
    """The saturation counts of one call by block name."""
    arch = model(case.model, dtype).arch
    counters = Counters(site_names(arch.text_blocks, arch.depth))
    velocity(case, plan, dtype, observer=counters)
    counters.commit()
    return {row.name: row for row in counters.read()}


def relative(value: Tensor, reference: Tensor) -> float:
    """Relative L2 error."""
    return float(torch.linalg.vector_norm(value.float() - reference.float()) / torch.linalg.vector_norm(reference))


#: fp16 has three more bits after the point than bf16, so its rounding is this much finer.
FP16_OVER_BF16 = 8


def rounding_error(
    case: Case, plan: StreamPlan, dtype: torch.dtype, *, weights: str | MossDiT | None = None, unfold: bool = True
) -> float:
    """The relative error of a plan in fp16 or bf16 against fp32: the median over the tokens of a case and of seven
    latents like it. Of a single token it would be luck: where the golden models' massive channels almost cancel, the
    order in which a processor and a torch version add decides."""
    errors = []
    for variant, exact in zip(_variants(case), _exact_variants(case.model, case.name), strict=True):
        value = velocity(variant, plan, dtype, weights=weights, unfold=unfold)
        errors.append(((value.float() - exact).norm(dim=1) / exact.norm(dim=1)).flatten())
    return float(torch.cat(errors).median())


def fp16_bound(case: Case) -> float:
    """What a fixed fp16 run's `rounding_error` may be: 2.5 times that of a plain bf16 run, which needs no fix, of the
    same torch on the same processor, taken at fp16's rounding. (Seen: 0.49 to 1.99 times with torch 2.4 to 2.14.)"""
    return 2.5 * _plain_bf16_error(case.model, case.name) / FP16_OVER_BF16


def _variants(case: Case) -> list[Case]:
    return [replace(case, latent=case.latent * (1 + k / 512)) for k in range(8)]


@cache
def _exact_variants(model: str, name: str) -> list[Tensor]:
    return [velocity(variant) for variant in _variants(_find(model, name))]


@cache
def _plain_bf16_error(model: str, name: str) -> float:
    return rounding_error(_find(model, name), StreamPlan(), torch.bfloat16)


def _find(model: str, name: str) -> Case:
    return next(case for case in cases() if (case.model, case.name) == (model, name))


class NoFloat64(TorchDispatchMode):
    """Fails on any operation that takes or gives a float64 tensor, as MPS and XPU do."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            wide = isinstance(leaf, Tensor) and leaf.dtype in (torch.float64, torch.complex128)
            assert not wide, f"{func} touches float64"
        return out
