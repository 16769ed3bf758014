"""One model call in every mode on a fake device: what is traced, and what comes of it per block and in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fold.arch import MossArch
from fold.model.forward import BlockReplacement, MossDiT
from fold.model.kernels import Kernels, Slabs
from fold.model.modules import PlainLayers
from fold.model.ops import Linear
from fold.report.counters import Counters, site_names
from fold.scaling.factors import DEFAULT, Factors
from fold.scaling.plan import FP16_MAX, StreamPlan

from ..files import REAL
from .fused import fused
from .watch import Trace, count

PIXELS, TEXT = 16, 256
SIDES, BATCHES, DEVICES = (1024, 1536, 2048), (1, 2), ("cuda", "mps", "xpu")


@dataclass(frozen=True)
class Mode:
    """One way to run: its plan, and whether the streams are counted and the guard's flag is read."""

    plan: StreamPlan
    counters: bool = False
    guard: bool = False
    kernels: Callable[[torch.device], Kernels] = Slabs


_ONLINE = StreamPlan("online", DEFAULT)
MODES: Mapping[str, Mode] = {
    "none": Mode(StreamPlan()),
    "online": Mode(_ONLINE),
    "online + counters": Mode(_ONLINE, counters=True),
    "online + counters + guard": Mode(_ONLINE, counters=True, guard=True),
    "online with s, counters, guard": Mode(StreamPlan("online", Factors((1 / 64,), (0.5,), (0.25,))), True, True),
    "online, clamp, counters": Mode(replace(_ONLINE, clamp=FP16_MAX), counters=True),
    "fp32_residual": Mode(StreamPlan("fp32_residual")),
    "fp32_residual + counters + guard": Mode(StreamPlan("fp32_residual"), counters=True, guard=True),
    "fused: online": Mode(_ONLINE, kernels=fused),
    "fused: online + counters + guard": Mode(_ONLINE, counters=True, guard=True, kernels=fused),
    "fused: fp32_residual + counters + guard": Mode(StreamPlan("fp32_residual"), True, True, fused),
}


@dataclass(frozen=True)
class Shape:
    """The size of a call: pixels of a side, images at once, text tokens, dtype."""

    side: int
    batch: int
    text: int = TEXT
    dtype: torch.dtype = torch.float16

    @property
    def tokens(self) -> int:
        return (self.side // PIXELS) ** 2 + self.text

    def stream(self, arch: MossArch) -> int:
        """Bytes of the residual stream in 16 bits."""
        return self.batch * self.tokens * arch.dim * 2


class EmptyLinear(Linear):
    """A linear whose weights are left as they come: fake ones hold nothing, and filling them would need the device."""

    def reset_parameters(self) -> None:
        pass


class EmptyLayers(PlainLayers):
    Linear = EmptyLinear


@dataclass(frozen=True)
class FakeModel:
    """A model and its inputs without numbers."""

    model: MossDiT
    latent: Tensor
    sigma: Tensor
    context: Tensor

    @property
    def there(self) -> tuple[Tensor, ...]:
        """Everything that a call finds on the device."""
        return (*self.model.parameters(), *self.model.buffers(), self.latent, self.sigma, self.context)


def fake_model(device: str, arch: MossArch, shape: Shape, *, fused: bool = True) -> FakeModel:
    """Inside a FakeTensorMode: the built-in class and one call's inputs on `device`."""
    here = torch.device(device)
    model = MossDiT(arch, fused=fused, device=here, dtype=shape.dtype, operations=EmptyLayers).requires_grad_(False)
    edge = shape.side // PIXELS
    return FakeModel(
        model,
        torch.empty(shape.batch, arch.latent_channels, edge, edge, device=here, dtype=shape.dtype),
        torch.empty(shape.batch, device=here),
        torch.empty(shape.batch, shape.text, arch.text_dim, device=here, dtype=shape.dtype),
    )


def trace_call(
    device: str,
    shape: Shape,
    mode: Mode,
    depth: int,
    *,
    arch: MossArch = REAL,
    fused: bool = True,
    mask: bool = False,
    replaced: Mapping[int, BlockReplacement] | None = None,
) -> Trace:
    """One call of a model of `depth` blocks of the real shapes, as a node's run makes it."""
    arch = replace(arch, depth=depth)
    with FakeTensorMode(), torch.no_grad():
        fake = fake_model(device, arch, shape, fused=fused)
        counters = Counters(site_names(arch.text_blocks, arch.depth)) if mode.counters else None
        keep = torch.ones(shape.batch, shape.text, dtype=torch.bool, device=device) if mask else None

        def run() -> None:
            if counters is not None:
                counters.begin()
            out = fake.model(
                fake.latent,
                fake.sigma,
                fake.context,
                plan=mode.plan,
                dtype=shape.dtype,
                mask=keep,
                replace=replaced,
                observer=counters,
                kernels=mode.kernels(torch.device(device)),
            )
            if mode.guard:
                bad = ~out.isfinite().all()
                bool(bad | counters.bad_flag() if counters is not None else bad)
            if counters is not None:
                counters.commit()

        return count(device, run, *fake.there, *([] if keep is None else [keep]))


@dataclass(frozen=True)
class Row:
    """What one call does. *_block: in one joint block. peak: bytes of activations, `streams` of the 16-bit stream."""

    device: str
    side: int
    batch: int
    mode: str
    peak: int
    streams: float
    kernels_block: int
    pointwise_block: int
    products_block: int
    attention_block: int
    product_flops_block: int
    attention_flops_block: int
    kernels: int
    pointwise: int
    products: int
    waits: int
    wide: int
    elsewhere: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@cache
def row(device: str, shape: Shape, name: str, arch: MossArch = REAL) -> Row:
    """One mode at one size. Blocks are alike, so two depths give one block and, from it, the whole model."""
    less, more = (trace_call(device, shape, MODES[name], depth, arch=arch) for depth in (1, 2))

    def block(of: Any) -> int:
        return int(of(more) - of(less))

    def whole(of: Any) -> int:
        return int(of(less) + (arch.depth - 1) * block(of))

    def kernels(trace: Trace) -> int:
        return len(trace.kernels)

    def pointwise(trace: Trace) -> int:
        return trace.moved("pointwise")

    def products(trace: Trace) -> int:
        return trace.moved("product")

    return Row(
        device, shape.side, shape.batch, name, more.peak, more.peak / shape.stream(arch),
        block(kernels), block(pointwise), block(products), block(lambda trace: trace.moved("attention")),
        block(lambda trace: trace.flops("product")), block(lambda trace: trace.flops("attention")),
        whole(kernels), whole(pointwise), whole(products),
        len(more.waits), len(more.wide), len(more.elsewhere),
    )  # fmt: skip


def rows(devices: tuple[str, ...] = DEVICES) -> Iterator[Row]:
    """Every mode, size and batch on every device."""
    for device in devices:
        for side in SIDES:
            for batch in BATCHES:
                for name in MODES:
                    yield row(device, Shape(side, batch), name)
