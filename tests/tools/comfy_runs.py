"""Helpers of the in-process tests: a MODEL from a golden file, a run through ComfyUI's own sampler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.sd
import pytest
import torch
from moss_fp16_pack.fold.model import forward
from moss_fp16_pack.fold.model.kernels import FUNCTIONAL
from moss_fp16_pack.fold.scaling.factors import Factors, GivenFactors
from moss_fp16_pack.nodes.apply import apply_fix
from moss_fp16_pack.nodes.inputs import FixOptions
from moss_fp16_pack.nodes.loading.load import load_moss
from moss_fp16_pack.nodes.model.stored_fold import stored_fold_of
from moss_fp16_pack.nodes.state import fix_of
from repo import DATA, ROOT, load_module
from safetensors.torch import load_file

torch.set_num_threads(1)  # the golden models are tiny; more threads only wait for each other

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def foreign_pack() -> Any:
    """The foreign class's pack, imported once; call its `register()` and `register.undo()`."""
    name = "foreign_moss_pack"
    return sys.modules.get(name) or load_module(name, ROOT / "tests" / "comfy" / "foreign_pack")


@contextmanager
def kernels_of_a_compiler() -> Iterator[None]:
    """What runs meanwhile uses what compiled code uses: on a CPU the slabs have a tanh of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "chosen", lambda *_: FUNCTIONAL)
        yield


def load(name: str, dtype: str = "fp32", *, engine: str = "builtin", unfold: bool = True) -> Any:
    """A golden file as our loader makes a MODEL of it, without a fix."""
    return load_moss(str(DATA / f"{name}.safetensors"), dtype, unfold, engine)


def stock(name: str, dtype: str = "fp32") -> Any:
    """The same through ComfyUI's own loader (needs the foreign class registered)."""
    model = comfy.sd.load_diffusion_model(str(DATA / f"{name}.safetensors"), {"dtype": DTYPES[dtype]})
    model.set_model_compute_dtype(DTYPES[dtype])  # on a CPU ComfyUI would compute in fp32
    return model


def fixed(model: Any, *, node_id: str = "1", node: str = "test", dtype: str | None = None, **options: Any) -> Any:
    """The fix node's work."""
    for key in ("c", "s_attn", "s_ffn"):
        if key in options:
            value = options.pop(key)
            given = options.get("factors") or Factors()
            values = tuple(value) if isinstance(value, list | tuple) else (value,)
            options["factors"] = Factors(**{**{f: getattr(given, f) for f in ("c", "s_attn", "s_ffn")}, key: values})
    if isinstance(options.get("factors"), Factors):
        options["factors"] = GivenFactors.of(options["factors"])
    return apply_fix(
        model,
        FixOptions(**options),
        node=node,
        node_id=node_id,
        compute_dtype=DTYPES[dtype] if dtype else None,
        stored=stored_fold_of(model),
    )


def conditioning(name: str, case: str = "case0", **extra: Any) -> list[Any]:
    """A golden case's context as CONDITIONING."""
    return [[load_file(DATA / f"{name}_io.safetensors")[f"{case}.context"][:1], extra]]


def sample(
    model: Any,
    positive: list[Any],
    *,
    negative: list[Any] | None = None,
    steps: int = 3,
    cfg: float = 1.0,
    size: tuple[int, int] = (6, 4),
    batch: int = 1,
    sampler: str = "euler",
    seed: int = 7,
    latent: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """A latent through comfy.sample, as KSampler does it."""
    latent = torch.zeros(batch, 128, *size) if latent is None else latent
    with torch.inference_mode():
        noise = comfy.sample.prepare_noise(latent, seed)
        return comfy.sample.sample(
            model, noise, steps, cfg, sampler, options.pop("scheduler", "simple"), positive,
            negative if negative is not None else positive, latent, seed=seed, disable_pbar=True, **options,
        )  # fmt: skip


def report(model: Any) -> dict[str, Any]:
    """The last run's report."""
    fix = fix_of(model)
    assert fix is not None and fix.last_report is not None
    return fix.last_report.to_json()


def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2."""
    return float((a - b).norm() / b.norm())


def marks(model: Any) -> dict[str, Any]:
    """Every attribute that lives on the modules of a MODEL and is not its class's own, and the weights."""
    found: dict[str, Any] = {}
    for path, module in model.model.named_modules():
        for key, value in module.__dict__.items():
            inherited = getattr(type(module), key, None)
            if key.startswith("_") or value is inherited or getattr(value, "__func__", value) is inherited:
                continue  # ComfyUI itself leaves a method or a flag behind where an object patch was
            if isinstance(value, bool | int | float | str | torch.dtype | torch.device | type(None)):
                found[f"{path}.{key}"] = value
            else:
                found[f"{path}.{key}"] = type(value)
    # of ComfyUI's own bookkeeping these tell how and by whom the model was loaded last
    for key in ("current_weight_patches_uuid", "current_patcher", "model_loaded_weight_memory"):
        found.pop(f".{key}", None)
    return found


def unload() -> None:
    comfy.model_management.unload_all_models()
