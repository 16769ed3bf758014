"""The forward itself: padding, empty texts, dtypes, gradients, compilation, other module trees."""

from __future__ import annotations

from typing import ClassVar

import golden
import pytest
import torch
from golden import SKIP_1, UNIFORM, Case, NoFloat64, relative, velocity
from torch import Tensor, nn

from fold.arch import MossArch
from fold.demo import demo_arch
from fold.dtypes import stored_dtype
from fold.measure.probe import Key, PeakObserver, gather
from fold.model.forward import MossDiT, run_dit
from fold.model.observer import Kind, Observer
from fold.names import HEAD_MODULATION, MODULATION
from fold.report.counters import Counters, site_names
from fold.scaling.factors import Factors
from fold.scaling.plan import StreamPlan

PER_BLOCK = golden.factors("per_block")
PLANS = {
    "none": StreamPlan(),
    "online": StreamPlan("online", UNIFORM),
    "per_block": StreamPlan("online", PER_BLOCK),
    "fp32_residual": StreamPlan("fp32_residual", clamp=4096.0),
}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@pytest.fixture
def case() -> Case:
    return golden.cases_of("hot")[1]


def padded(context: Tensor, lengths: list[int], filler: float) -> tuple[Tensor, Tensor]:
    """The context with everything past each sample's length replaced, and its mask."""
    mask = torch.arange(context.shape[1]) < torch.tensor(lengths)[:, None]
    return context.masked_fill(~mask[..., None], filler), mask


@torch.no_grad()
@each_plan
@pytest.mark.parametrize("filler", [0.0, 1e4, float("nan")])
def test_a_padded_batch_equals_each_sample_alone(case: Case, plan: StreamPlan, filler: float) -> None:
    model, lengths = golden.model("hot"), [4, 9]
    context, mask = padded(case.context, lengths, filler)
    both = model(case.latent, case.sigma, context, plan=plan, mask=mask)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = model(case.latent[one], case.sigma[one], context[one, :length], plan=plan)
        assert relative(both[one], alone) < 2e-6


@torch.no_grad()
def test_padding_in_front_counts_as_padding(case: Case) -> None:
    model = golden.model("hot")
    context, mask = padded(case.context, [4, 9], 0.0)
    turned = torch.cat((context[:1].roll(5, 1), context[1:]))
    behind = model(case.latent, case.sigma, context, plan=StreamPlan(), mask=mask)
    before = model(case.latent, case.sigma, turned, plan=StreamPlan(), mask=torch.cat((mask[:1].roll(5, 1), mask[1:])))
    assert relative(before, behind) < 2e-6


@torch.no_grad()
@each_plan
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sample_without_text_is_finite(case: Case, plan: StreamPlan, dtype: torch.dtype) -> None:
    context, mask = padded(case.context, [0, 9], float("nan"))
    value = golden.model("cool", dtype)(case.latent, case.sigma, context, plan=plan, mask=mask, dtype=dtype)
    assert bool(value.isfinite().all())


@torch.no_grad()
def test_a_mask_of_ones_is_no_mask(case: Case) -> None:
    model = golden.model("hot")
    mask = torch.ones(case.context.shape[:2], dtype=torch.int64)
    masked = model(case.latent, case.sigma, case.context, plan=StreamPlan(), mask=mask)
    assert relative(masked, velocity(case)) < 2e-6


@torch.no_grad()
@each_plan
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nothing_is_ever_float64(case: Case, plan: StreamPlan, dtype: torch.dtype) -> None:
    model = golden.model("hot", dtype)
    watch = Counters(site_names(2, 4))
    mask = torch.ones(case.context.shape[:2], dtype=torch.bool)
    with NoFloat64():
        model(case.latent, case.sigma, case.context, plan=plan, mask=mask, dtype=dtype, observer=watch)
        watch.commit()
        watch.packed()
        watch.bad_flag()
        watch.read()


