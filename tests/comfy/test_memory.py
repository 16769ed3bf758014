"""What a run asks of the card: the memory ComfyUI is told of, waits, dtypes, in real runs of a real MODEL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import comfy.model_base
import comfy.model_management
import pytest
import torch
from comfy_runs import conditioning, fixed, load, sample, stock
from moss_fp16_pack.fold.model.memory import activation_bytes
from moss_fp16_pack.fold.report import counters
from moss_fp16_pack.nodes.engines.kernels import Kitchen
from moss_fp16_pack.nodes.engines.memory import TEXT_TOKENS
from moss_fp16_pack.nodes.model.moss import arch_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIZE, BATCH = (6, 4), 3


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, float]]]:
    """What each run told ComfyUI's memory manager: bytes for all conditionings at once, and for one."""
    real, found = comfy.model_management.load_models_gpu, []  # type: ignore[var-annotated]

    def watched(models: Any, memory_required: float = 0, minimum_memory_required: Any = None, **rest: Any) -> Any:
        found.append((memory_required, minimum_memory_required))
        return real(models, memory_required, minimum_memory_required=minimum_memory_required, **rest)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", watched)
    yield found


def wanted(model: Any, text: int, *, batch: int, fp32_stream: bool = False, slabs: int = 1) -> int:
    """slabs: of the feed-forward, which a CPU runs in one piece."""
    arch = arch_of(model.model.diffusion_model)
    dtype = model.model.get_dtype_inference()
    return activation_bytes(arch, batch, SIZE[0] * SIZE[1], text, dtype, fp32_stream=fp32_stream, ffn_slabs=slabs)


@pytest.mark.parametrize("fix", [None, "online", "fp32_residual"])
def test_the_built_in_class_tells_what_the_trace_says(told: list[tuple[float, float]], fix: str | None) -> None:
    model = load("cool", "fp16") if fix is None else fixed(load("cool", "fp16"), fix=fix)
    prompt = conditioning("cool")
    sample(model, prompt, size=SIZE, batch=BATCH, steps=1, cfg=2.0)
    both, one = told[-1]
    wide = fix == "fp32_residual"
    assert both == wanted(model, prompt[0][0].shape[1], batch=2 * BATCH, fp32_stream=wide)
    assert one == wanted(model, prompt[0][0].shape[1], batch=BATCH, fp32_stream=wide)
    assert "memory_required" not in vars(model.model)


@pytest.mark.usefixtures("foreign")
def test_a_managed_run_tells_for_its_own_forward_and_leaves_the_class_its_formula(
    told: list[tuple[float, float]],
) -> None:
    plain, prompt = stock("cool", "fp16"), conditioning("cool")
    managed = fixed(plain, fix="fp32_residual", engine="managed")
    sample(plain, prompt, size=SIZE, batch=BATCH, steps=1)
    sample(managed, prompt, size=SIZE, batch=BATCH, steps=1)
    sample(fixed(plain, fix="online", engine="native"), prompt, size=SIZE, batch=BATCH, steps=1)
    assert told[1][1] == wanted(managed, TEXT_TOKENS, batch=BATCH, fp32_stream=True)
    assert told[0] == told[2] != told[1]
    assert "memory_required" not in vars(plain.model)


@pytest.mark.usefixtures("foreign")
def test_the_formula_comes_back_after_a_run_that_fails() -> None:
    managed = fixed(stock("cool", "fp16"), fix="fp32_residual", engine="managed")
    broken = [[torch.zeros(1, 3, 7), {}]]
    with pytest.raises(Exception, match="conditioning"):
        sample(managed, broken, steps=1)
    assert "memory_required" not in vars(managed.model)


def test_weights_that_do_not_fit_run_the_feed_forward_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("cool", "fp16")
    monkeypatch.setattr(comfy.model_management, "is_device_cpu", lambda device: False)
    shape, text = [BATCH, 128, *SIZE], {"c_crossattn": [[1, 5, 48]]}
    for total, slabs in ((2**40, 2), (1000, 1)):
        monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda device, total=total: total)
        assert model.model.memory_required(shape, text) == wanted(model, 5, batch=BATCH, slabs=slabs)


#: What makes the host wait for a number. On a CPU torch answers these without its dispatcher.
WAITING = {"__bool__", "__float__", "__int__", "__index__", "item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero"}


class Waits(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in WAITING:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Wide(TorchDispatchMode):
    """Operators that touch float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves((args, kwargs, out))):
            self.found.append(str(func))
        return out


@pytest.fixture
def last_call(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What the last model call of a run did, all wrappers included; counted as on a device."""
    found: dict[str, list[str]] = {}
    real: Callable[..., Any] = comfy.model_base.BaseModel.apply_model

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Waits() as waits, Wide() as wide:
            out = real(self, *args, **kwargs)
        found["waits"], found["wide"] = waits.found, wide.found
        return out

    monkeypatch.setattr(comfy.model_base.BaseModel, "apply_model", watched)
    monkeypatch.setattr(counters, "_cheap_branch", lambda x: False)
    return found


@pytest.mark.parametrize(
    "engine, fix",
    [
        ("builtin", "online"),
        ("builtin", "fp32_residual"),
        ("managed", "online"),
        ("managed", "fp32_residual"),
        ("native", "online"),  # which has no fp32 stream
    ],
)
@pytest.mark.parametrize("guard, waits", [("off", 0), ("report", 1), ("rescue", 1)])
def test_a_call_waits_for_the_guards_flag_alone(
    request: pytest.FixtureRequest, last_call: dict[str, list[str]], engine: str, fix: str, guard: str, waits: int
) -> None:
    if engine != "builtin":
        request.getfixturevalue("foreign")
    source = load("cool", "fp16") if engine == "builtin" else stock("cool", "fp16")
    options = {} if engine == "builtin" else {"engine": engine}
    model = fixed(source, fix=fix, guard=guard, counters=True, self_check=False, **options)
    model.set_model_patch_replace(lambda args, extra: {"img": args["img"]}, "dit", "single_block", 1)
    mask = torch.ones(1, conditioning("cool")[0][0].shape[1])
    mask[:, -1] = 0
    sample(model, conditioning("cool", attention_mask=mask), steps=3, size=SIZE)
    assert last_call == {"waits": ["__bool__"] * waits, "wide": []}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_comfy_kitchens_norm_is_given_what_makes_it_ours(dtype: torch.dtype) -> None:
    """Through its plain backend, the only one that a CPU has."""
    from moss_fp16_pack.fold.model import kernels, ops

    norm = ops.RMSNorm(64, 1e-6)
    nn.init.normal_(norm.weight)
    x, row = torch.randn(2, 5, 64).to(dtype), torch.randn(2, 1, 64)
    small = x * 2.0**-4
    unscale = ops.Unscale(16.0, torch.tensor([16.0]))
    for scaled, stream in ((None, x), (unscale, small)):
        found = Kitchen(torch.device("cpu")).modulated_norm(norm, stream, scaled, 1 + row, row, dtype)
        plain = kernels.Slabs(torch.device("cpu")).modulated_norm(norm, stream, scaled, 1 + row, row, dtype)
        assert found.dtype == plain.dtype == dtype or found.dtype == torch.float32
        assert torch.allclose(found.float(), plain.float(), rtol=0, atol=2e-5 if dtype == torch.float32 else 2e-2)