def test_gradients_reach_every_weight_and_equal_those_without_the_fold(case: Case) -> None:
    grads = []
    for plan in (StreamPlan(), StreamPlan("online", PER_BLOCK)):
        model = MossDiT(golden.model("cool").arch)
        model.load_state_dict(golden.model("cool").state_dict())
        latent = case.latent.clone().requires_grad_()
        model(latent, case.sigma, case.context, plan=plan).square().mean().backward()
        assert latent.grad is not None
        grads.append({"latent": latent.grad} | {name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert grad is not None, name
        # gates that let nothing through leave a gradient of zero
        assert torch.allclose(grad, grads[1][name], rtol=1e-3, atol=1e-7), name


@torch.no_grad()
@pytest.mark.parametrize("kind", ["none", "per_block", "fp32_residual"])
def test_compiles_as_one_graph(case: Case, kind: str) -> None:
    model, plan = golden.model("hot"), PLANS[kind]

    def call(x: Tensor, sigma: Tensor, context: Tensor) -> Tensor:
        return run_dit(model, model.arch, x, sigma, context, plan=plan, dtype=torch.float32, replace=SKIP_1)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=False)
    value = compiled(case.latent, case.sigma, case.context)
    assert torch.equal(value, call(case.latent, case.sigma, case.context))


@torch.no_grad()
def test_compiles_with_the_counters_on(case: Case) -> None:
    model, watch, plan = golden.model("hot"), Counters(site_names(2, 4)), StreamPlan()
    watch._place(torch.device("cpu"), 1)

    def call(x: Tensor, sigma: Tensor, context: Tensor) -> Tensor:
        return run_dit(model, model.arch, x, sigma, context, plan=plan, observer=watch)

    torch._dynamo.reset()
    torch.compile(call, backend="eager", fullgraph=True, dynamic=False)(case.latent, case.sigma, case.context)
    watch.commit()
    wanted = golden.counted(case, StreamPlan())
    assert {row.name: row for row in watch.read()} == wanted


class CastLinear(nn.Linear):
    """A runtime's casting layer."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class CastNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Operations:
    Linear = CastLinear
    RMSNorm = CastNorm


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
def test_is_built_from_the_layers_given(case: Case, fused: bool) -> None:
    source = golden.model("hot_fused_qkv" if fused else "hot")
    model = MossDiT(source.arch, fused=fused, dtype=torch.bfloat16, device=torch.device("cpu"), operations=Operations)
    model.load_state_dict(source.state_dict())
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {CastLinear}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == stored_dtype(name, torch.bfloat16), name
    assert torch.equal(model(case.latent, case.sigma, case.context), velocity(case))


@torch.no_grad()
def test_the_state_dict_is_the_official_one() -> None:
    for fused in (False, True):
        arch = golden.model("cool").arch
        with torch.device("meta"):
            model = MossDiT(arch, fused=fused)
        assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == arch.expected_shapes(fused)


@torch.no_grad()
def test_other_geometries_run(case: Case) -> None:
    arch: MossArch = demo_arch(64, 1, 4, text_dim=8)
    torch.manual_seed(0)
    model = MossDiT(arch).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.05)
    plan = StreamPlan("online", Factors((0.25,)))
    out = model(torch.randn(3, 128, 1, 1), torch.rand(3), torch.randn(3, 2, 8), plan=plan)
    assert out.shape == (3, 128, 1, 1)
    assert bool(out.isfinite().all())


class Watch(Observer):
    """What it was shown, by kind and by row."""

    def __init__(self, wants: bool = True) -> None:
        self.wants_inner, self.kinds, self.rows = wants, set[Kind](), list[str]()

    def inner(self, kind: Kind, layer: int, value: Tensor, scale: float) -> None:
        self.kinds.add(kind)

    def modulation(self, row: str, value: Tensor) -> None:
        self.rows.append(row)


def test_inner_values_are_told_only_to_those_who_want_them(case: Case) -> None:
    watch = Watch(wants=False)
    velocity(case, observer=watch)
    assert watch.kinds == set() and watch.rows == []


def test_the_forward_shows_every_kind_and_every_modulation_row(case: Case) -> None:
    watch = Watch()
    velocity(case, observer=watch)
    assert watch.kinds == set(Kind)
    assert watch.rows == [*MODULATION, *HEAD_MODULATION]


def test_what_the_forward_shows_is_all_read_by_the_probe(case: Case) -> None:
    class Read(dict[Key, float]):
        used: ClassVar[set[Key]] = set()

        def __getitem__(self, key: Key) -> float:
            self.used.add(key)
            return super().__getitem__(key)

    arch = golden.model(case.model).arch
    observer = PeakObserver(arch.text_blocks)
    velocity(case, observer=observer)
    found = Read(observer.read())
    gather(found, arch)
    assert Read.used == found.keys()
